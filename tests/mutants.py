"""How many small faults the tests notice: `python -m tests.mutants [COUNT] [SEED]`, with `pip install cosmic-ray`.

Draws COUNT of the faults that cosmic-ray would plant in `structure/` and `annealing/`, and runs the tests of the room
on each of them, in a fork that has torch loaded already. Kernels run as Python, without numba; so what only a compiler
sees (`structure/vector_lanes.py`, the loops of `annealing/kernels.py`) is left out. A fault that leaves the code the
same, as in an annotation, or is no Python is not counted; one with which the tests do not end counts as noticed.
"""

from __future__ import annotations

import ast
import difflib
import importlib.abc
import importlib.machinery
import os
import random
import resource
import sys
import time
from pathlib import Path

from tests.helpers.without_numba import forbid_numba

ROOT = Path(__file__).parents[1]
LEFT_OUT = {"vector_lanes.py", "kernels.py", "__init__.py"}  # kernels.py of structure runs, and is put back below
COMPILING = {"compiled", "inlined", "overload"}  # decorators that do nothing here
LONG = "tests/annealing/test_calibration.py"


def main(count: int = 60, seed: int = 0) -> None:
    forbid_numba()
    source = ROOT / "src" / "crystallite"
    files = [
        p for room in ("structure", "annealing") for p in sorted((source / room).glob("*.py")) if p.name not in LEFT_OUT
    ]
    files.append(source / "structure" / "kernels.py")
    faults = [(path, *fault) for path in files for fault in _faults(path)]
    random.Random(seed).shuffle(faults)
    _load_everything_else()
    seconds = {room: _baseline(room) for room in ("structure", "annealing")}
    noticed, survivors = 0, []
    for path, name, occurrence in faults:
        if noticed + len(survivors) == count:
            break
        code = path.read_text()
        changed = _planted(code, name, occurrence)
        try:
            if changed is None or _meaning(changed) == _meaning(code):
                continue
        except SyntaxError:
            continue
        if _run(path, changed, 3 * seconds[path.parent.name] + 20):
            noticed += 1
        else:
            survivors.append(path)
            print(
                *difflib.unified_diff(code.splitlines(), changed.splitlines(), path.name, name, n=0, lineterm=""),
                sep="\n",
            )
        print(f"{noticed} of {noticed + len(survivors)} noticed", flush=True)
    print(f"\n{noticed} of {count} faults noticed: {noticed / count:.0%} (of {len(faults)}, seed {seed})")


def _faults(path):
    from cosmic_ray.ast import ast_nodes, get_ast_from_path
    from cosmic_ray.plugins import get_operator, operator_names

    tree = get_ast_from_path(path)
    for name in operator_names():
        operator = get_operator(name)
        if not operator.arguments():
            positions = [where for node in ast_nodes(tree) for where in operator().mutation_positions(node)]
            yield from ((name, occurrence) for occurrence in range(len(positions)))


def _planted(code, name, occurrence):
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    return mutate_code(code, get_operator(name)(), occurrence)


def _meaning(code):
    """The code without what changes nothing when it runs: annotations, docstrings, decorators that compile."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                argument.annotation = None
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            node.decorator_list = [d for d in node.decorator_list if getattr(d, "id", "") not in COMPILING]
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and isinstance(node.body[0], ast.Expr):
            node.body[0] = ast.Pass()
    return ast.dump(tree)


def _load_everything_else():
    for name in (
        "torch",
        "scipy.stats",
        "scipy.sparse.csgraph",
        "networkx",
        "hypothesis",
        "pytest",
        "pandas",
        "PIL.Image",
    ):
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)


class _Planted(importlib.abc.MetaPathFinder):
    def __init__(self, path, code):
        relative = path.relative_to(ROOT / "src").with_suffix("")
        self.name, self.path, self.code = ".".join(relative.parts), path, code

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        loader = importlib.machinery.SourceFileLoader(name, str(self.path))
        loader.get_code = lambda _name: compile(self.code, str(self.path), "exec")
        return importlib.util.spec_from_file_location(name, self.path, loader=loader)


def _baseline(room):
    before = time.process_time(), os.times().children_user
    if _run(ROOT / "src" / "crystallite" / room / "none.py", None, 3000):
        sys.exit(f"tests/{room} fail as they are")
    return os.times().children_user - before[1]


def _run(path, code, seconds):
    """Whether the tests of a room fail with this code in place of a file."""
    child = os.fork()
    if child == 0:
        import pytest

        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 1))
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        if code is not None:
            sys.meta_path.insert(0, _Planted(path, code))
        again = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"  # in the process that forked
        words = [
            "-q",
            "-x",
            "-W",
            again,
            "-p",
            "no:cacheprovider",
            "-p",
            "no:randomly",
            "-m",
            "not slow",
            f"--deselect={LONG}",
        ]
        os._exit(pytest.main([*words, f"tests/{path.parent.name}"]))
    return os.waitpid(child, 0)[1] != 0


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
