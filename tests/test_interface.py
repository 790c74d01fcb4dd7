"""The public verbs spell out what they take: type checkers, people and Python itself see a mistyped word."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import crystallite as cx

SOURCE = Path(cx.__file__).parents[1]
# a call of every public verb, complete but for the options
CALLS = {
    "analyze": "cx.analyze(model",
    "anneal": "cx.anneal(w",
    "baselines.compare": "cx.baselines.compare(model, model, x, calibration=x",
    "block_roles": "cx.block_roles(model, x",
    "compress": "cx.compress(model, x",
    "decompose": "cx.decompose(w",
    "discover": "cx.discover(model, x",
    "export": 'cx.export(model, "x.onnx", x',
    "hubs": "cx.hubs(w",
    "level_profile": "cx.level_profile(w",
    "modularity": "cx.modularity(w",
    "load": 'cx.load("x"',
    "reorganize": "cx.reorganize(model",
    "report": "cx.report(model",
    "restore": "cx.restore(model",
    "save": 'cx.save(model, "x"',
    "Service.load": 'cx.Service.load("x"',
    "StructureMonitor": "cx.StructureMonitor(model",
    "summary": "cx.summary(model",
    "sweep": "cx.sweep(model, x",
    "upgrade": "cx.upgrade(model, data=x",
    "validate": "cx.validate(model, model, x",
}
HEAD = "import numpy as np\nimport torch\nfrom torch import nn\n\nimport crystallite as cx\n\nmodel = nn.Linear(4, 4)\n"
HEAD += "x = torch.ones(4, 4)\nw = np.ones((4, 4))\n"


def function(name):
    found = cx
    for part in name.split("."):
        found = getattr(found, part)
    return found


def mistyped(name):
    """A keyword of the verb with two letters swapped."""
    parameters = list(inspect.signature(function(name)).parameters)
    keyword = max(parameters, key=len)
    middle = len(keyword) // 2
    wrong = keyword[: middle - 1] + keyword[middle] + keyword[middle - 1] + keyword[middle + 1 :]
    return keyword, wrong if wrong != keyword else f"{keyword}s"


def test_a_type_checker_finds_a_mistyped_keyword_of_every_verb(tmp_path):
    pytest.importorskip("mypy")
    lines = [f"{call}, {mistyped(name)[1]}=None)" for name, call in CALLS.items()]
    (tmp_path / "script.py").write_text(HEAD + "\n".join(lines) + "\n")
    words = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "script.py"]
    # what stands in the file is judged, not the libraries; those below are large and not even read
    libraries = ",".join(f"{name}.*" for name in ("torch", "numpy", "scipy", "transformers", "ray", "onnx", "sympy"))
    config = tmp_path / "mypy.ini"
    config.write_text(f"[mypy]\n[mypy-{libraries}]\nfollow_imports = skip\nfollow_imports_for_stubs = True\n")
    words += ["--follow-imports", "silent", "--ignore-missing-imports", "--config-file", str(config)]
    environment = {**os.environ, "MYPYPATH": str(SOURCE)}
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=1800
    )
    first = HEAD.count("\n") + 1
    found = {int(n) - first: text for n, text in re.findall(r"^script\.py:(\d+): error: (.*)$", done.stdout, re.M)}
    for i, name in enumerate(CALLS):
        assert i in found, f"{name}: {lines[i]}\n{done.stdout}{done.stderr}"
        assert mistyped(name)[1] in found[i] or "overload" in found[i], found[i]
    assert sorted(found) == list(range(len(CALLS))), done.stdout


@pytest.mark.parametrize("name", CALLS)
def test_keywords_are_spelled_out_and_typed(name):
    for keyword in inspect.signature(function(name)).parameters.values():
        assert keyword.kind not in (keyword.VAR_KEYWORD, keyword.VAR_POSITIONAL), keyword
        assert keyword.annotation is not keyword.empty, keyword


@pytest.mark.parametrize("name", CALLS)
def test_a_mistyped_keyword_names_the_nearest(name):
    keyword, wrong = mistyped(name)
    here = {"cx": cx, "model": nn.Linear(4, 4), "x": torch.ones(4, 4), "w": np.ones((4, 4))}
    with pytest.raises(TypeError, match=rf"unexpected keyword argument '{wrong}'.* '{keyword}'\?"):
        eval(f"{CALLS[name]}, {wrong}=None)", here)


DOCUMENTED = [name for name in cx.__all__ if inspect.isfunction(getattr(cx, name))]


@pytest.mark.parametrize("name", sorted({*CALLS, *DOCUMENTED}))
def test_docstrings_have_sections_and_name_every_keyword(name):
    text = inspect.getdoc(function(name))
    described = re.search(r"^Args:\n((?: {4}.*\n|\n)+)", text, re.M)[1]
    named = {n for line in re.findall(r"^ {4}(\w[\w, ]*):", described, re.M) for n in line.split(", ")}
    assert named == set(inspect.signature(function(name)).parameters)
    assert "\nRaises:\n" in text
    assert "\nReturns:\n" in text or inspect.isclass(function(name))
    assert not re.search(r"^>>>", text, re.M)


def network():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


X = torch.randn(64, 8)


@pytest.mark.parametrize(
    "verb",
    [
        lambda **options: cx.analyze(network(), **options),
        lambda **options: cx.reorganize(network(), **options),
        lambda **options: cx.compress(network(), X, budget=0.5, **options),
        lambda **options: cx.upgrade(network(), data=[X], blocks=2, **options),
        lambda **options: cx.sweep(network(), X, **options),
        lambda **options: cx.report(network(), **options),
        lambda **options: cx.baselines.compare(network(), network(), X, calibration=X, methods=["SVD"], **options),
    ],
    ids=["analyze", "reorganize", "compress", "upgrade", "sweep", "report", "compare"],
)
@pytest.mark.parametrize("options", [{"targets": "22"}, {"targets": ["*", "22"]}, {"ignore": "22"}], ids=str)
def test_a_pattern_without_a_match_names_the_nearest(verb, options):
    (option,) = options
    with pytest.raises(cx.InvalidOption, match=rf"{option}: no layer with weights matches '22'; the nearest is '2'"):
        verb(**options)


@pytest.mark.parametrize(
    ("call", "near"),
    [
        (lambda: cx.analyze(network(), null="empiricle"), "empirical"),
        (lambda: cx.analyze(network(), correction="bonferoni"), "bonferroni"),
        (lambda: cx.analyze(network(), rule="neymann"), "neyman"),
        (lambda: cx.analyze(network(), random_walk="litteral"), "literal"),
        (lambda: cx.analyze(network(), engine="lokal"), "local"),
        (lambda: cx.compress(network(), X, budget=0.5, objective="latnecy"), "latency"),
        (lambda: cx.compress(network(), X, tolerance=0.5, risk="deviaton"), "deviation"),
        (lambda: cx.upgrade(network(), data=[X], blocks=2, partition="regoins"), "regions"),
        (lambda: cx.validate(network(), network(), X, "acuracy"), "accuracy"),
        (lambda: cx.sweep(network(), X, rule=["both", "neymann"]), "neyman"),
        (lambda: cx.baselines.compare(network(), network(), X, calibration=X, methods=["SDV"]), "SVD"),
        (lambda: cx.Service.load("x", engine="rya"), "ray"),
        (lambda: cx.report(network()).figures("x", "pgn"), "png"),
    ],
)
def test_a_mistyped_choice_names_the_nearest(call, near):
    with pytest.raises(cx.InvalidOption, match=f"did you mean '{near}'"):
        call()


def test_functions_replace_one_file_and_say_so_and_save_replaces_no_folder(tmp_path):
    """Cells of notebooks run again; a folder may hold a verdict."""
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(60, 8)
    page, graph = tmp_path / "page.html", tmp_path / "model.onnx"
    for file in (page, graph):
        file.write_text("old")
    cx.report(model, page)
    cx.export(model, graph, x[:8])
    assert b"old" not in (page.read_bytes()[:3], graph.read_bytes()[:3])
    for verb in (cx.report, cx.export):
        assert "is replaced" in verb.__doc__
        assert "the command" in verb.__doc__
    small = cx.compress(model, x, budget=0.5)
    cx.save(small, tmp_path / "small")
    with pytest.raises(cx.InvalidOption, match="exists already"):
        cx.save(small, tmp_path / "small")
