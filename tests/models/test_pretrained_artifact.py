"""transformers folders as artifacts: the head stays, the manifest is the same, and every verb takes them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import crystallite as cx
from crystallite.models.opening import open_model, write_model
from crystallite.models.transformers_folder import write_config
from tests.helpers.tolerance import assert_close

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
TOKENS = torch.arange(64).view(8, 8) % 50


def build(name):
    torch.manual_seed(0)
    config = transformers.LlamaConfig if name.startswith("Llama") else transformers.BertConfig
    return getattr(transformers, name)(config(**SIZES, max_position_embeddings=20, num_labels=3)).eval()


def planted(model):
    """The model with four blocks in each feed-forward layer of its encoder."""
    with torch.no_grad():
        for layer in model.base_model.encoder.layer:
            for dense in (layer.intermediate.dense, layer.output.dense):
                row, column = (torch.randperm(n) % 4 for n in dense.weight.shape)
                dense.weight.mul_(row[:, None] == column)
    return model


def output(model):
    with torch.no_grad():
        return model(TOKENS)[0]


OPENED = """
import sys
from transformers import AutoModel
for folder in sys.argv[1:]:
    try:
        AutoModel.from_pretrained(folder)
    except Exception as error:
        print(str(error).splitlines()[-1])
    else:
        print("opened")
"""


def without_us(*folders):
    """What somebody gets who opens folders and has not imported this package: the last line of each error."""
    command = [sys.executable, "-c", OPENED, *map(str, folders)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.fixture
def made(tmp_path):
    """A classifier in a folder with a tokenizer, its exact reorganization, and the folder of that."""
    model = planted(build("BertForSequenceClassification"))
    model.save_pretrained(tmp_path / "original")
    (tmp_path / "original" / "vocab.txt").write_text("a\nb\n")
    (tmp_path / "original" / "2_Dense").mkdir()
    save_file({"weight": torch.ones(2)}, tmp_path / "original" / "2_Dense" / "model.safetensors")
    small = cx.reorganize(model, level=None, only_if_faster=False)
    write_model(small, tmp_path / "small", model, tmp_path / "original", {"level": None})
    return model, small, tmp_path / "small"


@pytest.mark.parametrize("name", ["BertModel", "BertForSequenceClassification", "BertForMaskedLM", "LlamaForCausalLM"])
def test_a_folder_is_opened_as_the_class_it_names(tmp_path, name):
    model = build(name)
    model.save_pretrained(tmp_path / "a")
    again = open_model(str(tmp_path / "a"), None)
    assert type(again) is type(model)
    assert torch.equal(output(again), output(model))


def test_missing_and_unexpected_weights_are_named(tmp_path):
    build("BertForSequenceClassification").save_pretrained(tmp_path / "a")
    file = tmp_path / "a" / "model.safetensors"
    state = load_file(file)
    state["another.weight"] = state.pop("classifier.weight")
    save_file(state, file, {"format": "pt"})
    message = "weights of a BertForSequenceClassification.* missing classifier.weight; unexpected another.weight"
    with pytest.raises(cx.CheckpointError, match=message):
        open_model(str(tmp_path / "a"), None)


def test_weights_of_another_size_are_refused(tmp_path):
    build("BertModel").save_pretrained(tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    (tmp_path / "a" / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    with pytest.raises(cx.CheckpointError, match=r"mismatched .*intermediate.dense.bias \(64,\) for \(40,\)"):
        open_model(str(tmp_path / "a"), None)


def test_a_class_that_transformers_does_not_have(tmp_path):
    build("BertModel").save_pretrained(tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    (tmp_path / "a" / "config.json").write_text(json.dumps(config | {"architectures": ["OwnModel"]}))
    with pytest.raises(cx.CheckpointError, match=r"OwnModel, which transformers .* does not have"):
        open_model(str(tmp_path / "a"), None)


def test_a_written_folder_carries_what_an_artifact_carries(made):
    model, small, folder = made
    manifest = cx.read_manifest(folder)
    assert manifest["source_sha256"] == cx.source_sha256(model)
    assert manifest["metadata"]["level"] is None
    assert manifest["verdict"] is None
    assert (folder / "vocab.txt").read_text() == "a\nb\n"
    assert load_file(folder / "2_Dense" / "model.safetensors")["weight"].tolist() == [1, 1]
    for again in (cx.load(folder), cx.load(folder, into=model), open_model(str(folder), None)):
        assert type(again) is type(model)
        assert torch.equal(output(again), output(small))
        assert cx.record(again).changes == cx.record(small).changes
    restored = cx.restore(cx.load(folder)).state_dict()
    assert all(torch.equal(restored[name], value) for name, value in model.state_dict().items())
    again = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert torch.equal(output(again), output(small))


def test_a_verdict_is_kept_and_bound_to_the_weights(made):
    model, _, folder = made
    assert cx.validate(model, folder, [TOKENS]).passed
    manifest = cx.read_manifest(folder)
    assert manifest["verdict"]["passed"]
    assert manifest["verdict"]["weights_sha256"] == manifest["weights_sha256"]
    cx.load(folder)
    state = load_file(folder / "model.safetensors")
    save_file(
        {name: value + 0 for name, value in state.items() if name} | {"x": torch.ones(1)}, folder / "model.safetensors"
    )
    with pytest.raises(cx.CheckpointError, match="not those the manifest was written for"):
        cx.load(folder)


def test_a_verdict_on_another_original_is_refused(made):
    model, small, folder = made
    with torch.no_grad():
        model.classifier.bias[0] += 1
    named, came = cx.read_manifest(folder)["source_sha256"], cx.source_sha256(model)
    with pytest.raises(cx.InvalidOption, match=f"hash {named[:12]}…, got an original with {came[:12]}…"):
        cx.validate(model, folder, [TOKENS])
    assert cx.read_manifest(folder)["verdict"] is None
    assert cx.validate(model, small, [TOKENS]).samples == 8  # what is kept nowhere may be compared with anything


def test_what_save_pretrained_wrote_alone_is_an_artifact_too(tmp_path):
    model = planted(build("BertForSequenceClassification"))
    small = cx.reorganize(model, level=None, only_if_faster=False)
    small.save_pretrained(tmp_path / "a", max_shard_size="20KB")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 1
    assert cx.read_manifest(tmp_path / "a")["source_sha256"] is None
    assert torch.equal(output(cx.load(tmp_path / "a")), output(small))
    cx.validate(model, tmp_path / "a", [TOKENS])
    assert cx.read_manifest(tmp_path / "a")["verdict"]["passed"]
    assert torch.equal(output(cx.load(tmp_path / "a")), output(small))
    shard = min((tmp_path / "a").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(cx.CheckpointError, match="not those the manifest was written for"):
        cx.load(tmp_path / "a")


def test_one_block_of_a_layer(made):
    model, _, folder = made
    name = "bert.encoder.layer.1.output.dense"
    weight = torch.zeros_like(model.get_submodule(name).weight)
    for block in (cx.load_block(folder, name, i) for i in range(4)):
        weight[block.rows[:, None], block.columns] += block.weight
    assert torch.equal(weight, model.get_submodule(name).weight)


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "LlamaForCausalLM"])
def test_compressed_models_of_all_kinds_come_back(tmp_path, name):
    model = build(name)
    small = cx.compress(model, [{"input_ids": TOKENS}] * 8, budget=0.7)
    cx.save(small, tmp_path / "a", source=model)
    again = cx.load(tmp_path / "a")
    assert type(again) is type(model)
    assert torch.equal(output(again), output(small))
    assert cx.record(again) == cx.record(small)
    assert repr(cx.summary(again)) == repr(cx.summary(small))


def test_a_model_loaded_into_another_is_saved_for_transformers(tmp_path):
    """A class with code of its own is a plain artifact; what it holds of transformers must still say what it became."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = build("BertModel")

        def forward(self, tokens):
            return (self.encoder(tokens)[0].mean(1),)

    model = Own().eval()
    planted(model.encoder)
    small = cx.reorganize(model, level=None, only_if_faster=False)
    again = cx.load(cx.save(small, tmp_path / "a"), into=Own()).eval()
    again.encoder.save_pretrained(tmp_path / "encoder")
    opened = transformers.AutoModel.from_pretrained(tmp_path / "encoder")
    assert type(opened.encoder.layer[0].output.dense) is cx.BlockLinear
    assert torch.equal(output(opened), output(small.encoder))


def test_without_crystallite_the_error_says_what_is_missing(made):
    (said,) = without_us(made[2])
    assert "import crystallite before you open this folder" in said


def test_a_service_opens_it(made):
    model, small, folder = made
    with pytest.raises(cx.InvalidOption, match="never validated"):
        cx.Service.load(folder)
    cx.validate(model, folder, [TOKENS])
    with cx.Service.load(folder) as service:
        found = service.infer(TOKENS)
    expected = output(small)
    assert_close(found if isinstance(found, torch.Tensor) else next(iter(found.values())), expected)


def test_plain_sizes_need_no_import(tmp_path):
    """A folder whose modules are those of its class is opened by transformers alone."""
    model = build("BertForSequenceClassification")
    small = cx.compress(model, [{"input_ids": TOKENS}] * 8, budget=1.0)
    cx.save(small, tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert not {"quantization_config", "fusion_config", "transformers_weights"} & config.keys()
    assert without_us(tmp_path / "a") == ["opened"]
    assert cx.record(cx.load(tmp_path / "a")).method == "compressed"


def test_source_is_a_path_in_the_metadata(made):
    assert Path(cx.read_manifest(made[2])["metadata"]["model"]).name == "original"


def test_without_crystallite_what_save_pretrained_wrote_is_not_opened_either(made, tmp_path):
    """Also where it was opened and saved again."""
    made[1].save_pretrained(tmp_path / "a")
    transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    cx.restore(made[1]).save_pretrained(tmp_path / "c")
    *refused, restored = without_us(*(tmp_path / name for name in "abc"))
    assert restored == "opened"
    for said in refused:
        assert "pip install crystallite, and import crystallite before you open" in said


def opened_as(name, model, folder, state=None, **changes):
    """A checkpoint whose config says that it is of some class."""
    model.save_pretrained(folder, state_dict=state)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": None if name is None else [name], **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return open_model(str(folder), None)


@pytest.mark.parametrize(
    ("name", "left_out"),
    [("BertForMaskedLM", "bert.pooler.dense.bias.* cls.seq_relationship.bias"), ("BertModel", "cls.predictions.bias")],
)
def test_weights_of_other_heads_are_left_out_and_named(tmp_path, name, left_out):
    """As in bert-base-uncased, a pretraining checkpoint whose config says BertForMaskedLM."""
    whole = build("BertForPreTraining")
    with pytest.warns(UserWarning, match=f"parts that a {name}, .*: {left_out}"):
        model = opened_as(name, whole, tmp_path / "a")
    assert type(model) is getattr(transformers, name)
    assert torch.equal(output(getattr(model, "bert", model)), output(whole.bert))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (None, {}, "unexpected cls.predictions.bias"),
        ("BertForPreTraining", {"num_hidden_layers": 1}, "unexpected bert.encoder.layer.1"),
        ("BertModel", {"num_hidden_layers": 1}, "unexpected .*encoder.layer.1"),
        ("BertForSequenceClassification", {}, "missing classifier.bias, classifier.weight; unexpected cls"),
    ],
)
def test_a_head_or_a_layer_is_never_dropped(tmp_path, name, changes, message):
    with pytest.raises(cx.CheckpointError, match=message):
        opened_as(name, build("BertForPreTraining"), tmp_path / "a", **changes)


def test_a_tensor_more_in_a_module_is_refused(tmp_path):
    model = build("BertModel")
    state = {**model.state_dict(), "encoder.layer.0.output.dense.scale": torch.ones(3)}
    with pytest.raises(cx.CheckpointError, match=r"unexpected .*dense.scale; if they do not matter, open it with"):
        opened_as("BertModel", model, tmp_path / "a", state)


def test_keys_that_transformers_ignores_are_ignored(tmp_path):
    model = build("BertModel")
    state = {**model.state_dict(), "embeddings.position_ids": torch.arange(20)[None]}
    opened = opened_as("BertModel", model, tmp_path / "a", state)
    assert torch.equal(output(opened), output(model))


class Unknown(nn.Linear):
    """Has code of its own, so that no description rebuilds it."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_a_result_that_could_not_be_opened_is_not_returned():
    before, after = build("BertModel"), build("BertModel")
    after.extra = Unknown(3, 3)
    with pytest.raises(cx.InvalidOption, match=r"extra.bias: the model could not be opened again: from_pretrained"):
        write_config(after, before)
    write_config(after, after)  # what the owner has added himself is his own


def test_weights_keep_their_names_where_the_class_has_an_older_format(tmp_path):
    """transformers would fuse queries, keys and values of NomicBert as its checkpoints have them."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.NomicBertModel(transformers.NomicBertConfig(vocab_size=64, **sizes)).eval()
    ids = torch.randint(0, 64, (64, 8))
    small = cx.compress(model, [{"input_ids": part} for part in ids.split(16)], budget=0.5)
    cx.save(small, tmp_path / "small")
    again = transformers.NomicBertModel.from_pretrained(tmp_path / "small").eval()
    again.save_pretrained(tmp_path / "again")
    twice = transformers.NomicBertModel.from_pretrained(tmp_path / "again").eval()
    with torch.no_grad():
        expected = small(ids[:2]).last_hidden_state
        for found in (again, twice):
            assert torch.equal(found(ids[:2]).last_hidden_state, expected)
