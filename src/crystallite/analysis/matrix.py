"""The analysis of one layer's weights: tests, blocks, profile, hubs and the shuffled control, as one flat record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from crystallite.analysis.control import Shuffled, shuffled
from crystallite.analysis.degrees import layer_modularity
from crystallite.analysis.verdict import SEPARATE_BLOCKS, finding_of, sentence
from crystallite.annealing.anneal import Annealing, AnnealingOptions, anneal_matrix
from crystallite.annealing.distributions import Null
from crystallite.annealing.fitting import Empirical, Fit, choose
from crystallite.annealing.histogram import MagnitudeHistogram, magnitude_histogram
from crystallite.annealing.initial import candidates
from crystallite.annealing.neyman import percolation_level
from crystallite.annealing.random_walk import DELTA0, TAU
from crystallite.core.arrays import Magnitudes
from crystallite.structure.bipartite import BipartiteStructure
from crystallite.structure.decompose import decompose, directed_from_words
from crystallite.structure.directed import DirectedStructure
from crystallite.structure.hubs import BorderedStructure, hubs
from crystallite.structure.levels import LevelProfile, level_profile
from crystallite.structure.strong import packed
from crystallite.weights.checkpoint import Checkpoint
from crystallite.weights.layers import Layer

__all__ = ["LayerAnalysis", "MatrixAnalysis", "Options", "analyze_layer", "channel_mask", "null_of"]

_PROFILE_POINTS = 24
_FEW_HUBS, _MOST_HUB_EDGES = 16, 1_000_000  # beyond, the search for hubs would outlast everything else
_COPIES = 9  # in random places, that blocks are compared with before they are called so
_ACTIVE = 0.8  # a split counts where at least this share of the neurons is in some block


@dataclass(frozen=True)
class Options:
    """How to test: what `anneal` takes, and whether to stop after the blocks at the one level."""

    null: str = "auto"
    level: float | str = 0.01
    correction: str | None = None
    random_walk: str = "calibrated"
    rule: str = "both"
    alpha: float | None = None
    delta0: float = DELTA0
    tau: float = TAU
    fast: bool = False


@dataclass(frozen=True, repr=False)
class MatrixAnalysis:
    """What was found in one layer's weights; plain numbers and strings, so that it can be stored as JSON."""

    name: str
    kind: str
    rows: int
    cols: int
    matrices: int  # gates of a recurrent layer's feedback; 1 otherwise
    dtype: str
    null: str
    null_is_measured: bool  # the matrix's own bulk, not an initialisation
    null_fit: float  # Kolmogorov–Smirnov distance
    null_fits: bool  # it is no larger than .02, or than chance makes it in a small matrix
    level: float
    threshold: float
    kept: int
    kept_share: float
    expected_false_edges: float
    preference: float
    noise: float
    suppression: float
    by_band_alone: bool  # the level changes nothing: the random-walk band decides alone
    n_blocks: int
    largest_share: float
    active_share: float  # neurons that are in some block
    effective_blocks: float
    dormant_rows: int
    dormant_cols: int
    percolation_level: float
    n_scc: int | None = None  # recurrent feedback only, from here …
    largest_scc_share: float | None = None
    n_layers: int | None = None
    n_components: int | None = None  # … to here
    shuffled: dict[str, Any] | None = None  # the same number of edges in random places
    profile: list[dict[str, Any]] = field(default_factory=list)  # blocks over levels
    best_split: dict[str, Any] | None = None  # where over all levels it is most divided
    hubs: dict[str, Any] | None = None
    modularity: dict[str, Any] | None = None  # in degrees, where it does not fall into exact blocks
    finding: str = ""
    verdict: str = ""

    @property
    def looks_like_chance(self) -> bool:
        """Whether as many edges in random places count for nearly as many blocks of equal size."""
        if self.shuffled is None:
            return False
        return self.effective_blocks < SEPARATE_BLOCKS * self.shuffled["effective_blocks"]

    def __repr__(self) -> str:
        return f"MatrixAnalysis({self.name!r}, {self.rows}×{self.cols}: {self.finding}, {self.kept_share:.2%} kept)"

    def to_json(self) -> dict[str, Any]:
        """The record as a dict of plain values."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class LayerAnalysis:
    """One layer tested and taken apart: what both its row of the table and the report's pictures are made from.

    Holds the layer's weights, so it is used and dropped before the next layer is read.
    """

    layer: Layer
    annealings: tuple[Annealing, ...]  # one, or one for each gate of a recurrent layer's feedback
    structure: BipartiteStructure
    directed: DirectedStructure | None  # of feedback
    profile: LevelProfile | None  # every level of a feed-forward matrix, where it was asked for
    bordered: BorderedStructure | None  # blocks once hubs are set aside, where the matrix was searched for them
    row: MatrixAnalysis


def analyze_layer(checkpoint: Checkpoint, layer: Layer, options: Options) -> LayerAnalysis:
    """One layer, annealed and decomposed once. Reads its tensor once per pass."""
    parts = layer.matrices(checkpoint)
    annealings = tuple(_anneal(checkpoint, layer, label, matrix, options) for label, matrix in parts)
    profile, bordered = None, None
    first = annealings[0]
    worst = max(annealings, key=lambda a: a.null_fit)
    kept = sum(a.kept for a in annealings)
    entries = max(1, sum(a.magnitudes.bits.size for a in annealings))
    structure, directed, edges = _structure(layer, annealings)
    shares = [a.class_shares or {} for a in annealings]
    record: dict[str, Any] = {
        "name": layer.name,
        "kind": f"{layer.kind} feedback" if layer.feedback else layer.kind,
        "rows": structure.shape[0],
        "cols": structure.shape[1],
        "matrices": len(parts),
        "dtype": checkpoint.tensors[layer.tensors[0]].dtype,
        "null": worst.null.name,
        "null_is_measured": any(isinstance(a.null, Empirical) for a in annealings),
        "null_fit": worst.null_fit,
        "null_fits": worst.null_fit <= worst.fit.slack,
        "level": first.level,
        "threshold": float(np.median([a.threshold for a in annealings])),
        "kept": kept,
        "kept_share": kept / entries,
        "expected_false_edges": sum(a.expected_false_edges for a in annealings),
        **{name: float(np.mean([s.get(name, 0.0) for s in shares])) for name in ("preference", "noise", "suppression")},
        "by_band_alone": all(a.by_band_alone for a in annealings),
        "n_blocks": structure.n_blocks,
        "largest_share": structure.largest_share,
        "active_share": 1 - _dormant(structure) / max(1, sum(structure.shape)),
        "effective_blocks": _effective_blocks(structure),
        "dormant_rows": len(structure.dormant_rows),
        "dormant_cols": len(structure.dormant_cols),
        "percolation_level": percolation_level(*structure.shape),
    }
    if directed is not None:
        record |= {
            "n_scc": directed.n_scc,
            "largest_scc_share": directed.largest_share,
            "n_layers": directed.n_layers,
            "n_components": directed.n_components,
        }
    if not options.fast and structure.shape[0] and structure.shape[1]:
        control = shuffled(*structure.shape, feedback=layer.feedback)
        record["shuffled"] = _state([control], edges)
        if not layer.feedback and not layer.kernel:
            histogram = magnitude_histogram(first.magnitudes, layer.name)
            profile = level_profile(parts[0][1], name=layer.name)
            record["profile"] = _profile_points(profile, histogram, first)
            record["best_split"] = _best_split(profile, histogram, control)
            bordered = _bordered(first, layer, structure)
            record["hubs"] = None if bordered is None else _hubs(bordered, edges)
    row = MatrixAnalysis(**record)
    if finding_of(row) == "separate":  # blocks alone prove nothing: few random edges make some too
        copies = [shuffled(*structure.shape, seed=seed, feedback=layer.feedback) for seed in range(_COPIES)]
        row = replace(row, shuffled=_state(copies, edges))
    row = replace(row, finding=finding_of(row))
    if not options.fast and row.finding != "separate":
        found = layer_modularity(layer, [a.matrix for a in annealings], [a.null for a in annealings])
        row = replace(row, modularity=found)
    row = replace(row, verdict=sentence(row))
    return LayerAnalysis(layer, annealings, structure, directed, profile, bordered, row)


def _state(copies: Sequence[Shuffled], edges: int) -> dict[str, Any]:
    """The first copy with so many edges, and for how many blocks that one counts which is most divided."""
    first, at = copies[0], copies[0].at(edges)
    return {
        "n_blocks": int(first.n_blocks[at]),
        "largest_share": float(first.largest_share[at]),
        "effective_blocks": max(float(copy.effective_blocks[copy.at(edges)]) for copy in copies),
    }


def null_of(checkpoint: Checkpoint, layer: Layer, name: str, matrix: Any, options: Options) -> Fit | Null:
    """What a matrix of a layer is tested against."""
    hidden = layer.rows if layer.feedback else layer.rows // layer.gates  # input weights keep their gates stacked
    drawn = candidates(layer.kind, layer.fan_in, layer.fan_out, hidden=hidden, config=checkpoint.config)
    if options.null == "auto":
        return choose(matrix, drawn, name)
    return drawn[0] if options.null == "init" else Empirical.fit(matrix, name)


def _anneal(checkpoint: Checkpoint, layer: Layer, label: str, matrix: Any, options: Options) -> Annealing:
    name = f"{layer.name}[{label}]" if label else layer.name
    null: Any = null_of(checkpoint, layer, name, matrix, options)
    o = options
    tests = AnnealingOptions(o.level, o.correction, o.random_walk, o.rule, o.alpha, o.delta0, o.tau)
    return anneal_matrix(matrix, null, tests, name)


def _structure(
    layer: Layer, annealings: tuple[Annealing, ...]
) -> tuple[BipartiteStructure, DirectedStructure | None, int]:
    """Blocks of the layer's neurons and the number of edges: one wherever any gate, or place of a kernel, keeps it."""
    if layer.feedback:
        words: Any = 0
        for a in annealings:
            m = Magnitudes(a.magnitudes.bits.T, a.magnitudes.format) if a.magnitudes.transposed else a.magnitudes
            limits = a.pattern_threshold if a.column_patterns is None else a.column_patterns
            words = packed(m, limits, a.name) | words
        directed = directed_from_words(words)
        label = np.where(directed.isolated, -1, directed.component)
        return BipartiteStructure.from_labels(label, label), directed, int(np.bitwise_count(words).sum())
    if not layer.kernel:
        (a,) = annealings
        return a.structure(), None, a.kept
    mask = channel_mask(np.asarray(annealings[0].mask), int(np.prod(layer.kernel)), layer.groups or 1)
    return decompose(mask, name=layer.name), None, int(mask.sum())


def channel_mask(mask: np.ndarray, positions: int, groups: int) -> np.ndarray:
    """(out, in) channels of a convolution's mask; each group of outputs has inputs of its own."""
    within = mask.reshape(groups, len(mask) // groups, -1, positions).any(3)  # (groups, outputs, inputs)
    result = np.zeros((groups, within.shape[1], groups, within.shape[2]), bool)
    result[np.arange(groups), :, np.arange(groups)] = within
    return result.reshape(len(mask), -1)


def _limit(a: Annealing) -> float | np.ndarray:
    return a.threshold if a.column_thresholds is None else a.column_thresholds


def _dormant(structure: BipartiteStructure) -> int:
    return len(structure.dormant_rows) + len(structure.dormant_cols)


def _effective_blocks(structure: BipartiteStructure) -> float:
    sizes = structure.block_shapes.sum(1).astype(float)
    return float(sizes.sum() ** 2 / (sizes**2).sum()) if len(sizes) else 0.0


def _profile_points(profile: LevelProfile, histogram: MagnitudeHistogram, a: Annealing) -> list[dict[str, Any]]:
    """The profile at thresholds that keep from everything down to one entry per neuron, evenly in the logarithm."""
    edges, counts = histogram.edges
    wanted = np.geomspace(max(1, sum(profile.group_sizes) // 8), max(1, histogram.total), _PROFILE_POINTS)
    chosen = np.unique(np.clip(len(counts) - 1 - np.searchsorted(counts[::-1], wanted), 0, None))
    points = []
    for k in chosen[::-1]:
        if edges[k] == 0:
            continue
        level = profile.at(float(edges[k]))
        points.append(
            {
                "threshold": float(edges[k]),
                "level": float(a.null.tail(edges[k])),
                "kept_share": float(counts[k] / histogram.total),
                "n_blocks": level.n_blocks,
                "largest_share": level.largest_share,
                "dormant_cols": level.dormant[0],
                "dormant_rows": level.dormant[1],
            }
        )
    return points


def _best_split(profile: LevelProfile, histogram: MagnitudeHistogram, control: Shuffled) -> dict[str, Any] | None:
    """The level at which the neurons in use are most divided, next to a shuffled copy with as many edges."""
    in_use = profile.active_share >= _ACTIVE * profile.active_share.max(initial=0.0)
    if not len(in_use):
        return None
    edges, counts = histogram.edges
    kept = counts[np.clip(np.searchsorted(edges, profile.thresholds, "right") - 1, 0, None)]
    by_chance = control.effective_blocks[np.minimum(kept, len(control.effective_blocks) - 1).astype(int)]
    k = int(np.argmax(np.where(in_use, profile.effective_blocks / by_chance, 0.0)))
    best = float(profile.effective_blocks[k])
    return {
        "threshold": float(profile.thresholds[k]),
        "kept_share": float(kept[k]) / max(1, histogram.total),
        "effective_blocks": best,
        "n_blocks": int(profile.n_blocks[k]),
        "largest_share": float(profile.largest_share[k]),
        "shuffled_effective_blocks": float(by_chance[k]),
        "beyond_chance": best >= SEPARATE_BLOCKS and best >= SEPARATE_BLOCKS * float(by_chance[k]),
    }


def _bordered(a: Annealing, layer: Layer, structure: BipartiteStructure) -> BorderedStructure | None:
    """The hubs of a matrix that is one block at its level; None where it is not, or where the search is too long."""
    if a.kept > _MOST_HUB_EDGES or structure.largest_share < 0.5:
        return None
    return hubs(a.matrix, threshold=_limit(a), max_hubs=_FEW_HUBS, name=layer.name)


def _hubs(found: BorderedStructure, edges: int) -> dict[str, Any]:
    apart = found.separates and found.n_hubs > 0
    return {
        "separates": found.separates,
        "by_chance": apart and any(_scattered(found.structure.shape, edges, seed) for seed in range(_COPIES)),
        "count": found.n_hubs,
        "rows": found.hub_rows.tolist(),
        "cols": found.hub_cols.tolist(),
        "n_blocks": found.structure.n_blocks,
        "largest_share": found.structure.largest_share,
    }


def _scattered(shape: tuple[int, int], edges: int, seed: int) -> bool:
    """Whether a few hubs hold together, too, what so many edges in random places connect."""
    copy = np.zeros(shape, bool)
    copy.flat[np.random.default_rng(seed).choice(copy.size, edges, replace=False)] = True
    return hubs(copy, max_hubs=_FEW_HUBS).separates
