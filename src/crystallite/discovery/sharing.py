"""`shared_inputs`: inputs that matter to more modules than their own."""

from __future__ import annotations

import numpy as np

__all__ = ["shared_inputs"]

# Read off networks of separate tasks (benchmarks/discovery.py), where nothing is shared: there no set of inputs that
# pass the first three explains more than 0.4 % of a foreign module.
_AVERAGE = 0.15  # of what an average input of the module explains of it
_OWN = 0.3  # of what the input explains of its own module
_USUAL = 5  # times the part that inputs of this network usually have in a foreign module
_WORTH = 0.01  # of a module's variance, which all that is copied for it must explain together


def shared_inputs(energy: np.ndarray, outputs: np.ndarray, inputs: np.ndarray) -> np.ndarray:
    """(k, inputs) bool: which inputs of other modules each module reads too.

    What an input explains of a module is its share of the energy J² of each output, on average over the outputs.
    Initial weights that training has left let every input reach every output, so the question is what exceeds that. An
    input is shared with a foreign module if it explains at least 0.15 of what the module's own inputs do on average
    (it matters there), 0.3 of what it explains of its own module (not much less than at home), and five times the part
    that inputs of this network usually have in foreign modules (more than a leftover; the median, weighted by energy).
    If all of them together explain less than 1 % of the module, it has none: not worth a copy.

    - `energy`: (outputs, inputs) J².
    - `outputs`, `inputs`: the module of each, −1 for dormant ones, which are never shared.

    >>> apart = np.array([[8.0, 8.0, 0.1, 0.1], [0.1, 0.1, 8.0, 8.0]])
    >>> shared_inputs(apart, np.array([0, 1]), np.array([0, 0, 1, 1])).any()
    np.False_
    >>> shared_inputs(apart + np.array([0, 5, 0, 0]), np.array([0, 1]), np.array([0, 0, 1, 1])).tolist()
    [[False, False, False, False], [False, True, False, False]]
    """
    k = int(outputs.max(initial=-1)) + 1
    own = inputs == np.arange(k)[:, None]  # (k, inputs)
    foreign = (inputs >= 0) & ~own
    if not foreign.any():
        return foreign
    totals = energy.sum(1, keepdims=True)
    shares = energy / np.where(totals > 0, totals, 1)
    explained = np.stack([shares[outputs == module].mean(0) for module in range(k)])
    average = np.where(own, explained, 0).sum(1, keepdims=True) / np.maximum(own.sum(1, keepdims=True), 1)
    at_home = np.where(own, explained, 0).sum(0)
    part = explained / np.where(at_home > 0, at_home, np.inf)
    usual = _weighted_median(part[foreign], np.broadcast_to(at_home, foreign.shape)[foreign])
    found = foreign & (explained >= _AVERAGE * average) & (part >= max(_OWN, _USUAL * usual))
    return found & (np.where(found, explained, 0).sum(1, keepdims=True) >= _WORTH)


def _weighted_median(values: np.ndarray, weights: np.ndarray) -> float:
    order = np.argsort(values)
    so_far = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(so_far, so_far[-1] / 2)])
