"""Which layers separate together."""

import pytest
import torch
from torch import nn

from crystallite.core.errors import InvalidOption
from crystallite.graph.chains import find_chains
from tests.helpers.block_models import Fused, Gated


def mlp():
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 20), nn.ReLU(), nn.Linear(20, 8))


class Residual(nn.Module):
    """A norm over the stream, a pair that reads and writes it, a head."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down, self.head = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(x + self.down(nn.functional.gelu(self.up(self.norm(x)))))


def test_an_mlp_is_one_chain():
    (chain,) = find_chains(mlp())
    assert chain.layers == ("0", "2", "4")
    assert chain.sizes == {"in": 12, "hidden 1": 16, "hidden 2": 20, "out": 8}


def test_an_ignored_layer_ends_the_chain():
    (chain,) = find_chains(mlp(), ignore=["4"])
    assert chain.layers == ("0", "2")
    assert list(chain.sizes.values()) == [12, 16, 20]


def test_a_subclass_that_computes_the_same_is_a_layer_of_a_chain():
    class Own(nn.Linear):
        def forward(self, x):
            return x @ self.weight.T + self.bias

    class Clipped(nn.Linear):
        def forward(self, x):
            return super().forward(x).clamp(-1, 1)

    (chain,) = find_chains(nn.Sequential(Own(12, 16), nn.ReLU(), nn.Linear(16, 8)))
    assert chain.layers == ("0", "2")
    (chain,) = find_chains(nn.Sequential(Clipped(12, 16), nn.ReLU(), nn.Linear(16, 8)), example=torch.zeros(2, 12))
    assert chain.layers == ("2",)


def test_a_pair_keeps_the_order_of_its_stream():
    (chain,) = find_chains(Residual(), example=torch.zeros(2, 8))
    assert chain.layers == ("up", "down")
    assert chain.reads["up"] != chain.writes["down"]  # read and written features are shared out apart


def test_a_gate_shares_the_hidden_neurons():
    (chain,) = find_chains(Gated())
    assert set(chain.layers) == {"one", "two", "three"}
    assert len(set(chain.sizes)) == 3


def test_gate_and_value_in_one_layer_are_one_hidden_neuron():
    (chain,) = find_chains(Fused())
    assert chain.layers == ("both", "down")
    assert chain.sizes == {"in": 16, "hidden 1": 32, "out": 16}
    assert chain.written("both").tolist() == [*range(32), *range(32)]
    assert chain.read("down").tolist() == [*range(32)]


def test_named_layers_separate_alone():
    chains = find_chains(Residual(), targets=["head"], example=torch.zeros(2, 8))
    assert [chain.layers for chain in chains] == [("head",)]


class Attention(nn.Module):
    """Queries, keys, values and their output beside a feed-forward pair, which a norm inside it hides."""

    def __init__(self, hides):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.inner = nn.LayerNorm(32) if hides else nn.Identity()

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(self.inner(nn.functional.gelu(self.up(x))))


def test_attention_is_separated_only_where_it_is_named():
    x = torch.zeros(2, 5, 8)
    assert [chain.layers for chain in find_chains(Attention(False), example=x)] == [("up", "down")]
    with pytest.raises(InvalidOption, match=r"no two layers share hidden neurons, .* pass targets="):
        find_chains(Attention(True), example=x)
    named = find_chains(Attention(True), targets=["qkv", "out"], example=x)
    assert sorted(name for chain in named for name in chain.layers) == ["out", "qkv"]


class Experts(nn.Module):
    """All experts for every token, in stacks."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 16, 8)), nn.Parameter(torch.randn(4, 8, 16))

    def forward(self, x):
        return torch.einsum("eoh,bleh->blo", self.down, torch.relu(torch.einsum("ehi,bli->bleh", self.up, x)))


def test_experts_in_stacks_are_spoken_of_where_there_is_no_pair():
    model = nn.Sequential(Attention(True), Experts())
    with pytest.raises(InvalidOption, match=r"experts in stacks are not separated, .* pass targets="):
        find_chains(model, example=torch.zeros(2, 5, 8))


def test_the_only_layer_need_not_be_named():
    (chain,) = find_chains(nn.Linear(4, 4), example=torch.zeros(2, 4))
    assert chain.layers == ("",)
