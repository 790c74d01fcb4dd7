"""`modularity`: how modular weights are where no exact block exists, against copies without modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from crystallite.analysis.modular_controls import PRIMARY, Control, Sampled, searched, without_extremes
from crystallite.annealing.distributions import Null
from crystallite.annealing.fitting import Empirical
from crystallite.core.arrays import as_matrix
from crystallite.core.errors import InvalidMatrix, InvalidOption
from crystallite.core.suggest import suggest_keywords

__all__ = ["Hub", "Modularity", "ModularityOptions", "WeightsBetween", "modularity", "modularity_of"]

_MOST_MODULES = 8
_MOST_HUBS = 8
_HEAVY = 6.0  # a hub's sum of |w| lies so many robust standard deviations above the median of its group
_CHUNK = 1 << 20  # entries that are converted at once


@dataclass(frozen=True)
class ModularityOptions:
    """How many copies of each kind, how many neurons of each group at most, which k, and the seed of all draws."""

    primary: int = 39
    others: int = 39
    sample: int = 256
    k: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Hub:
    """A neuron with far more weight than the others of its group, and what it does to the modules."""

    group: int  # 0: the rows of a matrix or of the first layer, 1: its columns, 2: the rows of the second layer, …
    neuron: int
    times: float  # its sum of |w|, in medians of its group
    gain: float  # what score minus chance gains without it, with the same k: above 0 it holds modules together


@dataclass(frozen=True, eq=False, repr=False)
class Modularity:
    """How modular weights are, in degrees: the score of the best partition found, and what chance would reach.

    score is 1 − Ncut / (k − 1): 1 for exact blocks, 0 for modules at random, and that of the sampled neurons, as for
    the controls. The best partition of noise is above 0 too, so read the score beside `expected`.
    """

    sizes: tuple[int, ...]  # neurons of each group
    sampled: tuple[int, ...]  # how many of them were searched
    k: int
    score: float
    controls: dict[str, Control]  # "norms" (primary), "shuffled", and "null" where there is one
    labels: tuple[np.ndarray, ...]  # of each group the module of each neuron; −1: it has no weight
    hubs: tuple[Hub, ...]  # at most eight, the heaviest first
    gain_without_hubs: float  # the same without all of them

    @property
    def percentile(self) -> float:
        """The score's place among copies with the same row and column norms, in percent."""
        return self.controls[PRIMARY].percentile

    @property
    def error(self) -> float:
        """The standard error of the percentile."""
        return self.controls[PRIMARY].error

    @property
    def expected(self) -> float:
        """The mean score of copies with the same row and column norms."""
        return self.controls[PRIMARY].score

    @property
    def modular(self) -> bool:
        """Whether no such copy is as modular: of weights without modules, one of (copies + 1) is called so."""
        control = self.controls[PRIMARY]
        return control.percentile > 100 * control.copies / (control.copies + 1)

    def to_json(self) -> dict[str, Any]:
        """Plain values; the labels are left out, as there is one for each neuron."""
        return {
            "sizes": list(self.sizes), "sampled": list(self.sampled), "k": self.k, "score": self.score,
            "expected": self.expected, "percentile": self.percentile, "error": self.error, "modular": self.modular,
            "controls": {kind: asdict(control) for kind, control in self.controls.items()},
            "hubs": [asdict(hub) for hub in self.hubs], "gain_without_hubs": self.gain_without_hubs,
        }  # fmt: skip

    def __repr__(self) -> str:
        found = "modular" if self.modular else "not modular beyond chance"
        return (
            f"Modularity({found}: k = {self.k}, score {self.score:.3f} where chance gives {self.expected:.3f}, "
            f"percentile {self.percentile:.1f} ± {self.error:.1f}, {len(self.hubs)} hub{'s' * (len(self.hubs) != 1)})"
        )


@dataclass(frozen=True, eq=False)
class WeightsBetween:
    """Matrices between the same two groups of neurons, whose magnitudes add up: gates, or places of a kernel."""

    matrices: tuple[Any, ...]  # (rows, columns) arrays or tensors
    rows: int  # the group of the rows; that of the columns, too, for feedback
    cols: int
    nulls: tuple[Null, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        return tuple(self.matrices[0].shape)

    def read(self, rows: Any, cols: Any) -> np.ndarray:
        """Sum of the magnitudes at some rows and columns (slices or indices), as float64 or float32."""
        return np.asarray(sum(_magnitude(m[rows][:, cols]) for m in self.matrices))

    def chunks(self) -> list[slice]:
        step = max(1, _CHUNK // max(1, self.shape[1]))
        return [slice(start, start + step) for start in range(0, self.shape[0], step)]


@suggest_keywords
def modularity(
    weights: Any,
    *,
    k: int | None = None,
    null: Null | None = None,
    controls: int = 39,
    sample: int = 256,
    seed: int = 0,
    name: str = "matrix",
) -> Modularity:
    """How modular a matrix of weights, or a chain of layers, is where no exact block exists.

    The normalised cut of the best k-way partition of |w|, as the edges of a bipartite graph, beside that of copies
    without modules, which are searched in the same way. One entry in a thousand, far beyond the others or not, counts
    as much as the next: it would tie two neurons together in any place. Heavy rows and columns alone are not modular:
    the copies that decide have the same row and column sums of |w|. Others have shuffled entries, or are drawn from the
    null. Neither the order of the neurons nor the scale of the weights changes the result.

    Cost: a few reads of the weights, and about 20 reads of the sampled ones for the weights and for each copy.

    Args:
        weights: a matrix (outputs, inputs), or several of consecutive layers, each reading what the one before writes.
        k: number of modules; None: 2 to 8, and at most half as many as there are neurons, the same for all copies.
        null: what fresh weights look like; None: the measured bulk of each matrix.
        controls: copies of each kind. Weights without modules are called modular once in (controls + 1).
        sample: of each group of neurons at most so many, drawn at random, are searched. A larger sample finds weaker
            modules: the score that chance gives falls as its root.
        seed: of all draws.
        name: what errors call the weights.

    Returns:
        A `Modularity`: score, k, percentile with its error, modules of all neurons, hubs.

    Raises:
        InvalidMatrix: NaN or infinity, no weight, fewer than four rows or columns, or layers that do not fit.
        InvalidOption: an option outside the values it may take.

    Examples:
        >>> rng = np.random.default_rng(1)
        >>> noise, inside = rng.normal(size=(64, 64)), np.kron(np.eye(2), np.ones((32, 32)))
        >>> modularity(noise).modular
        False
        >>> found = modularity(noise * (1 + inside))
        >>> found.modular, found.k, found.labels[0].tolist() == [0] * 32 + [1] * 32
        (True, 2, True)
    """
    for option, value, least in (("controls", controls, 2), ("sample", sample, 8), ("seed", seed, 0)):
        if not isinstance(value, int) or value < least:
            raise InvalidOption(f"{option} must be an integer ≥ {least}, got {value!r}")
    given = weights if isinstance(weights, (list, tuple)) and np.ndim(weights[0]) == 2 else [weights]
    matrices = [as_matrix(matrix, name if len(given) == 1 else f"{name} {i}") for i, matrix in enumerate(given)]
    for i in range(1, len(matrices)):
        if matrices[i].shape[1] != matrices[i - 1].shape[0]:
            raise InvalidMatrix(f"{name} {i}: expected {matrices[i - 1].shape[0]} columns, got {matrices[i].shape[1]}")
    edges = []
    for i, matrix in enumerate(matrices):
        drawn = _measured(matrix, name) if null is None else (null,)
        edges.append(WeightsBetween((matrix,), *((0, 1) if i == 0 else (i + 1, 0 if i == 1 else i)), drawn))
    return modularity_of(edges, ModularityOptions(controls, controls, sample, k, seed), name)


def modularity_of(edges: Sequence[WeightsBetween], options: ModularityOptions, name: str) -> Modularity:
    """The same for any layers that share groups of neurons, numbered from 0."""
    groups = _groups(edges, name)
    sizes = tuple(len(group.largest) for group in groups)
    ks = _numbers(edges, sizes, options.k, name)
    rng = np.random.default_rng(options.seed)
    chosen = [group.chosen(options.sample, rng) for group in groups]
    sampled = [_sampled(edge, chosen, name) for edge in edges]
    copies = {PRIMARY: options.primary, "shuffled": options.others}
    copies["null"] = options.others if all(len(e.nulls) for e in edges) else 0
    heavy = sorted(
        ((g, n) for g, group in enumerate(groups) for n in group.heavy), key=lambda h: -groups[h[0]].times[h[1]]
    )
    heavy = heavy[:_MOST_HUBS]
    places = [(g, int(np.flatnonzero(chosen[g] == n)[0])) for g, n in heavy]
    counts = tuple(map(len, chosen))
    found = searched(counts, [part for part, _ in sampled], ks, copies, places, options.seed)
    parts = np.split(found.labels, np.cumsum(counts)[:-1])
    labels = _extended(edges, [mean for _, mean in sampled], groups, chosen, parts, found.k)
    hubs = tuple(
        Hub(g, n, float(groups[g].times[n]), float(gain)) for (g, n), gain in zip(heavy, found.gains, strict=False)
    )
    gain = float(found.gains[-1])
    return Modularity(sizes, counts, found.k, found.score, found.controls, tuple(labels), hubs, gain)


def _measured(matrix: Any, name: str) -> tuple[Null, ...]:
    try:
        return (Empirical.fit(matrix, name),)
    except InvalidMatrix:  # most entries are equal: nothing to draw from
        return ()


def _magnitude(part: Any) -> np.ndarray:
    if isinstance(part, torch.Tensor):
        part = part.detach().cpu()
        part = (part if part.dtype in (torch.float32, torch.float64) else part.float()).numpy()
    wide = part if part.dtype in (np.float32, np.float64) else part.astype(np.float32)
    return np.abs(wide)


@dataclass(frozen=True, eq=False)
class _Group:
    """A number for each neuron of a group: its largest magnitude, and the sum of its magnitudes over the median's."""

    largest: np.ndarray
    times: np.ndarray

    @property
    def heavy(self) -> list[int]:
        """Neurons with far more weight than the others, the heaviest first."""
        live = self.times[self.largest > 0]
        spread = np.median(np.abs(live - np.median(live))) / 0.6745
        above = self.times > np.median(live) + _HEAVY * max(spread, 0.01)
        return [int(n) for n in np.argsort(-self.times, kind="stable")[:_MOST_HUBS] if above[n]]

    def chosen(self, most: int, rng: np.random.Generator) -> np.ndarray:
        """At most so many neurons with weight, heavy ones among them, in the order of their largest magnitudes.

        Maxima do not depend on the order of anything, so a matrix whose rows and columns come in another order is
        searched in the same way.
        """
        order = np.argsort(-self.largest, kind="stable")[: int((self.largest > 0).sum())]
        if len(order) <= most:
            return order
        heavy = np.isin(order, self.heavy[:most])
        others = rng.choice(np.flatnonzero(~heavy), most - int(heavy.sum()), replace=False)
        return order[np.sort(np.concatenate([np.flatnonzero(heavy), others]))]


def _groups(edges: Sequence[WeightsBetween], name: str) -> list[_Group]:
    """What one read of the weights says about the neurons of each group."""
    count = 1 + max(max(e.rows, e.cols) for e in edges)
    largest: list[Any] = [0.0] * count
    sums: list[Any] = [0.0] * count
    for edge in edges:
        if min(edge.shape) < 1:
            raise InvalidMatrix(f"{name}: expected rows and columns, got shape {edge.shape}")
        tops, totals = np.zeros(edge.shape[1]), np.zeros(edge.shape[1])
        row_tops, row_totals = [], []
        for chunk in edge.chunks():
            part = edge.read(chunk, slice(None))
            row_tops.append(part.max(1))
            row_totals.append(part.sum(1, dtype=np.float64))
            tops = np.maximum(tops, part.max(0))
            totals += part.sum(0, dtype=np.float64)
        top, mean = float(tops.max()), float(totals.sum()) / part.shape[1]
        if not np.isfinite(mean) or top == 0:
            what = "no weight but zeros" if top == 0 else "NaN or infinity"
            raise InvalidMatrix(f"{name}: expected finite weights, got {what}")
        for group, maxima, added in (
            (edge.rows, np.concatenate(row_tops), np.concatenate(row_totals)), (edge.cols, tops, totals)
        ):  # fmt: skip
            largest[group] = largest[group] + maxima / top
            sums[group] = sums[group] + added / mean
    return [_Group(top, total / np.median(total[top > 0])) for top, total in zip(largest, sums, strict=True)]


def _numbers(edges: Sequence[WeightsBetween], sizes: tuple[int, ...], k: int | None, name: str) -> list[int]:
    """Which k are tried: none may be more than half of the neurons that all modules are to share out."""
    ends = [group for edge in edges for group in {edge.rows, edge.cols}]
    shared = [s for group, s in enumerate(sizes) if ends.count(group) > 1] if len(edges) > 1 else list(sizes)
    most = min(shared or sizes) // 2
    if most < 2:
        raise InvalidMatrix(f"{name}: expected at least 4 neurons on each side, got {' and '.join(map(str, sizes))}")
    if k is not None and (not isinstance(k, int) or not 2 <= k <= most):
        raise InvalidOption(f"k must be an integer from 2 to {most}, half of the neurons, got {k!r}")
    return list(range(2, min(_MOST_MODULES, most) + 1)) if k is None else [k]


def _sampled(edge: WeightsBetween, chosen: list[np.ndarray], name: str) -> tuple[Sampled, float]:
    """The weights between the chosen neurons, and the magnitude that counts as 1: their mean."""
    weights = edge.read(chosen[edge.rows], chosen[edge.cols]).astype(np.float64)
    mean = float(weights.mean())
    if mean == 0:
        raise InvalidMatrix(f"{name}: no weight between the neurons that were sampled; pass a larger sample")
    relative = without_extremes((weights / mean).astype(np.float32))
    return Sampled(relative, edge.rows, edge.cols, edge.nulls), mean


def _extended(
    edges: Sequence[WeightsBetween], means: list[float], groups: list[_Group], chosen: list[np.ndarray],
    parts: list[np.ndarray], k: int,
) -> list[np.ndarray]:  # fmt: skip
    """A module for every neuron with weight: that of the sampled ones, or where most of its weight to them goes."""
    found = [np.zeros((len(group.largest), k)) for group in groups]
    for edge, mean in zip(edges, means, strict=True):
        rows, cols = chosen[edge.rows], chosen[edge.cols]
        if len(rows) < len(found[edge.rows]):
            for chunk in edge.chunks():
                found[edge.rows][chunk] += edge.read(chunk, cols) / mean @ _members(parts[edge.cols], k)
        if len(cols) < len(found[edge.cols]):
            found[edge.cols] += (_members(parts[edge.rows], k).T @ (edge.read(rows, slice(None)) / mean)).T
    labels = []
    for group, own, part, shares in zip(groups, chosen, parts, found, strict=True):
        totals = shares.sum(0)
        label = np.argmax(shares / np.where(totals > 0, totals, 1), 1)
        label[own] = part
        label[group.largest == 0] = -1
        labels.append(label)
    return _in_order_of_appearance(labels, k)


def _in_order_of_appearance(labels: list[np.ndarray], k: int) -> list[np.ndarray]:
    used, first = np.unique(np.concatenate(labels), return_index=True)
    names = np.full(k + 1, -1)  # the last one for −1
    live = used >= 0
    names[used[live]] = np.argsort(np.argsort(first[live]))
    return [names[label] for label in labels]


def _members(labels: np.ndarray, k: int) -> np.ndarray:
    return np.asarray(labels[:, None] == np.arange(k), np.float32)
