"""A model run in segments shows what a whole run shows."""

import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.data.batch import Batch
from crystallite.statistics.layer_io import read_rows
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


def test_boundaries_are_found_by_what_is_handed_on(stack):
    found = ForwardPlan.of(stack[0], NAMES, stack[1])
    assert found.boundaries == ("layers.0", "layers.1", "layers.2")
    assert found.segments[0] == (("enter",), ("layers.0.first",), ("layers.0.second",))
    assert found.segments[3] == (("leave",),)


def test_a_run_in_segments_sees_what_a_whole_run_sees(stack):
    model, batch = stack
    plan = ForwardPlan.of(model, NAMES, batch)
    whole = ForwardPlan((), (), frozenset(), frozenset())
    expected, _ = observe(model, batch, whole, 0, (), NAMES, everything)
    carry = ()
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
    seen, _ = observe(model, batch, plan, 0, (), ["enter", "layers.0.second"], everything)
    assert seen["enter"].residual is None
    assert torch.equal(seen["layers.0.second"].residual, seen["enter"].outputs)


def test_a_run_ends_before_a_layer_it_need_not_reach(stack):
    model, batch = stack
    plan = ForwardPlan.of(model, NAMES, batch)
    model.layers[0].second.weight.data.fill_(torch.nan)
    model.layers[0].second.register_forward_hook(lambda *_: pytest.fail("ran too far"))
    seen, returned = observe(model, batch, plan, 0, (), ["enter"], everything, "layers.0.second")
    assert returned == ()
    assert torch.equal(seen["enter"].inputs, batch.positional[0])


def test_layers_that_read_the_same_are_one_group():
    class Three(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.out(self.q(x) * self.k(x))

    found = ForwardPlan.of(Three(), ["q", "k", "out"], Batch(0, 1, (torch.zeros(1, 4),)))
    assert found.segments == ((("q", "k"), ("out",)),)


def test_modules_with_something_between_them_are_no_boundaries():
    class Halved(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x):
            return self.layers[1](self.layers[0](x) / 2)

    assert ForwardPlan.of(Halved(), ["layers.0"], Batch(0, 1, (torch.zeros(1, 4),))).boundaries == ()


class Attributes(nn.Module):
    """Modules as attributes that can be gone through like a list, but are none."""

    def __init__(self, modules):
        super().__init__()
        self.count = len(modules)
        for i, module in enumerate(modules):
            setattr(self, f"part{i}", module)

    def __iter__(self):
        return iter([getattr(self, f"part{i}") for i in range(self.count)])

    def __getitem__(self, place):
        return list(self)[place]

    def __len__(self):
        return self.count


def step(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU())


class Pyramid(nn.Module):
    """What every step returns goes into the output."""

    def __init__(self, kind):
        super().__init__()
        self.steps = kind([step(3, 12), step(12, 16), step(16, 20)])
        self.sides = kind([nn.Conv2d(width, 6, 1) for width in (12, 16, 20)])

    def forward(self, x):
        features = []
        for one in self.steps:
            x = one(x)
            features.append(x)
        found = zip(features, self.sides, strict=True)
        return torch.cat([side(value).mean((2, 3)) for value, side in found], 1)


class UNet(nn.Module):
    """What the steps on the way in return is read again on the way out."""

    def __init__(self, kind):
        super().__init__()
        self.steps = kind([step(3, 12), step(12, 12), step(12, 12)])
        self.back = kind([step(12, 12), step(12, 12)])
        self.last = nn.Conv2d(12, 2, 1)

    def forward(self, x):
        skips = []
        for one in self.steps:
            x = one(x)
            skips.append(x)
        for one, skip in zip(self.back, skips[1::-1], strict=True):
            x = one(x) * 0.5 + skip
        return self.last(x)


class AllStates(nn.Module):
    """A BERT with a head that reads the hidden states of all layers."""

    def __init__(self, kind):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = transformers.BertConfig(
            vocab_size=50, hidden_size=24, num_hidden_layers=3, num_attention_heads=2, intermediate_size=48,
            max_position_embeddings=16, attn_implementation="eager",
        )  # fmt: skip
        self.bert = transformers.BertModel(config, add_pooling_layer=False)
        self.bert.encoder.layer = kind(list(self.bert.encoder.layer))
        self.head = nn.Linear(4 * 24, 5)

    def forward(self, tokens):
        states = self.bert(tokens, output_hidden_states=True).hidden_states
        return self.head(torch.cat(states, -1))


def reader(kind, model):
    torch.manual_seed(0)
    found = model(kind).eval()
    for parameter in found.parameters():
        if parameter.ndim > 1:  # as large as trained ones: every layer adds something to what the others do
            nn.init.normal_(parameter, std=1.5 / parameter[0].numel() ** 0.5)
    return found


def images():
    return torch.randn(48, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def tokens():
    return torch.randint(50, (48, 12), generator=torch.Generator().manual_seed(1))


READERS = [(Pyramid, images), (UNet, images), (AllStates, tokens)]


def layers_of(model):
    return [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))]


@pytest.mark.parametrize(("kind", "data"), READERS)
def test_layers_read_the_same_where_later_code_reads_several_outputs(kind, data):
    model, batch = reader(nn.ModuleList, kind), Batch(0, 6, (data()[:6],))
    names = layers_of(model)
    plan = ForwardPlan.of(model, names, batch.first(2))
    assert plan.boundaries
    assert plan.carry_all
    expected = {}

    def keep(name):
        return lambda module, inputs, output: expected.update({name: read_rows(module, inputs[0], everything)})

    hooks = [model.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    output = batch.run(model)
    for hook in hooks:
        hook.remove()
    carry, met = (), []
    for segment, layer_groups in enumerate(plan.segments):
        here = [name for layer_group in layer_groups for name in layer_group]
        assert torch.equal(outputs_of(model, batch, plan, segment, carry), output)
        seen, carry = observe(model, batch, plan, segment, carry, here, everything)
        assert all(torch.equal(seen[name].inputs, expected[name]) for name in here)
        met += here
    assert sorted(met) == sorted(expected)


@pytest.mark.parametrize(("kind", "data"), READERS)
def test_models_that_read_several_outputs_are_fitted_as_well_as_without_a_list(kind, data):
    errors = []
    for container in (nn.ModuleList, Attributes):
        small = cx.compress(reader(container, kind), data(), budget=0.6)
        errors.append(cx.record(small).options.held_out_error)
    assert errors[0] == pytest.approx(errors[1], rel=0.1)


def test_what_is_written_in_place_is_run_whole():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.steps = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x):
            x = self.steps[0](x)
            x += 1
            return self.steps[1](x)

    model, batch = InPlace(), Batch(0, 2, (torch.randn(2, 4),))
    assert ForwardPlan.of(model, ["steps.0", "steps.1"], batch).boundaries == ()
    assert all(module.training for module in model.modules())


def test_wrong_inputs_are_found_where_the_output_does_not_show_them():
    class Gated(nn.Module):
        """The skip goes to a layer that does nothing yet."""

        def __init__(self):
            super().__init__()
            self.steps = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])
            self.side = nn.Linear(4, 4)
            nn.init.zeros_(self.side.weight)

        def forward(self, x):
            first = self.steps[0](x)
            return self.steps[2](self.steps[1](first)) + self.side(first)

    model, batch = Gated(), Batch(0, 2, (torch.randn(2, 4),))
    assert ForwardPlan.of(model, layers_of(model), batch).carry_all
