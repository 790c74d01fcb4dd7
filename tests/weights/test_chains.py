"""Which layers follow each other, from names and shapes alone."""

import pytest
import torch
from torch import nn

from crystallite.weights.chains import known_chains
from crystallite.weights.checkpoint import open_checkpoint
from crystallite.weights.layers import recognise


def chains_of(state):
    return [
        [layer.name for layer in chain.layers]
        for chain in known_chains([layer for layer in recognise(open_checkpoint(state)) if layer.kind != "skipped"])
    ]


def state(**shapes):
    return {f"{name.replace('__', '.')}.weight": torch.ones(*shape) for name, shape in shapes.items()}


def test_a_sequential_is_one_chain_in_numeric_order():
    layers = [layer for size in range(11) for layer in (nn.Linear(4 + size, 5 + size), nn.ReLU())]
    (found,) = chains_of(nn.Sequential(*layers))
    assert found == [str(2 * i) for i in range(11)]


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ({"l__0__mlp__gate_proj": (8, 4), "l__0__mlp__up_proj": (8, 4), "l__0__mlp__down_proj": (4, 8)}, 3),
        ({"l__0__feed_forward__w1": (8, 4), "l__0__feed_forward__w2": (4, 8), "l__0__feed_forward__w3": (8, 4)}, 3),
        ({"l__0__intermediate__dense": (8, 4), "l__0__output__dense": (4, 8),
          "l__0__attention__output__dense": (4, 4)}, 2),
        ({"fc1": (8, 4), "fc2": (6, 8), "fc3": (2, 6)}, 3),
        ({"fc1": (8, 4), "fc2": (6, 9)}, 0),  # sizes do not fit
        ({"q_proj": (4, 4), "k_proj": (4, 4), "v_proj": (4, 4)}, 0),
        ({"heads__0": (4, 4), "heads__1": (4, 4), "heads__2": (4, 4)}, 0),  # may stand side by side
    ],
)  # fmt: skip
def test_feed_forward_pairs_and_numbered_layers(shapes, expected):
    found = chains_of(state(**shapes))
    assert [len(chain) for chain in found] == ([expected] if expected else [])


def test_gated_layers_write_the_same_neurons():
    shapes = {"gate_proj": (8, 4), "up_proj": (8, 4), "down_proj": (4, 8)}
    layers = [layer for layer in recognise(open_checkpoint(state(**shapes))) if layer.kind != "skipped"]
    (chain,) = known_chains(layers)
    assert (chain.writes, chain.reads) == ((0, 0, 2), (1, 1, 0))


def test_input_and_feedback_weights_of_each_recurrent_layer():
    gru = nn.GRU(3, 5, num_layers=2, bidirectional=True)
    assert chains_of(gru) == [
        [f"weight_ih_l{end}", f"weight_hh_l{end}"] for end in ("0", "0_reverse", "1", "1_reverse")
    ]
