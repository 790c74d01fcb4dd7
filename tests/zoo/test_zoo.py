"""Every verb on every model of the zoo works, or refuses for a reason that is written in the registry."""

import functools
import tempfile
import warnings
from pathlib import Path

import pytest

from tests.zoo.cases import Case
from tests.zoo.models import ZOO
from tests.zoo.running import run_models
from tests.zoo.support_page import PAGE, page
from tests.zoo.tables import known_outcomes, problems
from tests.zoo.verbs import VERBS, run_all

FAST = (
    "llama", "gpt2", "mixtral", "bert_classifier", "vit", "bidirectional_lstm", "tied_head", "shared_layers", "mlp",
)  # fmt: skip
QUICK = ["analyze", "open_folder", "units", "exact", "compress", "validate", "save", "generate", "report"]


@pytest.mark.parametrize("name", FAST)
def test_quick_cells(name, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries that build the models
        case = Case(ZOO[name], tmp_path)
    cells = {verb: outcome.to_json() for verb, outcome in run_all(case, QUICK)}
    assert problems(name, cells, known_outcomes().get(name, {})) == []


@functools.cache
def family(name):
    """All cells of a family: its folders are opened again by one fresh process."""
    names = [other for other, entry in ZOO.items() if entry.family == name and entry.is_available]
    with tempfile.TemporaryDirectory() as folder:
        return run_models(names, list(VERBS), Path(folder))


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_all_cells(name):
    if not ZOO[name].is_available:
        pytest.skip(f"needs {ZOO[name].needs}")
    assert problems(name, family(ZOO[name].family)[name], known_outcomes().get(name, {})) == []


def test_the_page_lists_every_model():
    assert PAGE.read_text() == page(known_outcomes(), ZOO)
    assert set(known_outcomes()) == set(ZOO)


def cell(status, text=""):
    return {"save": {"status": status, "text": text, "frames": []}}


@pytest.mark.parametrize(
    ("came", "known"),
    [
        (cell("crash"), cell("crash")),
        (cell("wrong"), {}),
        (cell("nothing"), {}),
        (cell("refused", "too large"), cell("works")),
        (cell("works"), cell("refused", "too large")),
        (cell("refused", "layer a.b: of a kind that is not known"), cell("refused", "layer a.b: its weights are tied")),
    ],
)
def test_what_is_a_problem(came, known):
    assert len(problems("model", came, known)) == 1


def test_the_same_reason_for_another_layer_is_no_problem():
    known = cell("refused", "model.layers.0.up: got 832 samples")
    assert problems("model", cell("refused", "model.layers.1.down: got 64 samples"), known) == []
