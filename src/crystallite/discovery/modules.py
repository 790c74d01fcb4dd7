"""`Modules`: what `discover` found."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Modules"]

_SHOWN_LAYERS = 6


@dataclass(frozen=True, eq=False, repr=False)
class Modules:
    """Functional modules of a model: sets of outputs that listen to their own inputs. Label −1 is dormant.

    Modules are numbered by their first output. Dormant inputs, or neurons of a layer, together explain less than 3 % of
    the variance of any output; a dormant output is constant on the data. An input belongs to the module where it
    matters most, and may be shared with others that read it too.
    """

    k: int  # 1: no split is proposed; 0: no output changes with any input
    inputs: np.ndarray  # (features,) module of each input, the features of a sample flattened
    outputs: np.ndarray  # (outputs,)
    hidden: Mapping[str, np.ndarray]  # by name of a linear layer: (neurons,)
    spectrum: np.ndarray  # σ of the normalised √J², descending; σ₁ = 1, and σ_k = 1 for k parts that share nothing
    gap: float  # σ_k / σ_{k+1} of the best k ≥ 2, which must exceed 1.6
    stability: float  # mean agreement of the labels of inputs and outputs with those of bootstrap samples
    energy: np.ndarray  # (outputs, inputs) J²[o, i] = E[(∂z_o/∂x_i)²]·var(x_i)
    samples: int
    shared: np.ndarray  # (k, features) bool: inputs of other modules that a module reads too, so that it needs a copy

    @property
    def inside_share(self) -> float:
        """The share of √J² between inputs and outputs of the same module; 1 if the modules share nothing."""
        strength = np.sqrt(self.energy)
        live = np.outer(self.outputs >= 0, self.inputs >= 0)
        inside = live & (self.outputs[:, None] == self.inputs)
        total = float(strength[live].sum())
        return float(strength[inside].sum()) / total if total else 1.0

    def to_json(self) -> dict[str, Any]:
        """Plain values; the energy is left out, as it is as large as the model's input layer."""
        return {
            "k": self.k,
            "inputs": self.inputs.tolist(),
            "shared": [np.flatnonzero(reads).tolist() for reads in self.shared],
            "outputs": self.outputs.tolist(),
            "hidden": {name: labels.tolist() for name, labels in self.hidden.items()},
            "spectrum": self.spectrum.tolist(),
            "gap": self.gap,
            "stability": self.stability,
            "inside_share": self.inside_share,
            "samples": self.samples,
        }

    def _table(self) -> list[list[str]]:
        layers = dict(list(self.hidden.items())[:_SHOWN_LAYERS])
        columns = {"inputs": self.inputs, **layers, "outputs": self.outputs}
        rows = [["module", *columns]]
        for label in [*range(self.k), -1]:
            counts = [int(np.count_nonzero(labels == label)) for labels in columns.values()]
            if label >= 0 or any(counts):
                rows.append([str(label) if label >= 0 else "dormant", *map(str, counts)])
            if label >= 0 and (copies := np.count_nonzero(self.shared[label])):
                rows[-1][1] += f" + {copies} shared"
        return rows

    def _sentence(self) -> str:
        found = {0: "no output depends on any input", 1: "one functional module, no split"}
        leading = ", ".join(f"{s:.2f}" for s in self.spectrum[: max(self.k, 1) + 1])
        return (
            f"{found.get(self.k, f'{self.k} functional modules')}: σ = {leading}, gap {self.gap:.2f}, "
            f"{self.inside_share:.0%} inside, stability {self.stability:.3f} on {self.samples} samples"
        )

    def __repr__(self) -> str:
        rows = self._table()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True)) for row in rows]
        if len(self.hidden) > _SHOWN_LAYERS:
            lines.append(f"and {len(self.hidden) - _SHOWN_LAYERS} more layers")
        return "\n".join([self._sentence(), *(f"  {line}" for line in lines)])

    def _repr_html_(self) -> str:
        head, *body = self._table()
        cells = [f"<tr>{''.join(f'<th>{html.escape(c)}</th>' for c in head)}</tr>"]
        cells += [f"<tr>{''.join(f'<td>{html.escape(c)}</td>' for c in row)}</tr>" for row in body]
        return f"<p>{html.escape(self._sentence())}</p><table>{''.join(cells)}</table>"
