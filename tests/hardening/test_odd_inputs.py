"""Every verb × every odd input: it works, or raises a `CrystalliteError`; nothing else, and no half-written file."""

import inspect
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import crystallite as cx

SIZES = (8, 12, 4)
X = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4)).eval()


def small(model):
    """A model of blocks that a verb can be given, whatever weights it has."""
    layer = nn.Linear(8, 8)
    layer.weight.data *= torch.block_diag(torch.ones(4, 4), torch.ones(4, 4))
    layer.requires_grad_(False)
    blocks = cx.BlockLinear.from_dense(layer.weight, layer.bias, cx.decompose(layer.weight.detach()))
    return nn.Sequential(blocks, model)


def filled(value):
    def change(model):
        model[0].weight.data.fill_(value)

    return change


def one(value):
    def change(model):
        model[2].weight.data[1, 3] = value

    return change


def negated(model):
    """Weights whose minus sign is a bit of the tensor, as in the imaginary part of a conjugate."""
    model[0].weight = nn.Parameter(torch.randn(12, 8, dtype=torch.complex64).conj().imag, requires_grad=False)


def zero_sized(model):
    model[0], model[2] = nn.Linear(8, 0), nn.Linear(0, 4)


def no_inputs(model):
    model[0] = nn.Linear(0, 12)


def nested(model):
    model[0].weight = nn.Parameter(torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]), requires_grad=False)


MODELS = {
    "NaN": one(torch.nan), "all NaN": filled(torch.nan), "infinity": one(torch.inf), "huge": filled(3e38),
    "tiny": filled(1e-45), "zeros": filled(0.0), "constant": filled(1.0), "no neurons": zero_sized,
    "no inputs": no_inputs, "negated": negated, "nested": nested,
    "complex": lambda model: model[0].to(torch.complex64),
    "float16": lambda model: model.half(), "on meta": lambda model: model.to("meta"),
    "sparse": lambda model: setattr(model[0], "weight", nn.Parameter(model[0].weight.data.to_sparse(), False)),
    "no layers": lambda model: model.__delitem__(slice(None)),
}  # fmt: skip
DATA = {
    "NaN": lambda: X.clone().fill_(torch.nan), "one NaN": lambda: X.index_fill(0, torch.tensor([3]), torch.nan),
    "infinity": lambda: X.index_fill(0, torch.tensor([3]), torch.inf), "huge": lambda: X * 1e38,
    "zeros": lambda: X * 0, "one sample": lambda: X[:1], "no samples": lambda: X[:0], "no features": lambda: X[:, :0],
    "other features": lambda: X[:, :5], "integers": lambda: X.long(), "complex": lambda: X.to(torch.complex64),
    "float64": lambda: X.double(), "negated": lambda: torch.complex(X, X).conj().imag, "NumPy": lambda: X.numpy(),
    "nested": lambda: torch.nested.nested_tensor([X[:2], X[:3]]), "text": lambda: "data.pt", "nothing": lambda: None,
    "number": lambda: 5, "objects": lambda: [object()], "empty": list, "a scalar": lambda: torch.tensor(1.0),
    "sparse": lambda: X.to_sparse(), "meta": lambda: X.to("meta"), "text in a dict": lambda: {"x": "y"},
}  # fmt: skip
MATRICES = {
    "NaN": lambda: X.index_fill(0, torch.tensor([3]), torch.nan), "infinity": lambda: X.clone().fill_(torch.inf),
    "huge": lambda: X * 1e38, "zeros": lambda: X * 0, "constant": lambda: torch.ones(4, 4), "tiny": lambda: X * 1e-45,
    "no rows": lambda: X[:0], "no columns": lambda: X[:, :0], "nothing": lambda: X[:0, :0], "vector": lambda: X[0],
    "negated": lambda: torch.complex(X, X).conj().imag, "complex": lambda: X.to(torch.complex64),
    "conjugated": lambda: torch.complex(X, X).conj(), "one entry": lambda: X[:1, :1], "text": lambda: [["a"]],
    "nested": lambda: torch.nested.nested_tensor([X[0], X[1, :3]]), "objects": lambda: np.array([[object()]]),
    "ragged": lambda: [[1.0], [1.0, 2.0]], "sparse": lambda: X.to_sparse(), "None": lambda: None, "dates": lambda:
    np.array([["2020-01-01"]], "datetime64[D]"), "quantised": lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8),
    "meta": lambda: X.to("meta"), "float16": lambda: X.half(), "integers": lambda: X.long(), "masked": lambda:
    np.ma.masked_less(X.numpy(), 0), "big-endian": lambda: X.numpy().astype(">f4"),
}  # fmt: skip


def _labels(x):
    return x, torch.zeros(len(x), dtype=torch.int64) if isinstance(x, torch.Tensor) else x


VERBS = {
    "analyze": lambda model, data, path: cx.analyze(model),
    "anneal": lambda model, data, path: cx.anneal(model),
    "reorganize": lambda model, data, path: cx.reorganize(model, only_if_faster=False),
    "reorganize exactly": lambda model, data, path: cx.reorganize(model, level=None, only_if_faster=False),
    "compress": lambda model, data, path: cx.compress(model, data, budget=0.6),
    "compress in blocks": lambda model, data, path: cx.compress(model, data, blocks=2),
    "compress by tolerance": lambda model, data, path: cx.compress(model, data, tolerance=0.5),
    "polish": lambda model, data, path: cx.compress(model, data, budget=0.6, polish_steps=2, checkpoint=path / "c"),
    "upgrade": lambda model, data, path: cx.upgrade(model, data=data, blocks=2, epochs=1, checkpoint=path / "c"),
    "validate": lambda model, data, path: cx.validate(model, network(), data),
    "sweep": lambda model, data, path: cx.sweep(model, data, [0.1, 0.01]),
    "discover": lambda model, data, path: cx.discover(model, data, samples=16),
    "export": lambda model, data, path: cx.export(model, path / "m.onnx", data),
    "report": lambda model, data, path: cx.report(model, path / "r.html"),
    "summary": lambda model, data, path: cx.summary(small(model)),
    "restore": lambda model, data, path: cx.restore(small(model)),
    "save": lambda model, data, path: cx.load(cx.save(small(model), path / "a", source=model)),
}
WITH_DATA = ("compress", "compress in blocks", "polish", "upgrade", "validate", "sweep", "discover", "export")
MATRIX_VERBS = {
    "anneal": cx.anneal,
    "decompose": cx.decompose,
    "decompose directed": lambda matrix: cx.decompose(matrix, "directed"),
    "by matrices": lambda matrix: cx.decompose(matrix, engine="matrix"),
    "level_profile": cx.level_profile,
    "hubs": cx.hubs,
    "analyze": lambda matrix: cx.analyze({"w": matrix}),
    "hash": lambda matrix: cx.source_sha256({"w": matrix}),
    "BlockLinear": lambda matrix: cx.BlockLinear.from_dense(matrix, None, cx.decompose(torch.eye(3))),
}


def works_or_refuses(verb, *arguments, folder=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of some of these itself
        try:
            verb(*arguments)
            return
        except cx.CrystalliteError as error:
            message = str(error)
    assert len(message) > 10
    if folder is not None:  # checkpoints of what had begun may stay
        written = {path.name for path in folder.rglob("*") if "c" not in path.relative_to(folder).parts}
        assert not written


@pytest.mark.parametrize("odd", MODELS)
@pytest.mark.parametrize("verb", VERBS)
def test_odd_weights(tmp_path, verb, odd):
    model = network()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        MODELS[odd](model)
    works_or_refuses(VERBS[verb], model, X, tmp_path, folder=tmp_path)


@pytest.mark.parametrize("odd", DATA)
@pytest.mark.parametrize("verb", WITH_DATA)
def test_odd_data(tmp_path, verb, odd):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = DATA[odd]()
    works_or_refuses(VERBS[verb], network(), data, tmp_path, folder=tmp_path)
    if isinstance(data, torch.Tensor) and not data.is_nested and data.ndim and verb in ("upgrade", "validate"):
        works_or_refuses(VERBS[verb], network(), _labels(data), tmp_path, folder=tmp_path)


@pytest.mark.parametrize("odd", MATRICES)
@pytest.mark.parametrize("verb", MATRIX_VERBS)
def test_odd_matrices(verb, odd):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        matrix = MATRICES[odd]()
    works_or_refuses(MATRIX_VERBS[verb], matrix)


KEYWORDS = {
    cx.analyze: [network()], cx.anneal: [X], cx.decompose: [X], cx.level_profile: [X], cx.hubs: [X],
    cx.reorganize: [network()], cx.compress: [network(), X], cx.upgrade: [network()], cx.discover: [network(), X],
    cx.validate: [network(), network(), X], cx.sweep: [network(), X], cx.save: [small(network()), "a"],
    cx.export: [network(), "m.onnx", X], cx.report: [network()],
}  # fmt: skip
WRONG = [object(), "nonsense", -3, 10**30, float("nan"), float("inf"), [None], {"a": 1}, b"x", 2.5, True, np.zeros(2)]
OPTIONS = [
    pytest.param(verb, name, id=f"{verb.__name__}-{name}")
    for verb, given in KEYWORDS.items()
    for name in [*inspect.signature(verb).parameters][len(given) :]
    if name not in ("progress", "metadata", "files", "title", "front", "monitor", "verdict", "sweep", "reorganized")
]
COSTLY = {"polish_steps", "epochs", "samples"}  # what so large a number asks for is done
NEEDED = {cx.compress: {"budget": 0.6}, cx.upgrade: {"data": X, "blocks": 2, "epochs": 1}}


@pytest.mark.parametrize(("verb", "name"), OPTIONS)
def test_odd_options(tmp_path, monkeypatch, verb, name):
    """Of another type, or far outside what is meant."""
    monkeypatch.chdir(tmp_path)
    for wrong in WRONG:
        if name in COSTLY and isinstance(wrong, int) and wrong > 10:
            continue
        given = NEEDED.get(verb, {}) | {name: wrong}
        works_or_refuses(lambda given=given: verb(*KEYWORDS[verb], **given))
