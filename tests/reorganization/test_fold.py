"""Folding: the function stays, scattered blocks come to lie one after the other, and it can be undone bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from crystallite.core.errors import InvalidOption
from crystallite.graph.trace import trace
from crystallite.models.record import Fold
from crystallite.reorganization.fold import fold_, junctions, unfold_
from crystallite.structure.bipartite import BipartiteStructure
from crystallite.structure.decompose import decompose
from tests.helpers.networks import CNN, MLP, NETWORKS, Attention, Gated, build, run
from tests.helpers.tolerance import assert_close


def in_order(blocks):
    """Blocks lie one after the other, dormant neurons last."""
    return (np.diff(np.where(blocks < 0, len(blocks), blocks)) >= 0).all()


def plant_(weight, rows, cols):
    """Keep only what joins rows and columns of one label; returns the structure that is left."""
    keep = torch.as_tensor(rows)[:, None] == torch.as_tensor(cols)[None, :]
    keep &= torch.as_tensor(rows)[:, None] >= 0
    with torch.no_grad():
        weight *= keep.view(*keep.shape, *[1] * (weight.dim() - 2)).to(weight.dtype)
    return BipartiteStructure.from_labels(np.asarray(rows), np.asarray(cols))


def scattered(rng, size, k):
    return rng.permutation(np.arange(size) % k)


def followed(structures, folds):
    """The structures after the weights of their layers, (out, in, …), have moved."""
    orders = {place: fold.order.numpy() for fold in folds for place in fold.places}

    def labels(name, axis, blocks):
        return blocks[orders.get((f"{name}.weight", axis), slice(None))]

    return {
        name: BipartiteStructure.from_labels(labels(name, 0, s.row_block), labels(name, 1, s.col_block))
        for name, s in structures.items()
    }


def widths(spaces, axis):
    return sum(int(np.prod([spaces.spaces[s].size for s in part])) for part in axis)


def random_structures(spaces, rng, k=3):
    """Blocks of scattered rows and columns for every layer."""
    return {
        layer.name: BipartiteStructure.from_labels(
            rng.integers(-1, k, widths(spaces, layer.rows)), rng.integers(-1, k, widths(spaces, layer.columns))
        )
        for layer in spaces.layers
    }


@pytest.mark.parametrize("name", NETWORKS)
def test_before_after_and_undone(name):
    model, example = build(name)
    spaces = trace(model, example)
    structures = random_structures(spaces, np.random.default_rng(0))
    expected, state = run(model, example), {k: v.clone() for k, v in model.state_dict().items()}
    folds = fold_(model, structures, spaces)
    assert folds
    for found, wanted in zip(run(model, example), expected, strict=True):
        assert_close(found, wanted)
    unfold_(model, folds)
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())


@settings(max_examples=12)
@given(st.lists(st.integers(1, 9), min_size=3, max_size=5), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_chains_of_shared_partitions_leave_nothing_to_move(sizes, k, seed):
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    model = MLP(sizes).double()
    labels = [scattered(rng, size, k) for size in sizes]
    labels[0], labels[-1] = np.sort(labels[0]), np.sort(labels[-1])  # the ends are the caller's
    structures = {f"layers.{i}": plant_(layer.weight, labels[i + 1], labels[i]) for i, layer in enumerate(model.layers)}
    x = torch.randn(4, sizes[0]).double()
    expected, spaces = model(x), trace(model)
    moved = followed(structures, fold_(model, structures, spaces))
    assert_close(model(x), expected)
    complete = min(sizes) >= k  # every block goes through every layer, so no layer has dormant neurons
    for i in range(1, len(sizes) - 1):
        reader, writer = moved[f"layers.{i}"], moved[f"layers.{i - 1}"]
        assert in_order(reader.col_block) or reader.n_blocks < 2
        assert in_order(writer.row_block) or not complete
    if complete:
        assert all(junction.shuffles == 0 for junction in junctions(moved, spaces))


@settings(max_examples=12)
@given(st.integers(2, 4), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_finer_blocks_of_the_writer_need_no_shuffle(k, finer, seed):
    rng = np.random.default_rng(seed)
    model = nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 6))
    reader = scattered(rng, 24, k)
    writer = reader * finer + rng.integers(0, finer, 24)
    structures = {
        "0": BipartiteStructure.from_labels(writer, np.arange(5)),
        "2": BipartiteStructure.from_labels(scattered(rng, 6, k), reader),
    }
    moved = followed(structures, fold_(model, structures, trace(model)))
    assert in_order(moved["0"].row_block)
    assert in_order(moved["2"].col_block)


def test_different_partitions_leave_one_shuffle():
    rng = np.random.default_rng(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))
    structures = {
        "0": BipartiteStructure.from_labels(np.arange(16) % 4, np.arange(4)),
        "2": BipartiteStructure.from_labels(np.arange(4), np.arange(16) // 4),
    }
    spaces = trace(model)
    assert [j.shuffles for j in junctions(structures, spaces)] == [0, 1, 0]
    structures["2"] = BipartiteStructure.from_labels(np.arange(4), rng.permutation(16) // 4)
    moved = followed(structures, fold_(model, structures, spaces))
    assert in_order(moved["2"].col_block)
    between = junctions(moved, spaces)[1]
    assert between.shuffles == 1
    assert str(between) == "0 → 2: one shuffle left: blocks differ between these layers"


def test_outer_orders_stay():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    structures = {
        "0": BipartiteStructure.from_labels(np.arange(8) % 2, np.arange(4) % 2),
        "2": BipartiteStructure.from_labels(np.arange(4) % 2, np.arange(8) % 2),
    }
    spaces = trace(model)
    folds = fold_(model, structures, spaces)
    moved = followed(structures, folds)
    assert [fold.places for fold in folds] == [(("0.weight", 0), ("0.bias", 0), ("2.weight", 1))]
    assert moved["0"].col_block.tolist() == moved["2"].row_block.tolist() == [0, 1, 0, 1]
    assert [j.outcome for j in junctions(moved, spaces)] == [
        "one shuffle left: an input of the model",
        "nothing to move",
        "one shuffle left: an output of the model",
    ]


def test_gate_up_and_down_come_out_together():
    rng = np.random.default_rng(0)
    hidden, model = scattered(rng, 12, 3), Gated()
    structures = {name: plant_(model.get_submodule(name).weight, hidden, np.arange(6) // 2) for name in ("gate", "up")}
    structures["down"] = plant_(model.down.weight, np.arange(6) // 2, hidden)
    spaces = trace(model)
    moved = followed(structures, fold_(model, structures, spaces))
    assert all(j.outcome == "nothing to move" for j in junctions(moved, spaces))


def test_channels_carry_their_columns_through_flatten():
    rng = np.random.default_rng(0)
    model = CNN()
    channels = scattered(rng, 6, 2)
    structures = {
        "second": plant_(model.second.weight, channels, scattered(rng, 8, 2)),
        "head": plant_(model.head.weight, np.array([0, 0, 0, 1, 1]), channels.repeat(15 * 15)),
    }
    spaces = trace(model)
    moved = followed(structures, fold_(model, structures, spaces))
    assert in_order(moved["head"].col_block)
    assert in_order(moved["second"].row_block)
    assert in_order(moved["second"].col_block)  # the space before it followed


def test_blocks_of_whole_heads_come_together():
    model = Attention()
    heads = np.array([0, 1, 0]).repeat(4)
    outer = np.arange(12) // 6
    structures = {name: plant_(model.get_submodule(name).weight, heads, outer) for name in ("query", "key", "value")}
    structures["out"] = plant_(model.out.weight, outer, heads)
    spaces = trace(model, torch.zeros(2, 5, 12))
    x = torch.randn(2, 5, 12)
    expected = model(x)
    moved = followed(structures, fold_(model, structures, spaces))
    assert_close(model(x), expected)
    assert all(in_order(moved[name].row_block) for name in moved)
    assert all(in_order(moved[name].col_block) for name in moved)


def test_blocks_inside_heads_do_not_leave_them():
    rng = np.random.default_rng(0)
    model = Attention()
    inside = np.concatenate([rng.permutation([0, 0, 1, 1]) for _ in range(3)])
    structures = {"value": plant_(model.value.weight, inside, np.arange(12) // 6)}
    spaces = trace(model, torch.zeros(2, 5, 12))
    moved = followed(structures, fold_(model, structures, spaces))
    assert moved["value"].row_block.tolist() == [0, 0, 1, 1] * 3
    assert "across heads" in junctions(moved, spaces)[-1].outcome


def test_nothing_moves_without_blocks_or_where_all_is_in_order():
    model = MLP()
    spaces = trace(model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    one = {f"layers.{i}": decompose(layer.weight) for i, layer in enumerate(model.layers)}
    assert fold_(model, one, spaces) == []
    structure = BipartiteStructure.from_labels(np.arange(12) // 6, np.arange(12) // 6)
    assert fold_(model, {"layers.1": structure}, spaces) == []
    assert fold_(model, {"elsewhere": structure}, spaces) == []
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_dormant_neurons_come_last():
    model = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 2))
    structures = {"2": BipartiteStructure.from_labels(np.array([0, 1]), np.array([-1, 1, 0, -1, 1]))}
    folds = fold_(model, structures, trace(model))
    assert folds[0].order.tolist() == [2, 1, 4, 0, 3]
    assert followed(structures, folds)["2"].col_block.tolist() == [0, 1, 1, -1, -1]


def test_a_structure_of_another_size_is_refused():
    model = MLP()
    structure = BipartiteStructure.from_labels(np.arange(5), np.arange(5))
    with pytest.raises(InvalidOption, match=r"'layers.1' is \(5, 5\), its layer is \(12, 12\)"):
        fold_(model, {"layers.1": structure}, trace(model))


def test_a_model_without_the_tensors_is_refused_untouched():
    model = MLP()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    folds = [Fold(torch.tensor([1, 0]), (("layers.0.weight", 0), ("gone.weight", 0)))]
    with pytest.raises(InvalidOption, match="gone"):
        unfold_(model, folds)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
