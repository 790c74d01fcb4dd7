"""Artifacts: saved = reloaded, written whole or not at all, and nothing in them is believed."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import crystallite as cx
from crystallite.models import artifact
from crystallite.models.record import ExactOptions, Fold, LayerChange, OperatorRecord, Record
from tests.helpers.artifacts import edit_manifest, in_blocks, sequential_network
from tests.helpers.planted.chain import planted
from tests.helpers.planted.linear import pair


class Network(nn.Module):
    """Layers that meet in a residual sum, so that they are no chain."""

    def __init__(self):
        super().__init__()
        self.first, self.second = planted((48, 48, 48), 4, seed=1, dtype=torch.float32)
        self.norm = nn.LayerNorm(48)
        self.head = nn.Linear(48, 5)

    def forward(self, x):
        x = x + self.second(torch.relu(self.first(x)))
        return self.head(self.norm(x))


def reorganized(model):
    """A copy of the network by hand, with a record of what was done."""
    import copy

    small = copy.deepcopy(model)
    small.first, small.second = in_blocks(small.first), in_blocks(small.second)
    change = LayerChange("first", "Linear", (OperatorRecord("blocks", 4),), 48 * 48, 48 * 12, 2352, 624, 0.25)
    order = torch.randperm(48)
    fold = Fold(order, (("first.weight", 0), ("second.weight", 1)))
    small.reorganization = Record(ExactOptions(level=0.001), (change,), (fold,))
    return small


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_rebuilt_from_the_manifest(tmp_path):
    sequential = sequential_network()
    assert cx.save(sequential, tmp_path / "a", metadata={"note": "test"}) == tmp_path / "a"
    again = cx.load(tmp_path / "a")
    x = torch.randn(5, 16)
    assert torch.equal(again(x), sequential(x))
    assert repr(again) == repr(sequential)
    assert sorted(os.listdir(tmp_path / "a")) == ["manifest.json", "model.safetensors"]
    assert os.listdir(tmp_path) == ["a"]
    manifest = cx.read_manifest(tmp_path / "a")
    assert manifest["metadata"] == {"note": "test"}
    assert manifest["verdict"] is None
    assert manifest["source_sha256"] is None
    assert manifest["torch"] == torch.__version__


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_into_a_model_with_code_of_its_own(tmp_path, dtype):
    model = Network().to(dtype)
    small = reorganized(model)
    cx.save(small, tmp_path / "a")
    with pytest.raises(cx.InvalidOption, match="into="):
        cx.load(tmp_path / "a")
    other = Network().to(dtype)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    again = cx.load(tmp_path / "a", into=other)
    x = torch.randn(5, 48).to(dtype)
    assert torch.equal(again(x), small(x))
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())  # not changed
    with pytest.raises(cx.CheckpointError, match="no module 'first'"):
        cx.load(tmp_path / "a", into=nn.Sequential(nn.Linear(2, 2)))


def test_the_record_comes_back_whole(tmp_path):
    small = reorganized(Network())
    cx.save(small, tmp_path / "a")
    found = cx.load(tmp_path / "a", into=Network()).reorganization
    assert (found.changes, found.options) == (small.reorganization.changes, small.reorganization.options)
    (fold,), (expected,) = found.folds, small.reorganization.folds
    assert fold.places == expected.places
    assert torch.equal(fold.order, expected.order)


def test_whatever_was_put_in_place_of_a_module_is_there_again(tmp_path):
    """A chain that swallowed its activation, a smaller dense layer, and a pair of layers instead of one."""

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU("tanh"), nn.Linear(32, 8), nn.LayerNorm(8))
            self.up, self.down, self.last = nn.Linear(8, 30), nn.Linear(30, 8), nn.Linear(8, 8)

        def forward(self, x):
            x = self.body(x)
            return self.last(x + self.down(torch.relu(self.up(x))))

    small = Wrapped()
    small.body = sequential_network()[:4]
    small.up, small.down = nn.Linear(8, 10), nn.Linear(10, 8)
    small.last = nn.Sequential(nn.Linear(8, 2, bias=False), nn.Linear(2, 8))
    cx.save(small, tmp_path / "a")
    again = cx.load(tmp_path / "a", into=Wrapped())
    x = torch.randn(5, 16)
    assert torch.equal(again(x), small(x))
    assert repr(again) == repr(small)


def test_modules_that_did_not_change_stay_those_of_the_instance(tmp_path):
    model = Network()
    model.norm.register_forward_hook(lambda module, given, out: out + 1)
    small = reorganized(model)
    cx.save(small, tmp_path / "a")
    x = torch.randn(5, 48)
    assert torch.equal(cx.load(tmp_path / "a", into=model)(x), small(x))


def test_tied_weights_stay_tied(tmp_path):
    model = Network()
    model.extra = nn.Linear(48, 5)
    model.extra.weight = model.head.weight
    small = reorganized(model)
    cx.save(small, tmp_path / "a")
    again = cx.load(tmp_path / "a", into=model)
    assert again.extra.weight is again.head.weight
    assert torch.equal(again.head.weight, model.head.weight)


def test_a_transposed_view_is_not_taken_for_a_tie(tmp_path):
    small = reorganized(Network())
    small.register_buffer("a", torch.randn(3, 3))
    small.register_buffer("b", small.a.t())
    into = Network()
    into.register_buffer("a", torch.zeros(3, 3))
    into.register_buffer("b", torch.zeros(3, 3))
    cx.save(small, tmp_path / "a")
    again = cx.load(tmp_path / "a", into=into)
    assert torch.equal(again.b, small.b)
    assert torch.equal(again.a, small.a)


def test_loading_holds_blocks_and_index_tables_only(tmp_path):
    """Not the dense weights of the instance either: O(blocks + n) numbers."""
    n, k = 512, 16
    model = nn.Module()
    model.layer = planted((n, n), k, dtype=torch.float32)[0]
    small = nn.Module()
    small.layer = in_blocks(model.layer)
    cx.save(small, tmp_path / "a")
    again = cx.load(tmp_path / "a", into=model)
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in again.state_dict().values()}
    assert sum(held.values()) <= 4 * (n * n // k + n) + 8 * 2 * n
    for name, value in again.named_buffers():
        assert value.numel() <= n, name


def test_frozen_parameters_stay_frozen(tmp_path):
    model = Network()
    model.first.weight.requires_grad_(False)
    model.norm.requires_grad_(False)
    small = cx.reorganize(model, level=None, only_if_faster=False)
    cx.save(small, tmp_path / "a")
    again = cx.load(tmp_path / "a", into=Network())
    flags = {name: p.requires_grad for name, p in again.named_parameters()}
    assert flags == {name: p.requires_grad for name, p in small.named_parameters()}
    assert [flags["first.weights.0"], flags["first.bias"], flags["norm.weight"], flags["head.weight"]] == [
        False, True, False, True,
    ]  # fmt: skip
    restored = {name: p.requires_grad for name, p in cx.restore(again).named_parameters()}
    assert restored == {name: p.requires_grad for name, p in model.named_parameters()}


def test_encoders_run_the_same_kernels_when_loaded(tmp_path):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)
    encoder.layers[0].linear1, encoder.layers[0].linear2 = planted((16, 32, 16), 4, dtype=torch.float32)
    small = cx.reorganize(encoder, level=None, only_if_faster=False)
    cx.save(small, tmp_path / "a")
    again = cx.load(tmp_path / "a", into=encoder)
    assert (again.layers[0].activation_relu_or_gelu, again.use_nested_tensor) == (0, False)


def test_a_source_is_known_again(tmp_path):
    model = Network()
    small = reorganized(model)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    by_model, by_file = (
        cx.read_manifest(cx.save(small, tmp_path / name, source=source))["source_sha256"]
        for name, source in (("a", model), ("b", tmp_path / "model.safetensors"))
    )
    assert by_model == by_file == cx.source_sha256(model.state_dict())
    with torch.no_grad():
        model.head.bias[0] += 1
    assert cx.source_sha256(model) != by_model
    assert cx.source_sha256({"a": torch.ones(4)}) != cx.source_sha256({"a": torch.ones(2, 2)})
    assert cx.source_sha256({"a": torch.ones(4)}) != cx.source_sha256({"b": torch.ones(4)})


def test_a_verdict_is_bound_to_the_weights(tmp_path):
    folder = cx.save(reorganized(Network()), tmp_path / "a")
    cx.attach_verdict(folder, {"passed": True, "loss": 0.25})
    manifest = cx.read_manifest(folder)
    assert manifest["verdict"] == {"passed": True, "loss": 0.25, "weights_sha256": manifest["weights_sha256"]}
    assert sorted(os.listdir(folder)) == ["manifest.json", "model.safetensors"]
    with pytest.raises(cx.InvalidOption, match="JSON"):
        cx.attach_verdict(folder, {"passed": torch.ones(1)})
    assert cx.read_manifest(folder) == manifest  # nothing happened
    assert sorted(os.listdir(folder)) == ["manifest.json", "model.safetensors"]
    cx.load(folder, into=Network())
    other = cx.save(reorganized(Network()), tmp_path / "b")
    edit_manifest(verdict=manifest["verdict"])(other)
    with pytest.raises(cx.CheckpointError, match="verdict was given on other weights"):
        cx.load(other, into=Network())
    (folder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    with pytest.raises(cx.CheckpointError, match="not those the manifest"):
        cx.attach_verdict(folder, {"passed": True})


def test_nothing_is_half_written(tmp_path, monkeypatch):
    small = reorganized(Network())
    monkeypatch.setattr(artifact, "weights_sha256", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cx.save(small, tmp_path / "a")
    monkeypatch.undo()
    with pytest.raises(cx.InvalidOption, match="JSON"):
        cx.save(small, tmp_path / "a", metadata={"x": torch.ones(1)})
    assert os.listdir(tmp_path) == []
    cx.save(small, tmp_path / "a")
    with pytest.raises(cx.InvalidOption, match="exists already"):
        cx.save(small, tmp_path / "a")


def test_killed_while_saving(tmp_path):
    """The process dies when the weights have been written and the manifest has not."""
    code = f"""
import os, signal, torch
import crystallite as cx
from crystallite.models import artifact
artifact.write_manifest = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
cx.save(cx.BlockLinear.from_dense(torch.eye(4), None, cx.decompose(torch.eye(4))), {str(tmp_path / "a")!r})
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert not (tmp_path / "a").exists()
    _, blocks = pair("equal")
    cx.save(blocks, tmp_path / "a")  # what was left behind is in nobody's way
    assert torch.equal(cx.load(tmp_path / "a").weight, blocks.weight)


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    class Own(nn.ReLU):
        def forward(self, x):
            return x * 2

    with pytest.raises(cx.InvalidOption, match="no reorganized layer"):
        cx.save(nn.Linear(2, 2), tmp_path / "a")
    chain = cx.BlockChain.from_dense(planted((16, 32, 8), 4), [nn.ReLU()])
    chain.activations[0] = Own()
    with pytest.raises(cx.InvalidOption, match=r"1: BlockChain around the code of .*Own"):
        cx.save(nn.Sequential(nn.Identity(), chain), tmp_path / "a")
    assert os.listdir(tmp_path) == []
