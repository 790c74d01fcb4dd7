"""`load_block`: all blocks together are the dense layer, and each is read without the others."""

from collections import OrderedDict

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import crystallite as cx
from crystallite.operators.low_rank import LowRankLinear
from crystallite.operators.recurrent_stack import suffixes
from tests.helpers.block_models import block_convolution, block_recurrent
from tests.helpers.planted import recurrent
from tests.helpers.planted.chain import planted
from tests.helpers.planted.linear import pair
from tests.helpers.tolerance import assert_close


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("kind", ["equal", "ragged", "dormant", "wide and tall"])
@pytest.mark.parametrize("bias", [True, False])
def test_one_block_of_a_layer(tmp_path, kind, bias):
    dense, blocks = pair(kind, bias=bias)
    model = nn.Sequential(nn.Sequential(blocks), nn.LayerNorm(60))
    cx.save(model, tmp_path / "a")
    _assert_made_of(dense, [cx.load_block(tmp_path / "a", "0.0", i) for i in range(blocks.n_blocks)])
    for wrong in (blocks.n_blocks, -1):
        with pytest.raises(cx.CheckpointError, match=f"no block {wrong}"):
            cx.load_block(tmp_path / "a", "0.0", wrong)
    for name in ("1", "nothing", "", "0.0.layers.0"):
        with pytest.raises(cx.CheckpointError, match="name of a BlockLinear"):
            cx.load_block(tmp_path / "a", name, 0)


@pytest.mark.parametrize("shared", [True, False])
def test_one_block_of_a_chain(tmp_path, shared):
    layers = planted((12, 24, 18, 8), 3, dead=0.2, shared=shared)
    chain = cx.BlockChain.from_dense(layers, [nn.ReLU(), nn.ReLU()])
    cx.save(nn.Sequential(chain), tmp_path / "a")
    for depth, layer in enumerate(layers):
        count = cx.decompose(layer.weight.detach()).n_blocks
        found = [cx.load_block(tmp_path / "a", f"0.layers.{depth}", i) for i in range(count)]
        _assert_made_of(layer, found)
        with pytest.raises(cx.CheckpointError, match=f"no block {count}"):
            cx.load_block(tmp_path / "a", f"0.layers.{depth}", count)


def _assert_made_of(dense, blocks):
    """y[rows] = weight @ x[columns] + bias for all blocks is the layer, up to the rows that read nothing."""
    weight = torch.zeros_like(dense.weight)
    for block in blocks:
        weight[block.rows[:, None], block.columns] += block.weight
        assert (block.bias is None) == (dense.bias is None)
        assert block.bias is None or torch.equal(block.bias, dense.bias[block.rows])
    assert torch.equal(weight, dense.weight)


def test_blocks_have_the_neurons_of_the_dense_model_whatever_was_folded(tmp_path):
    class Folded(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = planted((12, 24, 12), 3, seed=1, dtype=torch.float32)
            self.net = nn.Sequential(*planted((12, 24, 12), 3, seed=2, dtype=torch.float32))
            self.last = planted((12, 12), 3, seed=3, dtype=torch.float32)[0]

        def forward(self, x):
            return self.last(torch.tanh(self.net(torch.tanh(self.second(torch.tanh(self.first(x)))))))

    model = Folded()
    small = cx.reorganize(model, level=None, only_if_faster=False)
    assert isinstance(small.net[0], cx.BlockChain)
    moved = {name for fold in small.reorganization.folds for name, _ in fold.places}
    assert moved >= {"first.weight", "second.weight", "net.0.weight", "net.1.weight", "last.weight"}
    folder = cx.save(small, tmp_path / "a")
    stored = {"first": "first", "second": "second", "net.0": "net.0.layers.0", "net.1": "net.0.layers.1"}
    for name, layer in stored.items():
        _assert_made_of(model.get_submodule(name), [cx.load_block(folder, layer, i) for i in range(3)])


@pytest.mark.parametrize("name", ["7", "layers.0", "part.layers.12"])
def test_blocks_of_layers_named_by_a_digit(tmp_path, name):
    dense, blocks = pair("equal")
    model: nn.Module = blocks
    for part in reversed(name.split(".")):
        model = nn.Sequential(OrderedDict([(part, model)]))
    cx.save(model, tmp_path / "a")
    _assert_made_of(dense, [cx.load_block(tmp_path / "a", name, i) for i in range(blocks.n_blocks)])


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d])
def test_blocks_of_a_convolution(tmp_path, kind):
    dense = block_convolution(kind, 12, 18, 3, 0)
    small = cx.BlockConv.from_dense(dense)
    cx.save(nn.Sequential(small), tmp_path / "a")
    count = sum(part.groups for part in small.parts)
    assert count == 3
    _assert_made_of(dense, [cx.load_block(tmp_path / "a", "0", i) for i in range(count)])
    with pytest.raises(cx.CheckpointError, match=f"no block {count}"):
        cx.load_block(tmp_path / "a", "0", count)


def test_a_layer_that_stayed_whole_is_one_block(tmp_path):
    _, blocks = pair("equal")
    down, up = nn.Linear(60, 4, bias=False), nn.Linear(4, 9)
    cx.save(nn.Sequential(blocks, nn.Sequential(down, up)), tmp_path / "a")
    for name, layer in (("1.0", down), ("1.1", up)):
        _assert_made_of(layer, [cx.load_block(tmp_path / "a", name, 0)])
        with pytest.raises(cx.CheckpointError, match="no block 1"):
            cx.load_block(tmp_path / "a", name, 1)


def test_progressive_inference_block_by_block(tmp_path):
    """Each block as it comes adds its outputs; with the last the layer is complete. The example of docs/paper.md."""
    dense, blocks = pair("ragged")
    folder = cx.save(nn.Sequential(blocks), tmp_path / "a")
    x = torch.randn(5, dense.in_features, dtype=dense.weight.dtype)
    y = torch.zeros(5, dense.out_features, dtype=x.dtype) if dense.bias is None else dense.bias.detach().repeat(5, 1)
    done = torch.zeros(dense.out_features, dtype=torch.bool)
    for i in range(blocks.n_blocks):
        block = cx.load_block(folder, "0", i)
        y[:, block.rows] += x[:, block.columns] @ block.weight.T
        done[block.rows] = True
        assert_close(y[:, done], dense(x)[:, done])  # what is there is final
    assert_close(y, dense(x))


def test_a_block_of_nested_blocks(tmp_path):
    _, blocks = pair("equal")
    cx.save(nn.Sequential(LowRankLinear(blocks, nn.Linear(blocks.out_features, 2))), tmp_path / "a")
    assert torch.equal(cx.load_block(tmp_path / "a", "0.down", 3).weight, blocks.weights[0][3])


def test_a_block_is_read_without_the_others(tmp_path):
    """All other weights are overwritten in the file: the block is still read, the model no more."""
    _, blocks = pair("equal")
    folder = cx.save(blocks, tmp_path / "a")
    file = folder / "model.safetensors"
    content, wanted = bytearray(file.read_bytes()), blocks.weights[0][2].detach()
    start = content.index(wanted.numpy().tobytes())
    stack = blocks.weights[0].detach().numpy().tobytes()
    first = content.index(stack)
    for i in range(first, first + len(stack)):
        if not start <= i < start + wanted.nbytes:
            content[i] ^= 0xFF
    file.write_bytes(content)
    assert torch.equal(cx.load_block(folder, "", 2).weight, wanted)
    assert not torch.equal(cx.load_block(folder, "", 1).weight, blocks.weights[0][1])
    with pytest.raises(cx.CheckpointError, match="not those the manifest"):
        cx.load(folder)


@pytest.mark.parametrize("structure", recurrent.STRUCTURES)
@pytest.mark.parametrize("mode", recurrent.MODES)
@pytest.mark.parametrize("smallest", [1, 6])
def test_blocks_of_a_recurrent_network(tmp_path, structure, mode, smallest):
    """Two layers, both directions, sparse inputs: every weight that is not zero stands in one block, once."""
    dense = recurrent.planted(mode, structure, layers=2, bidirectional=True)
    with torch.no_grad():
        for name, weight in dense.named_parameters():
            if name.startswith("weight_ih"):
                weight.mul_(torch.rand(weight.shape) < 0.1)
    blocks = cx.BlockRecurrent.from_dense(dense, smallest=smallest)
    cx.save(nn.Sequential(blocks), tmp_path / "a")
    for k, suffix in enumerate(suffixes(2, True)):
        _assert_recurrent_made_of(dense, suffix, tmp_path / "a", f"0.layers.{k}", len(blocks.layers[k].form.blocks))


def _assert_recurrent_made_of(dense, suffix, folder, layer, count):
    weights = {kind: getattr(dense, f"weight_{kind}_l{suffix}") for kind in ("ih", "hh")}
    found, times = ({kind: torch.zeros_like(weight) for kind, weight in weights.items()} for _ in range(2))
    gates, done = len(weights["hh"]) // dense.hidden_size, torch.zeros(dense.hidden_size, dtype=torch.bool)
    for i in range(count):
        parts = {name: cx.load_block(folder, f"{layer}.{name}", i) for name in ("input", "recurrent", "communication")}
        units = parts["input"].rows[: len(parts["input"].rows) // gates]
        for name, part in parts.items():
            kind = "ih" if name == "input" else "hh"
            by_gate = torch.arange(gates)[:, None] * dense.hidden_size + units
            assert torch.equal(part.rows, by_gate.flatten())
            found[kind][part.rows[:, None], part.columns] += part.weight
            times[kind][part.rows[:, None], part.columns] += 1
            assert (part.bias is None) == (name == "communication" or not dense.bias)
            assert part.bias is None or torch.equal(part.bias, getattr(dense, f"bias_{kind}_l{suffix}")[part.rows])
        assert set(parts["recurrent"].columns.tolist()) <= set(units.tolist())
        assert bool(done[parts["communication"].columns].all())  # a block follows all that it hears
        assert not bool(done[units].any())
        done[units] = True
    assert bool(done.all())
    for kind, weight in weights.items():
        assert torch.equal(found[kind], weight)
        assert int(times[kind].max()) <= 1


@pytest.mark.parametrize("bias", [True, False])
def test_a_recurrent_network_that_is_the_whole_model(tmp_path, bias):
    dense = recurrent.planted("GRU", "triangular", bias=bias, dtype=torch.float32)
    blocks = cx.BlockRecurrent.from_dense(dense, smallest=1)
    cx.save(blocks, tmp_path / "a")
    _assert_recurrent_made_of(dense, "0", tmp_path / "a", "layers.0", blocks.n_blocks)
    for wrong in (blocks.n_blocks, -1):
        with pytest.raises(cx.CheckpointError, match=f"no block {wrong} in layer 'layers.0'"):
            cx.load_block(tmp_path / "a", "layers.0.recurrent", wrong)
    with pytest.raises(cx.CheckpointError, match=r"no block 0 in layer 'layers.1'"):
        cx.load_block(tmp_path / "a", "layers.1.input", 0)
    for name in ("layers.0", "layers.0.output", "layers.x.input", "input"):
        with pytest.raises(cx.CheckpointError, match="input, recurrent or communication"):
            cx.load_block(tmp_path / "a", name, 0)


def test_a_recurrent_network_between_folded_layers(tmp_path):
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = planted((12, 24, 8), 2, dtype=torch.float32)
            self.rnn = block_recurrent(nn.LSTM, 8, 40, 2)
            self.last = planted((40, 8), 2, dtype=torch.float32)[0]

        def forward(self, x):
            return self.last(self.rnn(torch.tanh(self.second(torch.tanh(self.first(x)))))[0])

    model = Tagger()
    small = cx.reorganize(model, level=None, only_if_faster=False)
    assert isinstance(small.rnn, cx.BlockRecurrent)
    assert small.reorganization.folds
    folder = cx.save(small, tmp_path / "a")
    _assert_recurrent_made_of(model.rnn, "0", folder, "rnn.layers.0", small.rnn.n_blocks)


def test_a_block_of_a_recurrent_network_is_read_without_the_others(tmp_path):
    blocks = cx.BlockRecurrent.from_dense(recurrent.planted("GRU", "independent"), smallest=1)
    folder = cx.save(blocks, tmp_path / "a")
    before = cx.load_block(folder, "layers.0.recurrent", 2)
    file = folder / "model.safetensors"
    content, stack = bytearray(file.read_bytes()), blocks.layers[0].recurrent_weights[0].detach()
    for i in (0, 1, 3):
        start = content.index(stack[i].numpy().tobytes())
        content[start : start + stack[i].nbytes] = bytes(stack[i].nbytes)
    file.write_bytes(content)
    assert torch.equal(cx.load_block(folder, "layers.0.recurrent", 2).weight, before.weight)
    assert not cx.load_block(folder, "layers.0.recurrent", 1).weight.any()


@pytest.mark.parametrize("start", ["", "0."])
def test_products_of_a_low_rank_recurrent_network(tmp_path, start):
    network = cx.LowRankRecurrent("LSTM", 6, 8, [(2, 0), (0, 3)], num_layers=2)
    for p in network.parameters():
        nn.init.normal_(p)
    cx.save(nn.Sequential(network) if start else network, tmp_path / "a")
    for name in ("0.input.down", "0.input.up", "0.recurrent", "1.input", "1.recurrent.down", "1.recurrent.up"):
        full = f"{start}layers.{name}"
        _assert_made_of(network.get_submodule(f"layers.{name}"), [cx.load_block(tmp_path / "a", full, 0)])
        with pytest.raises(cx.CheckpointError, match="no block 1"):
            cx.load_block(tmp_path / "a", full, 1)
    for name in ("0.input", "0.recurrent.down", "2.input", "0.communication"):
        with pytest.raises(cx.CheckpointError, match="expected the name"):
            cx.load_block(tmp_path / "a", f"{start}layers.{name}", 0)


@pytest.mark.parametrize("mode", ["RNN_TANH", "LSTM"])
def test_progressive_inference_of_a_recurrent_network(tmp_path, mode):
    """A block is a recurrent layer that also reads the earlier states of blocks it hears. See docs/paper.md."""
    dense = recurrent.planted(mode, "triangular")
    blocks = cx.BlockRecurrent.from_dense(dense, smallest=1)
    folder = cx.save(blocks, tmp_path / "a")
    x = torch.randn(9, 2, recurrent.INPUT, dtype=torch.float64)
    states = torch.zeros(10, 2, recurrent.HIDDEN, dtype=x.dtype)  # the first: before the sequence
    assert blocks.n_blocks == 4
    for i in range(blocks.n_blocks):
        reads, own, hears = (cx.load_block(folder, f"layers.0.{n}", i) for n in ("input", "recurrent", "communication"))
        units = own.columns
        part = type(dense)(len(reads.columns) + len(hears.columns), len(units), dtype=x.dtype)
        values = (torch.cat([reads.weight, hears.weight], 1), own.weight, reads.bias, own.bias)
        part.load_state_dict(dict(zip(part.state_dict(), values, strict=True)))
        given = torch.cat([x[:, :, reads.columns], states[:-1, :, hears.columns]], 2)
        states[1:, :, units] = part(given)[0].detach()
        assert_close(states[1:, :, units], dense(x)[0][:, :, units])  # what is there is final


@pytest.mark.parametrize("part", ["order", "sources", "bias_hh", "communication_weights.0", "input_weights.0"])
def test_damaged_recurrent_networks_are_refused(tmp_path, part):
    blocks = cx.BlockRecurrent.from_dense(recurrent.planted("GRU", "triangular"), smallest=1)
    folder = cx.save(blocks, tmp_path / "a")
    stored = load_file(folder / "model.safetensors")
    value = stored[f"layers.0.{part}"]
    for wrong in (value[:-1], value - 50 if value.dtype == torch.int64 else value.to(torch.int64)):
        save_file(stored | {f"layers.0.{part}": wrong.contiguous()}, folder / "model.safetensors")
        with pytest.raises(cx.CheckpointError):
            cx.load_block(folder, "layers.0.communication", 1)
