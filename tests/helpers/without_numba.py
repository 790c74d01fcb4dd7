"""Tests where numba cannot be imported: `python -m tests.helpers.without_numba [ARGUMENTS OF PYTEST]`."""

import sys


def forbid_numba() -> None:
    """An import of numba fails from here on, in all of this process."""
    sys.modules["numba"] = sys.modules["llvmlite"] = None


if __name__ == "__main__":
    forbid_numba()
    import pytest

    rooms = [f"tests/{room}" for room in ("core", "structure", "annealing", "operators", "reorganization")]
    sys.exit(pytest.main(sys.argv[1:] or ["-q", "-p", "no:cacheprovider", "-m", "not slow", *rooms]))
