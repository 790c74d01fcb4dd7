"""A recurrent module whose feedback has a planted structure."""

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

INPUT, HIDDEN = 7, 20
MODES = ["RNN_TANH", "RNN_RELU", "GRU", "LSTM"]
STRUCTURES = ["independent", "triangular", "one block", "isolated", "diagonal", "ragged", "chain", "fan", "random"]


def edges(structure, seed=0, n=HIDDEN):
    """hears[i, j] of a planted structure, its units shuffled."""
    rng = np.random.default_rng(seed)
    group = np.arange(n) * 4 // n
    size = np.repeat([0, 1, 2, 3, 4, 5], [1, 2, 3, 5, 8, n - 19])  # components of which one is a single unit
    hears = {
        "independent": group[:, None] == group,
        "triangular": group[:, None] >= group,
        "one block": np.ones((n, n), bool),
        "isolated": np.zeros((n, n), bool),
        "diagonal": np.eye(n, dtype=bool),
        "ragged": size[:, None] == size,
        "chain": np.tri(n, k=-1, dtype=bool),
        "fan": (group[:, None] == 1) & (group <= 1) | (group[:, None] == 2) & (group == 1),  # single → block → single
        "random": rng.random((n, n)) < 1.3 / n,
    }[structure]
    place = rng.permutation(n)
    return torch.from_numpy(hears[place][:, place])


def planted(mode, structure, layers=1, bidirectional=False, dtype=torch.float64, **options):
    """A dense module with another shuffle of the structure in each layer and direction."""
    torch.manual_seed(0)
    if mode.startswith("RNN"):
        options["nonlinearity"] = mode[4:].lower()
    cls = {"GRU": nn.GRU, "LSTM": nn.LSTM}.get(mode, nn.RNN)
    dense = cls(INPUT, HIDDEN, layers, bidirectional=bidirectional, dtype=dtype, **options)
    with torch.no_grad():
        for seed, (name, weight) in enumerate(dense.named_parameters()):
            if name.startswith("weight_hh"):
                weight.mul_(edges(structure, seed).repeat(len(weight) // HIDDEN, 1))
    return dense


def flat(result):
    """All tensors of what a recurrent module returns."""
    output, states = result
    output = output.data if isinstance(output, PackedSequence) else output
    return [output, *(states if isinstance(states, tuple) else [states])]
