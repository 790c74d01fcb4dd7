"""A model run in stretches shows what a whole run shows."""

import pytest
import torch
from torch import nn

from crystallite.data.batch import Batch
from crystallite.statistics.observer import ForwardPlan, observe, outputs_of


class Layer(nn.Module):
    """A pre-norm feed-forward layer; its code, not a module, adds to the stream."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(width), nn.Linear(width, 24), nn.Linear(24, width)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x, scale, verbose=False):
        return x + self.dropout(self.second(torch.relu(self.first(self.norm(x))) * scale))


class Stack(nn.Module):
    def __init__(self, depth=3, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(4, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.leave = nn.Linear(width, 2)

    def forward(self, x, scale):
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x, scale, verbose=True)
        return self.leave(x)


NAMES = ["enter", *(f"layers.{i}.{part}" for i in range(3) for part in ("first", "second")), "leave"]


@pytest.fixture
def stack():
    return Stack().eval(), Batch(0, 5, (torch.randn(5, 4), torch.tensor(2.0)))


def everything(spec):
    return torch.arange(spec.numel())


def test_stations_are_found_by_what_is_handed_on(stack):
    found = ForwardPlan.of(stack[0], NAMES, stack[1])
    assert found.boundaries == ("layers.0", "layers.1", "layers.2")
    assert found.segments[0] == (("enter",), ("layers.0.first",), ("layers.0.second",))
    assert found.segments[3] == (("leave",),)


def test_a_run_in_stretches_sees_what_a_whole_run_sees(stack):
    model, batch = stack
    plan = ForwardPlan.of(model, NAMES, batch)
    whole = ForwardPlan((), (), frozenset(), frozenset())
    expected, _ = observe(model, batch, whole, 0, None, NAMES, everything)
    carry = None
    for segment, layer_groups in enumerate(plan.segments):
        names = [name for layer_group in layer_groups for name in layer_group]
        assert torch.equal(outputs_of(model, batch, plan, segment, carry), model(*batch.positional))
        seen, carry = observe(model, batch, plan, segment, carry, names, everything)
        for name in names:
            assert torch.equal(seen[name].inputs, expected[name].inputs)
            assert torch.equal(seen[name].outputs, expected[name].outputs)
    assert all("forward" not in vars(module) for module in model.modules())


def test_what_is_added_to_a_stream_is_seen(stack):
    model, batch = stack
    plan = ForwardPlan.of(model, NAMES, batch)
    seen, _ = observe(model, batch, plan, 0, None, ["enter", "layers.0.second"], everything)
    assert seen["enter"].residual is None
    assert torch.equal(seen["layers.0.second"].residual, seen["enter"].outputs)


def test_a_run_ends_before_a_layer_it_need_not_reach(stack):
    model, batch = stack
    plan = ForwardPlan.of(model, NAMES, batch)
    model.layers[0].second.weight.data.fill_(torch.nan)
    model.layers[0].second.register_forward_hook(lambda *_: pytest.fail("ran too far"))
    seen, returned = observe(model, batch, plan, 0, None, ["enter"], everything, "layers.0.second")
    assert returned is None
    assert torch.equal(seen["enter"].inputs, batch.positional[0])


def test_layers_that_read_the_same_are_one_stage():
    class Three(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.out(self.q(x) * self.k(x))

    found = ForwardPlan.of(Three(), ["q", "k", "out"], Batch(0, 1, (torch.zeros(1, 4),)))
    assert found.segments == ((("q", "k"), ("out",)),)


def test_modules_with_something_between_them_are_no_stations():
    class Halved(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x):
            return self.layers[1](self.layers[0](x) / 2)

    assert ForwardPlan.of(Halved(), ["layers.0"], Batch(0, 1, (torch.zeros(1, 4),))).boundaries == ()
