"""What one look at a model in training records: a row for each weight matrix, and one for the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from crystallite.annealing.anneal import Annealing, AnnealingOptions, anneal_matrix
from crystallite.annealing.distributions import Null
from crystallite.annealing.fitting import choose
from crystallite.annealing.initial import named_weights
from crystallite.core.errors import CrystalliteError
from crystallite.discovery.discover import strength
from crystallite.discovery.energy import jacobian_energy
from crystallite.partitioning.coclustering import Clusters, cocluster
from crystallite.structure.decompose import decompose
from crystallite.structure.levels import level_profile

__all__ = [
    "MODEL",
    "FunctionalMap",
    "Row",
    "annealings",
    "feedback_rows",
    "functional_map",
    "initial_nulls",
    "layer_row",
    "problem_row",
]

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


def initial_nulls(model: nn.Module) -> dict[str, Null]:
    """The null of each weight: its initialisation if that explains the bulk of it now, else the bulk itself."""
    return {name: choose(matrix.cpu(), [null], name).null for name, matrix, null in named_weights(model)}


def layer_row(annealing: Annealing | Row) -> Row:
    """What the paper's tests and the level profile say about one matrix; a row about a problem stays as it is.

    >>> from crystallite import anneal, nulls
    >>> w = np.kron(np.eye(2), np.ones((4, 4)))
    >>> row = layer_row(anneal(w, nulls.Uniform(0.5), rule="neyman"))
    >>> row["blocks"], row["largest_share"], row["kept_share"], row["dormant_rows"]
    (2, 0.5, 0.5, 0)
    """
    if not isinstance(annealing, Annealing):
        return annealing
    name, matrix = annealing.name, annealing.matrix
    profile = level_profile(matrix, name=name)
    limits = annealing.threshold if annealing.column_thresholds is None else annealing.column_thresholds
    at = decompose(matrix, threshold=limits, name=name)
    thresholds = float(profile.thresholds.max(initial=0)) * np.arange(1, _PROFILE + 1) / _PROFILE
    levels = [profile.at(float(threshold)) for threshold in thresholds]
    return {
        "layer": name,
        "threshold": annealing.threshold,
        "kept_share": annealing.kept_share,
        "blocks": at.n_blocks,
        "largest_share": at.largest_share,
        "dormant_rows": len(at.dormant_rows),
        "dormant_cols": len(at.dormant_cols),
        **(annealing.class_shares or {}),
        "profile": {
            "thresholds": thresholds.tolist(),
            "blocks": [found.n_blocks for found in levels],
            "largest_share": [found.largest_share for found in levels],
        },
    }


def annealings(model: nn.Module, nulls: dict[str, Null], options: AnnealingOptions) -> list[Annealing | Row]:
    """Each weight matrix tested, or a row about why it could not be."""
    found: list[Annealing | Row] = []
    for name, matrix, _ in named_weights(model):
        try:
            annealing = anneal_matrix(matrix.cpu(), nulls[name], options, name)
            _ = annealing.kept  # finds numbers that are not finite
            found.append(annealing)
        except CrystalliteError as error:
            found.append(problem_row(name, error))
    return found


def feedback_rows(found: list[Annealing | Row]) -> list[Row]:
    """A row for each feedback matrix of recurrent layers: one node per hidden unit, an edge where any gate keeps it."""
    stacks: dict[str, list[Annealing | Row]] = {}
    for annealing in found:
        name = annealing.name if isinstance(annealing, Annealing) else annealing["layer"]
        parameter = name.partition("[")[0]
        if parameter.rpartition(".")[2].startswith("weight_hh"):
            stacks.setdefault(parameter, []).append(annealing)
    rows = []
    for parameter, gates in stacks.items():
        tested = [gate for gate in gates if isinstance(gate, Annealing)]
        if len(tested) < len(gates) or len(set(tested[0].shape)) != 1:  # a projected LSTM has no square feedback
            continue
        mask = np.logical_or.reduce([np.asarray(gate.mask) for gate in tested])
        d = decompose(mask, kind="directed", name=parameter)
        rows.append(
            {
                "layer": f"{parameter} (feedback)",
                "sccs": d.n_scc,
                "largest_scc_share": d.largest_share,
                "layers": d.n_layers,
                "components": len(d.components),
                "isolated": int(d.isolated.sum()),
            }
        )
    return rows


def problem_row(name: str, error: CrystalliteError) -> Row:
    """In place of a measurement that was not possible, such as that of weights that are no longer finite."""
    return {"layer": name, "problem": str(error)}


def functional_map(model: nn.Module, batch: Any) -> FunctionalMap:
    """√J² of the model on a batch, of which 256 samples are used at most."""
    found = strength(jacobian_energy(model, batch, _SAMPLES).inputs)
    return FunctionalMap(found, cocluster(found))
