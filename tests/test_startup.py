"""What an import costs: heavy packages are loaded when they are used, and every public name is there all the same."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import crystallite as cx

HEAVY = {"numba", "numpy", "scipy", "scipy.stats", "torch", "tqdm", "transformers"}
MINUTES = 600  # a limit for a busy machine, no measurement


def run(code):
    words = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=MINUTES)


def loaded_by(code):
    done = run(f"import sys\n{code}\nprint(*sys.modules, file=sys.stderr)")
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def test_the_import_loads_nothing_heavy():
    assert not loaded_by("import crystallite") & HEAVY


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["compress", "--help"],
        ["serve", "--help"],
        ["completion", "bash"],
        ["analyze"],
        ["analyse"],
        ["compress", "model", "--budgte", "0.5"],
        ["analyze", "model.safetensors", "--rule", "some"],
        ["compress", "model", "--out", "small", "--calibration", "none.npz", "--budget", "1", "--confidence", "0.9"],
        ["reorganize", "model", "--out", "."],
    ],
)
def test_help_and_bad_arguments_load_nothing_heavy(arguments):
    loaded = loaded_by(
        f"from crystallite.cli.main import main\ntry:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
    )
    assert not loaded & HEAVY


def test_the_first_use_loads_what_it_needs():
    assert "torch" in loaded_by("import crystallite\ncrystallite.reorganize")


def test_every_public_name_is_there_and_where_type_checkers_look_for_it():
    tree = ast.parse(Path(cx.__file__).read_text())
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    declared = {a.name: node.module for node in checked.body for a in node.names}
    assert sorted(declared) == cx.__all__ == sorted({*cx._HOME, *cx._MODULES})
    for name, home in cx._HOME.items():
        assert declared[name] == home
    assert set(cx.__all__) <= set(dir(cx))
    for name in cx.__all__:
        assert getattr(cx, name) is not None


@pytest.mark.parametrize("name", ["report", "export"])
def test_verbs_stay_verbs_when_their_rooms_are_imported(name):
    done = run(
        f"import crystallite as cx\nimport crystallite.{name}\nfrom crystallite.report import build\n"
        f"assert callable(cx.{name}), cx.{name}\nfrom crystallite import {name}\nassert callable({name})\n"
    )
    assert done.returncode == 0, done.stderr


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'analyse'"):
        cx.analyse  # noqa: B018
    assert cx.baselines.METHODS
    assert cx.nulls.Uniform
    assert cx.__version__
