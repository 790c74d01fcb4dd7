"""`discover`: the functional modules of a model."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from crystallite.core.suggest import suggest_keywords
from crystallite.discovery.energy import jacobian_energy
from crystallite.discovery.modules import Modules
from crystallite.discovery.sharing import shared_inputs
from crystallite.models.preparing import prepared
from crystallite.partitioning.coclustering import agreement, assign, cocluster

__all__ = ["discover", "strength"]

_RESAMPLES = 10
_NEGLIGIBLE = 0.03  # of an output's variance; what all dormant inputs together may explain


@suggest_keywords
def discover(model: nn.Module, data: Any, samples: int = 1500) -> Modules:
    """The functional modules of a model: which of its outputs listen to which of its inputs, through which neurons.

    Measured on data, not read off single weights: J²[o, i] = E[(∂z_o/∂x_i)²]·var(x_i), the variance of an output that
    an input explains, is co-clustered by the singular vectors of √J². The number of modules may well be 1: a split is
    proposed only where the spectrum has a gap that single-task networks do not show (benchmarks/discovery.py).

    The inputs are the first floating-point tensor, flattened; the outputs are the last axis of the logits (or of the
    first tensor that the model returns). The model is run in evaluation mode and left as it was. One backward pass per
    output and batch. Results do not depend on chance: bootstrap weights are drawn from a fixed seed.

    Args:
        model: the model; it is left as it was.
        data: batches as a `DataLoader` gives them, or one tensor, dict or tuple; labels are not used. Samples should
            look as if drawn from what the model will see: tasks whose inputs always change together cannot be
            separated.
        samples: how many of them are used at most.

    Returns:
        The `Modules`, possibly one: for every input, hidden neuron and output, which module it belongs to, and which
        inputs other modules read too.

    Raises:
        InvalidOption: fewer than two samples, or data or outputs that are not as above.

    Examples:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> first, second = torch.tensor([0, 1, 0, 1]), torch.tensor([0, 1])  # two parts that share nothing
        >>> model[0].weight.data = (first[:, None] == first).float()
        >>> model[2].weight.data = (second[:, None] == first).float()
        >>> found = discover(model, torch.randn(100, 4))
        >>> found.k, found.inputs.tolist(), found.hidden["0"].tolist(), found.outputs.tolist()
        (2, [0, 1, 0, 1], [0, 1, 0, 1], [0, 1])
    """
    model, _ = prepared(model)
    energy = jacobian_energy(model, data, samples, _RESAMPLES, hidden=True)
    found = cocluster(strength(energy.inputs))
    labels = np.concatenate([found.rows, found.cols])
    agreements = [
        agreement(np.concatenate(cocluster(strength(resampled))[:2]), labels) for resampled in energy.resampled
    ]
    return Modules(
        k=found.k,
        inputs=found.cols,
        outputs=found.rows,
        hidden={name: assign(strength(part), found.rows) for name, part in energy.hidden.items()},
        spectrum=found.spectrum,
        gap=found.gap,
        stability=float(np.mean(agreements)),
        energy=energy.inputs,
        samples=energy.samples,
        shared=shared_inputs(energy.inputs, found.rows, found.cols),
    )


def strength(energy: np.ndarray) -> np.ndarray:
    """√J² without the columns that together explain less than 3 % of every output's variance.

    The weights of such inputs are mostly what the initialisation left there, and would be assigned by chance.

    >>> strength(np.array([[4.0, 1e-9, 0.0], [9.0, 0.0, 0.0]]))
    array([[2., 0., 0.],
           [3., 0., 0.]])
    """
    totals = energy.sum(1, keepdims=True)
    shares = energy / np.where(totals > 0, totals, 1)
    live = shares.max(0, initial=0) * energy.shape[1] > _NEGLIGIBLE
    return np.sqrt(np.where(live, energy, 0))
