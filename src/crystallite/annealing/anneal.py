"""Both tests of the paper combined: which weights of a matrix, or of a whole model, are structure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np
import torch

from crystallite.annealing.columns import can_mark, column_sums, marked_column_sums
from crystallite.annealing.distributions import Null
from crystallite.annealing.fitting import Empirical, Fit, choose, fit
from crystallite.annealing.histogram import count_at_least
from crystallite.annealing.initial import candidates, named_weights
from crystallite.annealing.neyman import neyman_level, resolve_level
from crystallite.annealing.random_walk import DELTA0, TAU, RandomWalk, check_band, walk_of_sums
from crystallite.core.arrays import Magnitudes, magnitudes
from crystallite.core.drawing import Drawing
from crystallite.core.errors import InvalidMatrix, InvalidOption
from crystallite.core.suggest import check_choice, suggest_keywords
from crystallite.core.tables import html_text
from crystallite.structure.bipartite import BipartiteStructure
from crystallite.structure.components import marked_components
from crystallite.structure.decompose import decompose

__all__ = ["Annealing", "AnnealingOptions", "anneal", "anneal_matrix"]

Matrix = np.ndarray | torch.Tensor
NullChoice = Null | Fit | str | Mapping[str, Null] | Callable[[str, torch.Tensor], Null | Fit | str]

_FEW = 0.02  # level of the first test up to which what passes it is marked
_MANY = 0.05  # share of entries from which on reading all of them is faster than reading those


@dataclass(frozen=True)
class AnnealingOptions:
    """How weights are tested, checked: what `anneal` takes beside the matrix and its null, and means the same there.

    >>> AnnealingOptions(rule="all")
    Traceback (most recent call last):
    crystallite.core.errors.InvalidOption: rule must be one of both, neyman, got 'all'
    """

    level: float | str = 0.01
    correction: str | None = None
    random_walk: str | None = "calibrated"
    rule: str = "both"
    alpha: float | None = None
    delta0: float = DELTA0
    tau: float = TAU

    def __post_init__(self) -> None:
        check_choice("rule", self.rule, ("both", "neyman"))
        check_band(self.random_walk, self.alpha, self.delta0, self.tau)
        if self.random_walk is None and self.rule == "both":
            raise InvalidOption('rule="both" needs the random-walk test; with random_walk=None pass rule="neyman"')


@dataclass(frozen=True, eq=False, repr=False)
class Annealing:
    """The outcome of annealing one matrix: a threshold per column, and on demand everything that follows from it.

    Statistics that need a pass over the matrix (`kept`, `mask`, `classes`, the random walk under rule="neyman") are
    computed when first asked for, so an `Annealing` of a matrix of any size costs what is used of it.
    """

    matrix: Any  # as it was given
    magnitudes: Magnitudes
    null: Null
    level: float  # as asked for, "percolation" resolved
    entry_level: float  # after the correction: what each entry is tested at
    options: AnnealingOptions
    name: str
    _fit: Fit | None = None
    _mark: bool = True

    @property
    def shape(self) -> tuple[int, int]:
        rows, cols = self.magnitudes.shape
        return (cols, rows) if self.magnitudes.transposed else (rows, cols)

    @cached_property
    def threshold(self) -> float:
        """c with P_f0(|w| ≥ c) = `entry_level`."""
        return self.null.threshold(self.entry_level)

    @cached_property
    def pattern_threshold(self) -> int:
        """|w| ≥ threshold ⇔ the bit pattern of |w| ≥ this."""
        return self.magnitudes.pattern(self.threshold)

    @cached_property
    def expected_false_edges(self) -> float:
        """How many edges of a matrix of pure noise would reach the threshold: rows · cols · P_f0(|w| ≥ c)."""
        return self.magnitudes.bits.size * float(self.null.tail(self.threshold))

    @property
    def null_fit(self) -> float:
        """The Kolmogorov–Smirnov distance between the null and (a sample of) the matrix."""
        return self.fit.ks

    @cached_property
    def fit(self) -> Fit:
        """How well the null describes the matrix, its bulk included."""
        return self._fit or fit(self.null, self.magnitudes, self.name)

    @cached_property
    def random_walk(self) -> RandomWalk | None:
        """The second test, or None if it was switched off."""
        o = self.options
        if o.random_walk is None:
            return None
        return walk_of_sums(
            self.magnitudes, self._sums_and_marks[0], self.null, o.random_walk, o.alpha, o.delta0, o.tau
        )

    @cached_property
    def _sums_and_marks(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Column sums, and a bit for each entry that passes the first test, where that saves a pass later."""
        if self._mark and self.options.rule == "both" and self.entry_level <= _FEW and can_mark(self.magnitudes):
            return marked_column_sums(self.magnitudes, self.pattern_threshold, self.name)
        return column_sums(self.magnitudes, self.name), None

    @property
    def bandwidth(self) -> float | None:
        """δ of the random-walk test."""
        return None if self.random_walk is None else self.random_walk.bandwidth

    @property
    def class_shares(self) -> dict[str, float] | None:
        """Shares of preference, noise and suppression."""
        return None if self.random_walk is None else self.random_walk.shares

    @cached_property
    def column_thresholds(self) -> np.ndarray | None:
        """(cols,) an edge is kept ⇔ |w_ij| ≥ this; None where `threshold` holds for all (rule="neyman").

        The larger of c and the first number above (1/n + δ)·Σ_i|w_ij|.
        """
        if self.options.rule == "neyman" or self.random_walk is None:
            return None
        return np.maximum(self.threshold, np.nextafter(self.random_walk.preference_above, np.inf))

    @cached_property
    def by_band_alone(self) -> bool:
        """Whether the level changes nothing: all that the random-walk band prefers is significant as well.

        A lower level may still do. One more pass where some column's threshold is above its band.
        """
        if self.options.rule == "neyman" or self.random_walk is None:
            return False
        band = np.nextafter(self.random_walk.preference_above, np.inf)
        if bool((self.threshold <= band).all()):
            return True
        return self.kept == count_at_least(self.magnitudes, self.magnitudes.patterns(band), self.name)

    @cached_property
    def column_patterns(self) -> np.ndarray | None:
        """`column_thresholds` as bit patterns in the matrix's storage integer."""
        thresholds = self.column_thresholds
        return None if thresholds is None else self.magnitudes.patterns(thresholds)

    def structure(self) -> BipartiteStructure:
        """The blocks of what is kept: `decompose` at these thresholds.

        Under rule="both" the pass that summed the columns has marked the entries that may be kept, where they are few
        and the matrix lies in rows of float32, float64 or bfloat16: then only these are read again.

        >>> from crystallite.annealing.distributions import Uniform
        >>> anneal(np.eye(4) + 0.01, Uniform(0.1), rule="neyman").structure()
        BipartiteStructure(4×4: 4 blocks, largest 1×1, dormant 0 rows and 0 columns)
        """
        patterns, marks = self.column_patterns, None if self.column_patterns is None else self._sums_and_marks[1]
        if patterns is not None and marks is not None and _share(marks, self.shape[1]) <= _MANY:
            return BipartiteStructure.from_labels(*marked_components(self.magnitudes, patterns, marks))
        limits = self.threshold if self.column_thresholds is None else self.column_thresholds
        return decompose(self.matrix, threshold=limits, name=self.name)

    @cached_property
    def kept(self) -> int:
        """How many edges survive; one pass, exact."""
        patterns = self.column_patterns
        return count_at_least(self.magnitudes, self.pattern_threshold if patterns is None else patterns, self.name)

    @property
    def kept_share(self) -> float:
        return self.kept / max(self.magnitudes.bits.size, 1)

    @cached_property
    def mask(self) -> Any:
        """(rows, cols) bool: the surviving edges, an array or a tensor as the matrix was."""
        _ = self.kept  # finds entries that are not finite
        limits = self.pattern_threshold if self.column_patterns is None else self.column_patterns
        kept = self._by_blocks(bool, lambda patterns, columns: patterns >= self._limits(limits, columns))
        return torch.from_numpy(kept).to(self.matrix.device) if isinstance(self.matrix, torch.Tensor) else kept

    @cached_property
    def classes(self) -> Any:
        """(rows, cols) int8: 1 structural preference, 0 random-walk noise, −1 systematic suppression.

        Suppressed edges are never kept under rule="both", significant or not: what is significantly *small* next to
        the other edges of its neuron is a direction that training closed. Under rule="neyman" they are kept where
        they are significant, which they may be in a column of large weights.
        """
        walk = self.random_walk
        if walk is None:
            raise InvalidOption(f"{self.name}: there are no classes without the random-walk test")
        upper = self.magnitudes.patterns(np.nextafter(walk.preference_above, np.inf))
        lower = self.magnitudes.patterns(walk.suppression_below)

        def classify(patterns: np.ndarray, columns: slice) -> np.ndarray:
            above = patterns >= self._limits(upper, columns)
            return above.astype(np.int8) - (patterns < self._limits(lower, columns))

        found = self._by_blocks(np.int8, classify)
        return torch.from_numpy(found).to(self.matrix.device) if isinstance(self.matrix, torch.Tensor) else found

    def p_values(self) -> np.ndarray:
        """(rows, cols) float64: P_f0(|w| ≥ |w_ij|) of every entry, uncorrected. As large as it sounds."""
        _ = self.kept  # finds entries that are not finite
        return self._by_blocks(np.float64, lambda patterns, _: self.null.tail(self.magnitudes.values(patterns)))

    def _limits(self, limits: int | np.ndarray, columns: slice) -> Any:
        """Limits of the caller's columns, as they lie next to a block of memory lines."""
        if isinstance(limits, int):
            return self.magnitudes.storage(limits)
        return limits[columns, None] if self.magnitudes.transposed else limits

    def _by_blocks(self, dtype: type, work: Callable[[np.ndarray, slice], np.ndarray]) -> np.ndarray:
        lines, length = self.magnitudes.shape
        result: np.ndarray = np.empty((lines, length), dtype)
        step = max(1, (1 << 18) // max(length, 1))  # what is between the passes of `work` stays in the cache
        mask = self.magnitudes.storage(self.magnitudes.mask)
        for start in range(0, lines, step):
            block = self.magnitudes.block(start, min(start + step, lines)) & mask
            result[start : start + step] = work(block, slice(start, start + step))
        return result.T if self.magnitudes.transposed else result

    def plot(self) -> Drawing:
        """A picture of what is kept, its blocks on the diagonal; one pass for the blocks, and the mask."""
        return self.structure().plot(self.mask)

    def _repr_html_(self) -> str:
        return html_text(repr(self)) + self.plot().svg()

    def __repr__(self) -> str:
        rows, cols = self.shape
        o = self.options
        level = f"level {self.level:.3g}" + (f" with {o.correction}" if o.correction else "")
        by_chance = f"{self.expected_false_edges:.3g} false edges expected"
        lines = [
            f"Annealing of {self.name}, {rows}×{cols} {self.magnitudes.format}",
            f"  null         {self.null.name}, KS {self.null_fit:.3f}",
            f"  Neyman       |w| ≥ {self.threshold:.4g} ({level}), {by_chance}",
        ]
        if self.random_walk:
            shares = ", ".join(f"{name} {share:.1%}" for name, share in self.random_walk.shares.items())
            lines.append(f"  random walk  {o.random_walk}, δ·n = {self.random_walk.relative_bandwidth:.3g}: {shares}")
        alone = ", by the random-walk band alone" if self.by_band_alone else ""
        lines.append(f'  kept         {self.kept} of {rows * cols} ({self.kept_share:.2%}) by rule "{o.rule}"{alone}')
        return "\n".join(lines)


def _share(marks: np.ndarray, columns: int) -> float:
    """The share of entries that are marked, of up to 64 rows."""
    some = marks[:: max(1, len(marks) // 64)]
    return int(np.bitwise_count(some).sum()) / max(1, len(some) * columns)


@overload
def anneal(
    w: torch.nn.Module,
    null: NullChoice = ...,
    level: float | str = ...,
    correction: str | None = ...,
    random_walk: str | None = ...,
    rule: str = ...,
    name: str = ...,
    *,
    alpha: float | None = ...,
    delta0: float = ...,
    tau: float = ...,
) -> dict[str, Annealing]: ...
@overload
def anneal(
    w: Matrix,
    null: Null | Fit | str = ...,
    level: float | str = ...,
    correction: str | None = ...,
    random_walk: str | None = ...,
    rule: str = ...,
    name: str = ...,
    *,
    alpha: float | None = ...,
    delta0: float = ...,
    tau: float = ...,
) -> Annealing: ...
@suggest_keywords
def anneal(
    w: Any,
    null: Any = "auto",
    level: float | str = 0.01,
    correction: str | None = None,
    random_walk: str | None = "calibrated",
    rule: str = "both",
    name: str = "matrix",
    *,
    alpha: float | None = None,
    delta0: float = DELTA0,
    tau: float = TAU,
) -> Any:
    """Which weights of a matrix (rows = outputs, columns = inputs), or of every matrix of a model, are structure.

    An edge is kept if it is significant, |w| ≥ c with P_f0(|w| ≥ c) = level (corrected for multiplicity if asked),
    and has structural preference, w̃_ij > 1/n + δ: the paper's "only edges that pass both tests". The price of the
    second: a neuron that acts strongly but evenly on all outputs counts as directionless and is annealed away.
    A suppressed edge (w̃_ij far below 1/n) is annealed away even where it is significant; `classes` tells which.

    rule="neyman" without "holm" or "bh" reads at most 65,536 entries here; the rest takes two to three passes.
    Integers and booleans are refused: they are codes, not weights.

    Args:
        w: A floating-point matrix, or a model: then one result per weight matrix (gate stacks and fused projections
            come apart, convolutions are flattened to out × (in·kernel), embeddings transposed).
        null: A null from `cx.nulls` (or the outcome of `nulls.choose`); "empirical" for the matrix's own Gaussian
            bulk; "auto": the initialisation that explains its bulk if there is one, else empirical (`nulls.choose`).
            For a model also "init", what PyTorch or Hugging Face drew for each layer (`nulls.for_module`), which
            "auto" takes only where it explains the bulk; a dict by parameter name; or a function of (name, matrix).
        level: The paper's x: a number in (0, 1), or "percolation" = 1/√(rows·cols), above which noise alone is one
            giant component.
        correction: None, "bonferroni", "holm" (both: no false edge with probability 1 − level), or "bh" (at most a
            share `level` of the kept edges is false).
        random_walk: "calibrated", "literal" (the paper's flat χ²) or None, which needs rule="neyman".
        rule: "both", or "neyman": keep by the first test alone and only report the classes.
        name: What errors call the matrix.
        alpha: The paper's α of the random-walk test; None: .01 for all its steps together, .05 at each for "literal".
        delta0: Its δ₀ in units of 1/n, n the number of rows.
        tau: Its τ, in units of 1/n.

    Returns:
        One `Annealing`; for a model a dict of them by weight name.

    Raises:
        InvalidOption: An option is out of range, or contradicts another.
        InvalidMatrix: The matrix has entries that are not finite, or that are no floating-point numbers.

    Examples:
        >>> w = np.random.default_rng(0).uniform(-0.1, 0.1, (64, 100)).astype(np.float32)
        >>> w[:8, :10] += 0.5
        >>> anneal(w, correction="holm")
        Annealing of matrix, 64×100 float32
          null         Uniform(±0.1), KS 0.013
          Neyman       |w| ≥ 0.1 (level 0.01 with holm), 0.0101 false edges expected
          random walk  calibrated, δ·n = 1.08: preference 2.3%, noise 97.7%, suppression 0.0%
          kept         80 of 6400 (1.25%) by rule "both"
    """
    options = AnnealingOptions(level, correction, random_walk, rule, alpha, delta0, tau)
    if isinstance(w, torch.nn.Module):
        return {
            weight_name: anneal_matrix(
                matrix, _null_for(weight_name, matrix, null, initial), options, weight_name, mark=False
            )
            for weight_name, matrix, initial in named_weights(w)
        }
    return anneal_matrix(w, null, options, name)


def anneal_matrix(
    w: Any, null: Null | Fit | str, options: AnnealingOptions, name: str = "matrix", mark: bool = True
) -> Annealing:
    """`anneal` of one matrix with options that are checked already; `mark`: hold one bit per entry for `structure`."""
    matrix = magnitudes(w, name)
    if not matrix.format.startswith(("float", "bfloat")):
        raise InvalidMatrix(
            f"{name}: expected floating-point weights, got {matrix.format}; convert or dequantise first"
        )
    rows, cols = matrix.shape[::-1] if matrix.transposed else matrix.shape
    number = resolve_level(options.level, rows, cols)
    chosen = _resolve_null(null, matrix, rows, cols, name)
    f0 = chosen.null if isinstance(chosen, Fit) else chosen
    entry_level = neyman_level(f0, number, options.correction, matrix, name)
    known_fit = chosen if isinstance(chosen, Fit) else None
    result = Annealing(w, matrix, f0, number, entry_level, options, name, known_fit, mark)
    _ = result.column_thresholds  # what the rule needs is computed here, so that a bad matrix is refused here
    return result


def _resolve_null(null: Any, matrix: Magnitudes, rows: int, cols: int, name: str) -> Null | Fit:
    if isinstance(null, (Null, Fit)):
        return null
    if isinstance(null, str) and null == "auto":
        return choose(matrix, candidates("linear", max(cols, 1), max(rows, 1)), name)
    if isinstance(null, str) and null == "empirical":
        return Empirical.fit(matrix, name)
    if isinstance(null, str) and null == "init":
        raise InvalidOption(
            f'{name}: null="init" needs the model, which says what was drawn; pass that, or a null of cx.nulls'
        )
    raise InvalidOption(f'{name}: null must be "auto", "empirical" or a null from crystallite.nulls, got {null!r}')


def _null_for(name: str, matrix: torch.Tensor, null: Any, initial: Null) -> Any:
    """What a model-wide choice of null means for one of its weights."""
    if isinstance(null, Mapping):
        parameter = name.partition("[")[0]  # one gate of a stack goes by the name of the whole
        if name not in null and parameter not in null:
            raise InvalidOption(f"no null for {name}; the mapping has {', '.join(null) or 'no names'}")
        return null.get(name, null.get(parameter))
    if callable(null):
        return null(name, matrix)
    if isinstance(null, str) and null in ("auto", "init"):
        return choose(matrix, [initial], name) if null == "auto" else initial
    return null
