"""Artifacts: saved = reloaded, written whole or not at all, and nothing in them is believed."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import crystallite as cx
from tests.operators.test_chain import planted
from tests.reorganization.test_rewrite import Network


@pytest.fixture
def sequential():
    torch.manual_seed(0)
    first, second = planted((16, 32, 8), 4, dtype=torch.float32)
    (other,) = planted((8, 12), 2, seed=5, dtype=torch.float32)
    return nn.Sequential(first, nn.GELU("tanh"), second, nn.LayerNorm(8), other, nn.Softmax(-1)).eval()


def test_rebuilt_from_the_manifest(sequential, tmp_path):
    small = cx.reorganize(sequential, level=None)
    cx.save(small, tmp_path / "a", metadata={"level": None, "source": "test"})
    again = cx.load(tmp_path / "a")
    x = torch.randn(5, 16)
    assert torch.equal(again(x), small(x))
    assert cx.summary(again) == cx.summary(small)
    assert sorted(os.listdir(tmp_path / "a")) == ["manifest.json", "model.safetensors"]
    assert json.loads((tmp_path / "a" / "manifest.json").read_text())["metadata"]["source"] == "test"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_into_a_model_with_code_of_its_own(tmp_path, dtype):
    model = Network().to(dtype)
    small = cx.reorganize(model, level=None)
    cx.save(small, tmp_path / "a")
    with pytest.raises(cx.InvalidOption, match="into="):
        cx.load(tmp_path / "a")
    again = cx.load(tmp_path / "a", into=Network().to(dtype))
    x = torch.randn(5, 48).to(dtype)
    assert torch.equal(again(x), small(x))
    with pytest.raises(cx.CheckpointError, match="no module"):
        cx.load(tmp_path / "a", into=nn.Sequential(nn.Linear(2, 2)))


def test_a_chain_inside_a_model_with_code_of_its_own(sequential, tmp_path):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = sequential

        def forward(self, x):
            return self.body(x) + 1

    model = Wrapped()
    small = cx.reorganize(model, level=None)
    assert isinstance(small.body[0], cx.BlockChain)
    cx.save(small, tmp_path / "a")
    again = cx.load(tmp_path / "a", into=model)
    x = torch.randn(5, 16)
    assert torch.equal(again(x), small(x))


def test_tied_weights_stay_tied(tmp_path):
    model = Network()
    model.extra = nn.Linear(48, 5)
    model.extra.weight = model.head.weight
    small = cx.reorganize(model, level=None)
    cx.save(small, tmp_path / "a")
    again = cx.load(tmp_path / "a", into=model)
    assert torch.equal(again.extra.weight, again.head.weight)


def test_one_block_without_the_others(tmp_path):
    small = cx.reorganize(Network(), level=None)
    cx.save(small, tmp_path / "a")
    for block in range(4):
        assert torch.equal(cx.load_block(tmp_path / "a", "first", 0, block), small.first.weights[0][block])
    with pytest.raises(cx.CheckpointError, match="no block 4"):
        cx.load_block(tmp_path / "a", "first", 0, 4)


def test_nothing_is_half_written(tmp_path, monkeypatch):
    small = cx.reorganize(Network(), level=None)
    monkeypatch.setattr("crystallite.artifact._sha256", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cx.save(small, tmp_path / "a")
    monkeypatch.undo()
    with pytest.raises(cx.InvalidOption, match="JSON"):
        cx.save(small, tmp_path / "a", metadata={"x": torch.ones(1)})
    assert os.listdir(tmp_path) == []
    cx.save(small, tmp_path / "a")
    with pytest.raises(cx.InvalidOption, match="exists already"):
        cx.save(small, tmp_path / "a")


def test_only_reorganized_models_are_saved(tmp_path):
    with pytest.raises(cx.InvalidOption, match="no reorganized layer"):
        cx.save(nn.Linear(2, 2), tmp_path / "a")


def _edit(**changes):
    def edit(folder):
        file = folder / "manifest.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return edit


def _edit_weights(change):
    """Change the weights and fix the hash, as somebody who wants us to trust them would."""

    def edit(folder):
        import hashlib

        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors")
        _edit(weights_sha256=hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest())(folder)

    return edit


HOSTILE = {
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "found no manifest"),
    "empty manifest": (lambda f: (f / "manifest.json").write_text(""), "not a manifest"),
    "a list": (lambda f: (f / "manifest.json").write_text("[]"), "not a manifest"),
    "deep nesting": (lambda f: (f / "manifest.json").write_text("[" * 100_000), "not a manifest"),
    "another version": (_edit(version=99), "expected format crystallite 1"),
    "another format": (_edit(format="other"), "expected format"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "missing"),
    "other weights": (lambda f: (f / "model.safetensors").write_bytes(b"x" * 100), "not those the manifest"),
    "code as a type": (_edit(tree={"type": "os.system", "arguments": ["true"]}), "description of a module"),
    "a huge layer": (_edit(tree={"type": "Linear", "arguments": [10**9, 10**9, True]}), "expected shape"),
    "indices outside": (_edit_weights(lambda s: s["0.inputs"].fill_(10**6)), "indices below 16"),
    "negative indices": (_edit_weights(lambda s: s["0.outputs"].sub_(5)), "indices below 8"),
    "a tensor missing": (_edit_weights(lambda s: s.pop("3.weight")), "3.weight"),
    "a tensor too many": (_edit_weights(lambda s: s.update(extra=torch.ones(2))), "extra"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_artifacts(sequential, tmp_path, case):
    damage, message = HOSTILE[case]
    folder = cx.save(cx.reorganize(sequential, level=None), tmp_path / "a")
    damage(folder)
    with pytest.raises(cx.CheckpointError, match=message):
        cx.load(folder)
