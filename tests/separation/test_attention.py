"""Attention comes apart by whole heads, as exactly as feed-forward pairs do."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import crystallite as cx
from crystallite.graph.chains import find_chains
from crystallite.partitioning.partition import joint_components, random_partition
from crystallite.separation import upgrade
from crystallite.structure.decompose import expand_columns
from tests.helpers.tolerance import assert_close

STREAM, HEADS, WIDTH = 16, 4, 4
LAYERS = ("*ask", "*key", "*say", "*out", "*up", "*down")


class Block(nn.Module):
    """A layer of a transformer under names of its own; `groups` heads of keys and values."""

    def __init__(self, groups):
        super().__init__()
        self.groups = groups
        self.first, self.second = nn.LayerNorm(STREAM), nn.LayerNorm(STREAM)
        self.ask, self.out = nn.Linear(STREAM, HEADS * WIDTH), nn.Linear(HEADS * WIDTH, STREAM)
        self.key, self.say = nn.Linear(STREAM, groups * WIDTH), nn.Linear(STREAM, groups * WIDTH)
        self.up, self.down = nn.Linear(STREAM, 64), nn.Linear(64, STREAM)

    def forward(self, x):
        q, k, v = (
            layer(self.first(x)).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for layer in (self.ask, self.key, self.say)
        )
        k, v = (side.repeat_interleave(HEADS // self.groups, 1) for side in (k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Fused(nn.Module):
    """Queries, keys and values of each head one after the other in one layer, as in GPT-NeoX."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(STREAM, 3 * HEADS * WIDTH), nn.Linear(HEADS * WIDTH, STREAM)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (HEADS, 3 * WIDTH)).transpose(1, 2).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def chains_of(net, targets=LAYERS):
    example = torch.randn(2, 5, STREAM, generator=torch.Generator().manual_seed(0))
    return find_chains(net, targets, example=example, modes=("evaluation",), heads=True)


def planted(groups, blocks):
    """A transformer with blocks of weights well over the bound and noise everywhere, and the blocks."""
    torch.manual_seed(0)
    net = nn.Sequential(Block(groups), Block(groups)).eval()
    partition = random_partition(chains_of(net), blocks)
    with torch.no_grad():
        for name in partition.layers:
            weight = net.get_submodule(name).weight
            weight.copy_(0.1 * weight + partition.mask(name) * 4 * weight)
    return net, partition


@pytest.mark.parametrize("groups", [4, 2])
def test_heads_join_the_layers_of_an_attention(groups):
    attention, pair = chains_of(nn.Sequential(Block(groups)))
    assert attention.layers == ("0.ask", "0.key", "0.say", "0.out")
    assert attention.sizes == {"in": STREAM, "heads": groups, "out": STREAM}
    assert attention.written("0.ask").tolist() == np.repeat(range(groups), STREAM // groups).tolist()
    assert attention.written("0.say").tolist() == np.repeat(range(groups), WIDTH).tolist()
    assert attention.read("0.out").tolist() == np.repeat(range(groups), STREAM // groups).tolist()
    assert pair.layers == ("0.up", "0.down")


def test_queries_keys_and_values_may_be_one_layer():
    (chain,) = chains_of(Fused(), ["*"])
    assert chain.layers == ("qkv", "out")
    assert chain.written("qkv").tolist() == np.repeat(range(HEADS), 3 * WIDTH).tolist()


def test_heads_join_only_where_all_their_layers_are_named():
    found = chains_of(nn.Sequential(Block(4)), ["*ask", "*key", "*up", "*down"])
    assert [chain.layers for chain in found] == [("0.ask",), ("0.key",), ("0.up", "0.down")]


class Normed(Fused):
    """A norm over all heads, by which they hear each other."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(3 * HEADS * WIDTH)

    def forward(self, x):
        q, k, v = self.norm(self.qkv(x)).unflatten(-1, (HEADS, 3 * WIDTH)).transpose(1, 2).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Crossed(Block):
    """Keys are shared by heads 0 and 1, and 2 and 3, but values by 0 and 2, and 1 and 3."""

    def __init__(self):
        super().__init__(2)

    def forward(self, x):
        q, k, v = (
            layer(self.first(x)).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for layer in (self.ask, self.key, self.say)
        )
        k, v = k.repeat_interleave(2, 1), v.repeat(1, 2, 1, 1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("made", [Normed, Crossed])
def test_heads_that_act_on_each_other_join_nothing(made):
    torch.manual_seed(0)
    assert all(len(chain.layers) == 1 for chain in chains_of(made(), ["*"]))


@pytest.mark.parametrize(("groups", "blocks"), [(4, 4), (2, 2)])
def test_attention_and_pairs_become_exact_blocks(groups, blocks, tmp_path):
    net, partition = planted(groups, blocks)
    data = [torch.randn(8, 10, STREAM) for _ in range(12)]
    small = upgrade(net, data=data, epochs=10, learning_rate=5e-3, partition=partition)
    options, state = cx.record(small).options, cx.restore(small).state_dict()
    assert options.chains == tuple(chain.layers for chain in partition.chains)
    for chain in partition.chains:
        kept = {}
        for name in chain.layers:
            weight = state[f"{name}.weight"]
            kept[name] = cx.anneal(weight, options.nulls[f"{name}.weight"], options.level, rule="neyman").mask
            assert torch.equal(kept[name], weight != 0)
            assert not weight[~partition.mask(name)].any()
        assert np.concatenate(list(joint_components(chain, kept).values())).max() + 1 == blocks
    assert options.history[-1].loss < 0.1
    before, after = cx.summary(small).macs
    assert after <= before / blocks
    cx.save(small, tmp_path / "small")
    again = cx.load(tmp_path / "small", into=nn.Sequential(Block(groups), Block(groups)))
    with torch.no_grad():
        assert_close(small(data[0]), cx.restore(small)(data[0]))
        assert torch.equal(again(data[0]), small(data[0]))


def test_a_block_of_heads_reads_and_writes_features_of_its_own():
    net, _ = planted(4, 2)
    data = [torch.randn(8, 10, STREAM) for _ in range(12)]
    small = upgrade(net, blocks=2, data=data, epochs=2, learning_rate=5e-3, targets=LAYERS, level=0.5)
    options, state = cx.record(small).options, cx.restore(small).state_dict()
    labels = options.labels[0]
    heads, read, written = (np.array(labels[group]) for group in ("heads", "in", "out"))
    assert np.bincount(heads).tolist() == [2, 2]
    rows = np.repeat(heads, WIDTH)
    for name in ("ask", "key", "say"):
        assert not state[f"0.{name}.weight"][torch.from_numpy(rows[:, None] != read)].any()
    assert not state["0.out.weight"][torch.from_numpy(written[:, None] != rows)].any()


def test_blocks_of_heads_may_share_the_stream_they_read(tmp_path):
    net, _ = planted(4, 4)
    data = [torch.randn(8, 10, STREAM) for _ in range(12)]
    asked = {"blocks": 4, "data": data, "epochs": 4, "learning_rate": 5e-3, "targets": LAYERS, "level": 0.5}
    small = upgrade(net, **asked, shared_inputs=["*.ask", "*.key", "*.say"])
    options, state = cx.record(small).options, cx.restore(small).state_dict()
    for number, chain in enumerate(options.chains):
        if "0.up" in chain or "1.up" in chain:
            assert not options.copies[number]
            continue
        labels = {group: np.array(own) for group, own in options.labels[number].items()}
        rows = np.repeat(labels["heads"], WIDTH)
        for name in chain[:3]:  # every head reads features of all blocks; by copies the weight is in exactly four
            wide = cx.decompose(expand_columns(state[f"{name}.weight"] != 0, rows)).blocks
            assert state[f"{name}.weight"][torch.from_numpy(rows[:, None] != labels["in"])].any()
            assert [set(rows[own]) for own, _ in wide] == [{int(rows[own[0]])} for own, _ in wide]
            assert len(wide) == 4
        assert not state[f"{chain[3]}.weight"][torch.from_numpy(labels["out"][:, None] != rows)].any()
    cx.save(small, tmp_path / "small")
    again = cx.load(tmp_path / "small", into=nn.Sequential(Block(4), Block(4)))
    with torch.no_grad():
        assert_close(small(data[0]), cx.restore(small)(data[0]))
        assert torch.equal(again(data[0]), small(data[0]))
    with pytest.raises(cx.InvalidOption, match=r"shared_inputs: no layer .* matches '\*aks'; the nearest is"):
        upgrade(net, **asked, shared_inputs="*aks")


class Gated(nn.Module):
    """A gated feed-forward pair on a stream."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(STREAM, 64, False), nn.Linear(STREAM, 64, False)
        self.down = nn.Linear(64, STREAM, False)

    def forward(self, x):
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def test_blocks_of_gated_pairs_may_share_the_stream_they_read():
    torch.manual_seed(0)
    net, data = nn.Sequential(Gated(), Gated()), [torch.randn(64, STREAM) for _ in range(12)]
    small = upgrade(net, blocks=4, data=data, epochs=2, learning_rate=5e-3, level=0.5, shared_inputs="*")
    options, state = cx.record(small).options, cx.restore(small).state_dict()
    for labels, layers in zip(options.labels, options.chains, strict=True):
        written, hidden = (np.array(labels[group]) for group in ("out", "hidden 1"))
        for name in layers[:2]:
            wide = cx.decompose(expand_columns(state[f"{name}.weight"] != 0, hidden)).blocks
            assert len(wide) == 4
            assert (state[f"{name}.weight"][torch.from_numpy(hidden[:, None] != np.array(labels["in"]))] != 0).any()
        assert not state[f"{layers[2]}.weight"][torch.from_numpy(written[:, None] != hidden)].any()
    with torch.no_grad():
        assert_close(small(data[0]), cx.restore(small)(data[0]))


def test_more_blocks_than_heads_are_refused():
    net, data = nn.Sequential(Block(2)), [torch.randn(8, 10, STREAM)]
    with pytest.raises(cx.InvalidOption, match="2 attention heads are too few for 4 blocks"):
        upgrade(net, blocks=4, data=data, targets=LAYERS)
