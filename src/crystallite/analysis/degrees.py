"""Structure in degrees: the modularity of each layer that does not fall into exact blocks, and of chains of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

import numpy as np

from crystallite.analysis.modularity import Modularity, ModularityOptions, WeightsBetween, modularity_of
from crystallite.annealing.distributions import Null
from crystallite.core.errors import InvalidMatrix
from crystallite.weights.chains import LayerChain
from crystallite.weights.layers import Layer

__all__ = [
    "ChainAnalysis",
    "chain_cells",
    "chain_modularity",
    "in_words",
    "layer_modularity",
    "modular_count",
    "percentile",
]

# Small enough that all layers of a model together take about as long as the rest of their analysis.
OPTIONS = ModularityOptions(primary=19, others=9, sample=128)
_LEAST = 4  # neurons on each side
_SURE = 0.99  # so that one matrix alone, at one of 20, is never called more than chance


@dataclass(frozen=True)
class ChainAnalysis:
    """How modular layers are together that share the neurons between them: one partition for all."""

    name: str
    layers: tuple[str, ...]
    modularity: dict[str, Any]  # as `Modularity.to_json` has it

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def layer_modularity(layer: Layer, matrices: Sequence[Any], nulls: Sequence[Null]) -> dict[str, Any] | None:
    """Of one layer; None for one too small, in groups, or with too few weights to compare."""
    groups = (0, 0) if layer.feedback else (0, 1)
    return _found([edge] if (edge := _edge(layer, matrices, nulls, *groups, split=False)) else [], layer.name)


def chain_modularity(
    chain: LayerChain, matrices: Mapping[str, Sequence[Any]], nulls: Mapping[str, Sequence[Null]]
) -> ChainAnalysis | None:
    """Of a chain, with the matrices of each layer by name; None for one that is too small to compare."""
    edges = []
    for layer, writes, reads in zip(chain.layers, chain.writes, chain.reads, strict=True):
        edge = _edge(layer, matrices[layer.name], nulls[layer.name], writes, reads, split=True)
        if edge is not None:
            edges.append(edge)
    found = _found(edges, chain.name) if len(edges) == len(chain.layers) else None
    return None if found is None else ChainAnalysis(chain.name, tuple(layer.name for layer in chain.layers), found)


def _edge(
    layer: Layer, matrices: Sequence[Any], nulls: Sequence[Null], writes: int, reads: int, split: bool
) -> WeightsBetween | None:
    """split: stacked gates of input weights belong to the same hidden units."""
    if layer.kernel:
        if layer.groups not in (None, 1):
            return None
        places = int(np.prod(layer.kernel))
        (matrix,) = matrices
        return WeightsBetween(tuple(matrix[:, p::places] for p in range(places)), writes, reads, (nulls[0],) * places)
    if split and layer.gates > 1 and not layer.feedback:
        (matrix,), hidden = matrices, layer.rows // layer.gates
        gates = tuple(matrix[i * hidden : (i + 1) * hidden] for i in range(layer.gates))
        return WeightsBetween(gates, writes, reads, (nulls[0],) * layer.gates)
    return WeightsBetween(tuple(matrices), writes, reads, tuple(nulls))


def _found(edges: Sequence[WeightsBetween], name: str) -> dict[str, Any] | None:
    if not edges or min(min(edge.shape) for edge in edges) < _LEAST:
        return None
    try:
        found: Modularity = modularity_of(edges, OPTIONS, name)
    except InvalidMatrix:  # no weights, or so few that none lies between the sampled neurons
        return None
    return found.to_json()


def in_words(found: Mapping[str, Any]) -> str:
    """How modular weights are, as a sentence."""
    place = f"percentile {found['percentile']:.0f} ± {found['error']:.0f}"
    if not found["modular"]:
        return f"No more modular than copies with the same row and column norms ({place})."
    text = (
        f"Modular in degrees: {found['k']} modules score {found['score']:.2f}, copies with the same row and column "
        f"norms {found['expected']:.2f} ({place})"
    )
    hubs, gain = len(found["hubs"]), found["gain_without_hubs"]
    return text + (f"; without {hubs} hub{'s' * (hubs != 1)} {gain:+.2f} beyond chance." if hubs else ".")


def modular_count(found: Sequence[Mapping[str, Any]]) -> str:
    """How many are modular where that is more than chance would call so; "" otherwise."""
    count = sum(each["modular"] for each in found)
    from scipy.stats import binom  # slow to import

    by_chance = 1 / (OPTIONS.primary + 1)
    if count <= binom.ppf(_SURE, len(found), by_chance):
        return ""
    expected = by_chance * len(found)
    return f"{count} of {len(found)} modular in degrees (chance calls {expected:.1f} so)"


def chain_cells(chains: Sequence[ChainAnalysis], with_layers: bool = True) -> list[list[str]]:
    """A table with one line for each chain, by the names of its layers or, shorter, by its own."""
    cells = [["chain", "neurons", "modules", "score", "by chance", "percentile", "hubs"]]
    for chain in chains:
        found = chain.modularity
        sizes = "–".join(map(str, _sizes_in_order(found["sizes"])))
        numbers = [f"{found['score']:.3f}", f"{found['expected']:.3f}", percentile(found), str(len(found["hubs"]))]
        cells.append([_together(chain.layers) if with_layers else chain.name, sizes, str(found["k"]), *numbers])
    return cells


def _together(names: Sequence[str]) -> str:
    """Names with what they begin with in common said once.

    >>> _together(["encoder.0.ffn.lin1", "encoder.0.ffn.lin2"]), _together(["fc1", "fc2"])
    ('encoder.0.ffn: lin1, lin2', 'fc1, fc2')
    """
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    parents = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, levels)]
    ends = ", ".join(".".join(name.split(".")[len(parents) :]) for name in names)
    return f"{'.'.join(parents)}: {ends}" if parents else ends


def _sizes_in_order(sizes: Sequence[int]) -> list[int]:
    """Inputs first: groups are numbered from the rows of the first layer."""
    return [*sizes[1:2], sizes[0], *sizes[2:]]


def percentile(found: Mapping[str, Any] | None) -> str:
    """98±4%

    >>> percentile({"percentile": 97.5, "error": 3.6}), percentile(None)
    ('98±4%', '–')
    """
    return "–" if found is None else f"{found['percentile']:.0f}±{found['error']:.0f}%"
