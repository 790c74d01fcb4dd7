"""Which layers separate together."""

import torch
from torch import nn

from crystallite.graph.chains import find_chains
from tests.helpers.block_models import Gated


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


def test_a_pair_keeps_the_order_of_its_stream():
    (chain,) = find_chains(Residual(), example=torch.zeros(2, 8))
    assert chain.layers == ("up", "down")
    assert chain.reads["up"] != chain.writes["down"]  # read and written features are shared out apart


def test_a_gate_shares_the_hidden_neurons():
    (chain,) = find_chains(Gated())
    assert set(chain.layers) == {"one", "two", "three"}
    assert len(set(chain.sizes)) == 3


def test_named_layers_separate_alone():
    chains = find_chains(Residual(), targets=["head"], example=torch.zeros(2, 8))
    assert [chain.layers for chain in chains] == [("head",)]
