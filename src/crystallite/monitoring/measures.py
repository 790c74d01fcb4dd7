"""What one look at a model in training records: a row for each weight matrix, and one for the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from crystallite.annealing.anneal import anneal
from crystallite.annealing.distributions import Null
from crystallite.annealing.fitting import choose
from crystallite.annealing.initial import named_weights
from crystallite.core.errors import CrystalliteError
from crystallite.discovery.discover import strength
from crystallite.discovery.energy import jacobian_energy
from crystallite.partitioning.coclustering import Clusters, cocluster
from crystallite.structure.levels import level_profile

__all__ = ["MODEL", "FunctionalMap", "Row", "functional_map", "initial_nulls", "layer_row", "matrices", "problem_row"]

Row = dict[str, Any]
MODEL = "(model)"  # the layer of rows about the whole
_SAMPLES = 256
_SIGMAS = 8
_PROFILE = 8  # thresholds at which a row has the level profile


@dataclass(frozen=True, eq=False)
class FunctionalMap:
    """√J² between the outputs and inputs of a model, and its modules."""

    strength: np.ndarray  # (outputs, inputs)
    clusters: Clusters

    @property
    def picture(self) -> np.ndarray:
        """(outputs, inputs) between 0 and 1, sorted by modules, dormant ones last."""
        last = np.iinfo(int).max
        rows, cols = (np.argsort(np.where(c < 0, last, c), kind="stable") for c in self.clusters[:2])
        return self.strength[np.ix_(rows, cols)] / max(float(self.strength.max(initial=0)), 1e-300)

    def row(self) -> Row:
        sigma = [round(float(s), 6) for s in self.clusters.spectrum[:_SIGMAS]]
        return {"layer": MODEL, "sigma": sigma, "gap": self.clusters.gap, "modules": self.clusters.k}


def matrices(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weight matrices of a model as operators, in main memory; gate stacks come apart."""
    return {name: matrix.cpu() for name, matrix, _ in named_weights(model)}


def initial_nulls(model: nn.Module) -> dict[str, Null]:
    """The null of each weight: its initialisation if that explains the bulk of it now, else the bulk itself."""
    return {name: choose(matrix.cpu(), [null], name).null for name, matrix, null in named_weights(model)}


def layer_row(name: str, matrix: torch.Tensor, null: Null, level: float) -> Row:
    """What the paper's tests and the level profile say about one matrix.

    >>> from crystallite.annealing.distributions import Uniform
    >>> row = layer_row("w", torch.block_diag(torch.ones(4, 4), torch.ones(4, 4)), Uniform(0.5), 0.01)
    >>> row["blocks"], row["largest_share"], row["kept_share"], row["dormant_rows"]
    (2, 0.5, 0.5, 0)
    """
    annealing = anneal(matrix, null, level, rule="neyman", name=name)
    profile = level_profile(matrix, name=name)
    at = profile.at(annealing.threshold)
    thresholds = float(profile.thresholds.max(initial=0)) * np.arange(1, _PROFILE + 1) / _PROFILE
    levels = [profile.at(float(threshold)) for threshold in thresholds]
    return {
        "layer": name,
        "threshold": annealing.threshold,
        "kept_share": annealing.kept_share,
        "blocks": at.n_blocks,
        "largest_share": at.largest_share,
        "dormant_rows": at.dormant[1],
        "dormant_cols": at.dormant[0],
        **(annealing.class_shares or {}),
        "profile": {
            "thresholds": thresholds.tolist(),
            "blocks": [found.n_blocks for found in levels],
            "largest_share": [found.largest_share for found in levels],
        },
    }


def problem_row(name: str, error: CrystalliteError) -> Row:
    """In place of a measurement that was not possible, such as that of weights that are no longer finite."""
    return {"layer": name, "problem": str(error)}


def functional_map(model: nn.Module, batch: Any) -> FunctionalMap:
    """√J² of the model on a batch, of which 256 samples are used at most."""
    found = strength(jacobian_energy(model, batch, _SAMPLES).inputs)
    return FunctionalMap(found, cocluster(found))
