"""Tests where numba cannot be imported: `python -m tests.helpers.without_numba [ARGUMENTS OF PYTEST]`."""

import sys

sys.modules["numba"] = sys.modules["llvmlite"] = None  # an import of them fails from here on

if __name__ == "__main__":
    import pytest

    rooms = [f"tests/{room}" for room in ("core", "structure", "annealing", "operators", "reorganization")]
    sys.exit(pytest.main(sys.argv[1:] or ["-q", "-p", "no:cacheprovider", "-m", "not slow", *rooms]))
