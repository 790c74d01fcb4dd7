"""Null models f0 of annealing: known initialisations, measured bulks, and the choice between them.

>>> from crystallite.annealing import nulls
>>> round(nulls.Uniform(0.05).shrunk(0.94).threshold(0.01), 6)
0.04653
"""

from crystallite.annealing.distributions import Normal, Null, Orthogonal, TruncatedNormal, Uniform
from crystallite.annealing.fitting import Empirical, Fit, FromInit, choose, fit
from crystallite.annealing.initial import (
    candidates,
    for_module,
    kaiming_normal,
    kaiming_uniform,
    orthogonal,
    xavier_normal,
    xavier_uniform,
)

__all__ = [
    "Empirical",
    "Fit",
    "FromInit",
    "Normal",
    "Null",
    "Orthogonal",
    "TruncatedNormal",
    "Uniform",
    "candidates",
    "choose",
    "fit",
    "for_module",
    "kaiming_normal",
    "kaiming_uniform",
    "orthogonal",
    "xavier_normal",
    "xavier_uniform",
]
