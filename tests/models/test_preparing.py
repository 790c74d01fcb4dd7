"""Models as people have them, at the door of every verb: unwrapped and said so, or refused by name."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import crystallite as cx
from crystallite.baselines.compare import compare
from crystallite.models.preparing import prepared
from tests.helpers.tolerance import assert_close

X = torch.randn(200, 16, generator=torch.Generator().manual_seed(1))


def mlp():
    """Two networks side by side, of weights larger than those of an initialisation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    with torch.no_grad():
        for layer, (rows, columns) in ((model[0], (16, 8)), (model[2], (4, 16))):
            layer.weight.mul_(4)
            layer.weight[:rows, columns:] = layer.weight[rows:, :columns] = 0
    return model.eval()


def small():
    return cx.reorganize(mlp(), level=None, only_if_faster=False)


def adapted(model, kind):
    peft = pytest.importorskip("peft")
    options = {"target_modules": ["0"]}
    config = {
        "LoRA": lambda: peft.LoraConfig(r=2, **options),
        "LoHa": lambda: peft.LoHaConfig(r=2, **options),
        "IA3": lambda: peft.IA3Config(feedforward_modules=[], **options),
        "modules to save": lambda: peft.LoraConfig(r=2, modules_to_save=["2"], **options),
    }[kind]()
    return peft.get_peft_model(model, config)


class Packed(torch.Tensor):
    """A tensor that is not its numbers, as those of torchao."""


def with_packed_weights(model):
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(Packed))
    return model


def quantised(model):
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def quietly(make):
    """A model that others make of ours, whatever PyTorch warns of while it is made."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(mlp())


def moved_by_accelerate(model):
    accelerate = pytest.importorskip("accelerate")
    return accelerate.hooks.add_hook_to_module(model, accelerate.hooks.ModelHook())


REFUSED = {
    "LoRA": (lambda m: adapted(m, "LoRA"), "base_model.model.0: adapters of PEFT .*merge_and_unload"),
    "LoHa": (lambda m: adapted(m, "LoHa"), "adapters of PEFT .*merge_and_unload"),
    "IA3": (lambda m: adapted(m, "IA3"), "adapters of PEFT .*merge_and_unload"),
    "modules to save": (lambda m: adapted(m, "modules to save"), "adapters of PEFT .*merge_and_unload"),
    "adapted inside": (lambda m: adapted(m, "LoRA").base_model.model, "0: adapters of PEFT .* merge them"),
    "scripted": (torch.jit.script, "scripted by TorchScript"),
    "exported": (lambda m: torch.export.export(m, (X[:2],)).module(), "torch.export makes, has no layers"),
    "meta": (lambda m: m.to("meta"), "0.weight: expected numbers, got a tensor on the meta device"),
    "lazy": (lambda _: nn.Sequential(nn.LazyLinear(8)), "0.weight: expected numbers, got a lazy parameter"),
    "complex": (lambda m: m.to(torch.complex64), "0.weight: expected real numbers, got torch.complex64"),
    "packed": (with_packed_weights, "0.weight: expected plain numbers in memory, got a Packed of tests"),
    "quantised": (quantised, "0: a Linear of torch.ao, quantised already"),
    "moved by accelerate": (moved_by_accelerate, "moved by accelerate"),
}
VERBS = {
    "reorganize": lambda model, _: cx.reorganize(model, level=None),
    "compress": lambda model, _: cx.compress(model, X, budget=0.7),
    "upgrade": lambda model, _: cx.upgrade(model, blocks=2, data=[X], epochs=1),
    "sweep": lambda model, _: cx.sweep(model, X),
    "discover": lambda model, _: cx.discover(model, X),
    "validate": lambda model, _: cx.validate(model, small(), X),
    "validate the smaller": lambda model, _: cx.validate(mlp(), model, X),
    "save": lambda model, folder: cx.save(model, folder / "a"),
    "export": lambda model, folder: cx.export(model, folder / "a.onnx", X[:4]),
    "compare": lambda model, _: compare(model, small(), X, calibration=X, methods=["magnitude"]),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_name_in_every_verb(kind, tmp_path):
    make, message = REFUSED[kind]
    model = quietly(make)
    for verb in VERBS.values():
        with pytest.raises(cx.InvalidOption, match=message):
            verb(model, tmp_path)


def computed(attach):
    """A model whose first layer computes its weight."""

    def wrap(model):
        attach(model[0])
        return model.eval()

    return wrap


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def compiled_inside(model):
    model[0] = torch.compile(model[0])
    return model


TAKEN_OFF = {
    "compiled": (torch.compile, "taken out of torch.compile"),
    "compiled inside": (compiled_inside, "taken out of torch.compile: 0"),
    "DataParallel": (nn.DataParallel, "taken out of DataParallel"),
    "old weight norm": (computed(nn.utils.weight_norm), "weights as weight_norm computes them: 0"),
    "weight norm": (computed(parametrizations.weight_norm), "weights as weight_norm computes them: 0"),
    "old spectral norm": (computed(nn.utils.spectral_norm), "weights as spectral_norm computes them: 0"),
    "spectral norm": (computed(parametrizations.spectral_norm), "weights as spectral_norm computes them: 0"),
    "orthogonal": (computed(parametrizations.orthogonal), "weights as orthogonal computes them: 0"),
    "pruned": (
        computed(lambda layer: prune.l1_unstructured(layer, "weight", 0.3)),
        "weights as torch.nn.utils.prune computes them: 0",
    ),
    "a bias pruned": (
        computed(lambda layer: prune.l1_unstructured(layer, "bias", 0.3)),
        "weights as torch.nn.utils.prune computes them: 0",
    ),
    "of one's own": (
        computed(lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())),
        "weights as the parametrization Doubled computes them: 0",
    ),
}


@pytest.fixture
def wrapped(request):
    make, note = TAKEN_OFF[request.param]
    return quietly(make), note


def values(model):
    """What a model with eager wrappers computes; compiling would take seconds and change nothing."""
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        return model(X)


@pytest.mark.parametrize("wrapped", TAKEN_OFF, indirect=True)
def test_taken_off_and_said(wrapped, tmp_path):
    model, note = wrapped
    before, state = values(model), {name: value.clone() for name, value in model.state_dict().items()}
    for made in (cx.reorganize(model, level=None, only_if_faster=False), cx.compress(model, X, budget=1.0)):
        assert_close(made(X), before)
        assert note in cx.summary(made).notes
        assert type(made) is nn.Sequential
        assert not any("_orig_mod" in name or "parametrizations" in name for name in made.state_dict())
    assert cx.validate(model, made, X).passed
    again = cx.load(cx.save(made, tmp_path / "a", source=model))
    assert torch.equal(again(X), made(X))
    assert cx.record(again).prepared == (note,)
    # the original is what it was
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
    assert torch.equal(values(model), before)


@pytest.mark.parametrize("wrapped", TAKEN_OFF, indirect=True)
def test_upgraded_from_what_was_wrapped(wrapped):
    model, note = wrapped
    made = cx.upgrade(model, blocks=2, data=[X], epochs=2, level=0.5)
    assert note in cx.summary(made).notes
    assert cx.record(made).method == "upgraded"


@pytest.mark.parametrize("wrapped", TAKEN_OFF, indirect=True)
def test_analyzed_by_the_names_and_numbers_inside(wrapped):
    model, note = wrapped
    found = cx.analyze(model, fast=True)
    assert [row.name for row in found.rows] == ["0", "2"]
    assert note in found.notes
    assert note in repr(found)
    assert cx.source_sha256(model) == cx.source_sha256(prepared(model)[0])


def test_an_analysis_says_that_adapters_are_not_in_it():
    found = cx.analyze(adapted(mlp(), "LoRA"), fast=True)
    assert "without what adapters of PEFT add to them; merge them first" in repr(found)
    assert found.to_json()["notes"] == list(found.notes)


def test_merged_adapters_are_weights_like_any_other():
    model = adapted(mlp(), "LoRA")
    nn.init.ones_(model.base_model.model[0].lora_B["default"].weight)
    merged = copy.deepcopy(model).merge_and_unload()
    assert not torch.equal(merged[0].weight, mlp()[0].weight)
    assert_close(cx.compress(merged, X, budget=1.0)(X), values(model))


def test_an_analysis_refuses_weights_that_are_no_numbers():
    with pytest.raises(cx.CheckpointError, match=r"plain numbers in tensor '0.weight', got a Packed of tests"):
        cx.analyze(with_packed_weights(mlp()))
    with pytest.raises(cx.CheckpointError, match=r"expected weights as tensors, got packed ones in 0._packed_params"):
        cx.analyze(quietly(quantised))


def test_a_plain_model_is_not_copied():
    model = mlp()
    assert prepared(model) == (model, ())
    assert prepared(nn.DataParallel(model))[0] is model


def test_weights_stay_frozen():
    model = mlp()
    model[0].requires_grad_(False)
    parametrizations.weight_norm(model[0])
    made = cx.reorganize(model, level=None)
    assert not made[0].weight.requires_grad
    assert made[2].weight.requires_grad


def test_loaded_into_a_wrapped_model(tmp_path):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = mlp()

        def forward(self, x):
            return self.layers(x) + 0 * self.layers[0].bias.sum()

    model = nn.DataParallel(Own().eval())
    parametrizations.weight_norm(model.module.layers[0])
    made = cx.reorganize(model, level=None, only_if_faster=False)
    again = cx.load(cx.save(made, tmp_path / "a"), into=model)
    assert type(again) is Own
    assert torch.equal(again(X), made(X))


def test_states_that_training_left_on_modules_are_no_trouble():
    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = mlp()
            self.last = None

        def forward(self, x):
            self.last = self.layers(x)
            return self.last

    model = Remembers()
    model(X)  # with gradients, whose graph PyTorch does not copy
    assert_close(cx.compress(model, X, budget=1.0)(X), values(model))
