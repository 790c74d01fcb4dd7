"""Too little calibration data is refused before anything is fitted, and what is counted beforehand is what comes."""

import re

import pytest
import torch
from torch import nn

from crystallite.compression import model_fit, sample_check
from crystallite.compression.compress import compress
from crystallite.compression.session import Session
from crystallite.core.errors import InvalidOption
from crystallite.models.record import record


class Pooled(nn.Module):
    """Layers for every token, for every sample, and for every place of a table."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 12)
        self.token, self.pool, self.table = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.register_buffer("places", torch.randn(5, 12))

    def forward(self, input_ids, attention_mask):
        x = torch.tanh(self.token(self.embed(input_ids))) + self.table(self.places).sum(0)
        return self.pool((x * attention_mask[..., None]).sum(1))


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 6)

    def forward(self, x):
        return self.head(self.gru(x)[0][:, -1])


def padded(length, count=30):
    lengths = torch.arange(count) % length + 1
    ids = torch.randint(0, 9, (count, length))
    return {"input_ids": ids, "attention_mask": (torch.arange(length) < lengths[:, None]).long()}


CASES = {
    "vectors": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)), [torch.randn(40, 6)] * 4),
    "images": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, 2), nn.Flatten(), nn.Linear(16, 6)),
        [torch.randn(20, 2, 7, 7)] * 4,
    ),
    "padded texts": (Pooled, [padded(4), padded(7), padded(5), padded(7)]),
    "sequences": (Last, [torch.randn(20, 5, 6)] * 4),
    "sequences of several lengths": (Last, [torch.randn(20, n, 6) for n in (5, 9, 4, 5)]),
}  # fmt: skip


def test_what_is_said_of_several_layers_that_have_too_little_data():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    said = (
        r"got 4 in the part that is fitted on; 2 other layers have too few as well; pass at least 16 times as much "
        r"data, or name these layers in ignore="
    )
    with pytest.raises(InvalidOption, match=said):
        compress(model, torch.randn(5, 64), budget=0.5)
    with pytest.raises(InvalidOption, match="fitted on; pass at least 16 times as much data, or name the layer in"):
        compress(nn.Sequential(nn.Linear(64, 8)), torch.randn(5, 64), budget=0.5)


@pytest.mark.parametrize("name", CASES)
def test_counted_before_is_what_layers_are_fitted_on(name, monkeypatch):
    torch.manual_seed(0)
    build, data = CASES[name]
    counted, came = {}, {}
    rows = sample_check._rows

    def keep(session, layer, call, example):
        found = rows(session, layer, call, example)
        counted[layer] = None if None in (found, counted.get(layer, 0)) else counted.get(layer, 0) + found
        return found

    monkeypatch.setattr(sample_check, "_rows", keep)
    monkeypatch.setattr(Session, "check_samples", lambda self, layer, inputs, there: came.setdefault(layer, there))
    compress(build().eval(), data, budget=0.9)
    assert came
    assert {layer: n for layer, n in counted.items() if n is not None}.items() <= came.items()
    unknown = {layer for layer in came if counted.get(layer) is None}
    assert unknown == ({"table"} if name == "padded texts" else set())


@pytest.mark.parametrize("options", [{"budget": 0.9}, {"tolerance": 0.5}, {"blocks": 2}])
def test_too_few_are_refused_before_the_work(options, monkeypatch):
    for place, name in ((model_fit, "probe"), (model_fit, "fit_layers_")):
        monkeypatch.setattr(place, name, lambda *_: pytest.fail("work has begun"))
    model = nn.Sequential(nn.Linear(40, 200), nn.ReLU(), nn.Linear(200, 40))
    with pytest.raises(
        InvalidOption, match=r"^2: expected at least \d+ positions .* in the part that is fitted on"
    ) as error:
        compress(model, torch.randn(30, 40), **options)
    monkeypatch.undo()
    enough = 30 * int(re.search(r"at least (\d+) times as much data", str(error.value))[1])
    if "tolerance" not in options:
        compress(model, torch.randn(enough, 40), **options)


def test_layers_that_are_left_alone_need_none():
    model = nn.Sequential(nn.Linear(8, 200), nn.ReLU(), nn.Linear(200, 8), nn.ReLU(), nn.Linear(8, 8))
    assert compress(model, torch.randn(100, 8), budget=0.999, ignore="2") is not None


def test_a_minor_layer_that_few_positions_reach_is_left_alone():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
            self.pooler = nn.Linear(16, 16)  # reads one position of each sample

        def forward(self, x):
            y = self.layers(x)
            return y, self.pooler(y[:, 0])

    torch.manual_seed(0)
    model = Encoder().eval()
    small = compress(model, torch.randn(12, 50, 16), budget=0.5)
    (pooler,) = [change for change in record(small).changes if change.name == "pooler"]
    assert pooler.operators[0].kind == "left alone"
    assert "reads 16 inputs" in pooler.operators[0].reason
    assert torch.equal(small.pooler.weight, model.pooler.weight)
