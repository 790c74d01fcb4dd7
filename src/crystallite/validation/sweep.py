"""`sweep`: the exact reorganization at many significance levels beside the original, and which level to take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor, nn
from tqdm import tqdm

from crystallite.annealing import nulls
from crystallite.annealing.anneal import AnnealingOptions
from crystallite.annealing.random_walk import DELTA0, TAU
from crystallite.core.drawing import Drawing, side_by_side
from crystallite.core.errors import CrystalliteError, InvalidOption
from crystallite.core.run_charts import sweep_charts
from crystallite.core.suggest import check_choice, suggest_keywords
from crystallite.core.tables import html_text, text_table
from crystallite.data.batch import Batch, batches, check_repeatable
from crystallite.data.outputs import equal_up_to_rounding, tensors
from crystallite.models.preparing import note_preparation_, prepared
from crystallite.models.record import LayerChange
from crystallite.reorganization.rewrite import reorganize
from crystallite.validation.annealed import BONFERRONI, AnnealedModel, LayerStructure
from crystallite.validation.comparison import Comparison, RunningComparison
from crystallite.validation.continuity import Jump, find_jumps
from crystallite.validation.metrics import Metric, MetricResult, RunningMetric, as_metric
from crystallite.validation.rules import Outcome, Rules, at_quantile
from crystallite.validation.verdict import plain

__all__ = ["LEVELS", "Sweep", "SweepPoint", "sweep"]

LEVELS: tuple[float | str, ...] = (*(float(f"{x:.1e}") for x in np.geomspace(1e-1, 1e-6, 11)),
                                   "percolation", "bonferroni")  # fmt: skip
_GROUP = 8  # batches for which the original's outputs are held, so that each level is set once for all of them


@dataclass(frozen=True)
class SweepPoint:
    """The exact reorganization at one level, measured against the original."""

    rule: str
    alpha: float | None  # of the random-walk test; None: the method's own
    level: float | str  # as asked for
    entry_level: float  # what single weights are tested at
    by_band_alone: bool  # the level changes nothing: kept by the random-walk band alone
    layers: tuple[LayerStructure, ...]
    metric: float | None
    agreement: float | None  # the least of all outputs
    cosine: float  # the least mean of all outputs
    mean_deviation: float  # the largest of all outputs
    deviation: float  # at the quantile that the rules state
    outcomes: tuple[Outcome, ...]

    @property
    def passed(self) -> bool:
        return all(outcome.passed for outcome in self.outcomes)

    @property
    def kept_share(self) -> float:
        return sum(s.kept_share * s.dense_macs for s in self.layers) / sum(s.dense_macs for s in self.layers)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Of each layer."""
        return tuple(structure.blocks for structure in self.layers)

    @property
    def dormant(self) -> int:
        """Neurons in no block, over all layers."""
        return sum(structure.dormant for structure in self.layers)

    @property
    def dormant_share(self) -> float:
        return self.dormant / sum(structure.neurons for structure in self.layers)

    @property
    def largest_share(self) -> float:
        """Neurons of the largest block as a share of those in any block, the mean over the layers."""
        return float(np.mean([structure.largest_share for structure in self.layers]))

    @property
    def macs_share(self) -> float:
        """Multiply-adds of the blocks of each layer as a share of the dense ones."""
        return sum(s.macs for s in self.layers) / sum(s.dense_macs for s in self.layers)

    @property
    def name(self) -> str:
        return self.level if isinstance(self.level, str) else f"{self.level:.3g}"


@dataclass(frozen=True, eq=False, repr=False)
class Sweep:
    """All levels, for each rule from the mildest to the strictest, and the one to take."""

    samples: int
    metric: str | None
    original: float | None  # its metric
    points: tuple[SweepPoint, ...]
    jumps: tuple[Jump, ...]  # where outputs or structure do not change gradually with the level
    recommended: SweepPoint | None
    reason: str
    reorganized: nn.Module | None  # the model at the recommended level, checked against the annealed one

    def to_pandas(self) -> Any:
        """One row per rule and level."""
        import pandas

        return pandas.DataFrame([_row(point) | {"blocks": point.blocks} for point in self.points])

    def to_json(self) -> dict[str, Any]:
        """Plain values, without the model."""
        best = self.recommended
        return plain(
            {
                "samples": self.samples,
                "metric": self.metric and {"name": self.metric, "original": self.original},
                "points": [_row(p) | {"layers": [asdict(s) for s in p.layers]} for p in self.points],
                "jumps": [str(jump) for jump in self.jumps],
                "recommended": best and {"rule": best.rule, "alpha": best.alpha, "level": best.level},
                "reason": self.reason,
            }
        )

    def plot(self) -> Drawing:
        """A picture of what changes with the level, one chart for each measure."""
        return side_by_side(list(sweep_charts(self.to_json()["points"]).values()))

    def _repr_html_(self) -> str:
        return html_text(repr(self)) + self.plot().svg()

    def __repr__(self) -> str:
        metric = self.metric or "metric"
        alphas = len({p.alpha for p in self.points}) > 1
        rows = [["rule", *["α"] * alphas, "level", "kept", "blocks", "largest", "dormant", "multiply-adds", metric,
                 "agreement", "cosine", "deviation", "worst", "passed"]]  # fmt: skip
        for p in self.points:
            value, agreed = ("—" if x is None else f"{x:.4g}" for x in (p.metric, p.agreement))
            largest = f"{min(s.largest_share for s in p.layers):.0%}"
            alpha = ["—" if p.alpha is None else f"{p.alpha:.3g}"] * alphas
            found = [p.rule, *alpha, p.name, f"{p.kept_share:.2%}", _span(p.blocks), largest, f"{p.dormant:,}"]
            found += [f"{p.macs_share:.0%}", value, agreed, f"{p.cosine:.4f}", f"{p.mean_deviation:.3g}"]
            rows.append([*found, f"{p.deviation:.3g}", "yes" if p.passed else "no"])
        before = f", {self.metric} of the original {self.original:.4g}" if self.metric else ""
        lines = [f"{len(self.points)} levels on {self.samples} samples{before}; of several outputs, the worst"]
        lines += [*text_table(rows), ""]
        inert = [p.name for p in self.points if p.by_band_alone]
        if inert:
            lines.append(f"Levels that change nothing, kept by the random-walk band alone: {', '.join(inert)}.")
        return "\n".join([*lines, *map(str, self.jumps), self.reason])


@suggest_keywords
def sweep(
    model: nn.Module,
    data: Any,
    levels: Sequence[float | str] | None = None,
    *,
    metric: str | Metric | Callable[[Any, Tensor], Any] | None = None,
    rule: str | Sequence[str] = "both",
    null: nulls.Null | str = "auto",
    correction: str | None = None,
    random_walk: str | None = "calibrated",
    alpha: float | Sequence[float] | None = None,
    delta0: float = DELTA0,
    tau: float = TAU,
    targets: str | Sequence[str] = ("*",),
    ignore: str | Sequence[str] = (),
    max_drop: float | None = 0.01,
    min_agreement: float | None = None,
    max_relative_deviation: float | None = 0.1,
    quantile: float = 1.0,
    confidence: float = 0.95,
    only_if_faster: bool = True,
    progress: bool = False,
) -> Sweep:
    """Every level's exact reorganization beside the original: what is kept, what it falls into, what that costs.

    Recommended is the acceptable level with the fewest multiply-adds, if any saves some and is not next to a jump of
    outputs or structure (with four levels or more); the model at that level is built, checked against the annealed
    one, and kept as `reorganized`, and the recommendation describes that model. A level that is not recommended costs
    one forward pass and two passes over the weights: its function is that of the dense model with annealed weights.

    Args:
        model: the original; it is not changed.
        data, metric: as for `validate`.
        levels: numbers in (0, 1), "percolation", or "bonferroni" (0.01 shared out over the weights of each matrix);
            None: half decades from 0.1 to 1e-6 and these two.
        rule: "both", "neyman", or both of them to compare.
        null, correction, random_walk, targets, ignore, only_if_faster: as for `reorganize`.
        alpha: of the random-walk test, or several to compare.
        delta0, tau: its first bandwidth and its step.
        max_drop, min_agreement, max_relative_deviation, quantile, confidence: when a level is acceptable, as for
            `validate`.
        progress: a bar on standard error.

    Returns:
        A `Sweep`: a point for every level and rule, the jumps between them, and the recommendation.

    Raises:
        InvalidOption: an option outside the values it may take, or a pattern that matches no layer; it names the
            nearest.

    Examples:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Linear(64, 64)
        >>> with torch.no_grad():
        ...     _ = model.weight.mul_(1e-3).add_(torch.block_diag(*torch.randn(4, 16, 16).sign()))
        >>> options = {"rule": "neyman", "null": nulls.Uniform(2e-4), "only_if_faster": False}
        >>> found = sweep(model, torch.randn(64, 64), [1e-2, "bonferroni"], **options)
        >>> [point.blocks for point in found.points], found.recommended.name
        ([(4,), (4,)], '0.01')
    """
    chosen = [rule] if isinstance(rule, str) else list(rule)
    for each in chosen or [""]:
        check_choice("rule", each, ("both", "neyman"), "a list of them")
    alphas: list[float | None] = list(alpha) if isinstance(alpha, Sequence) else [alpha]
    if not alphas or isinstance(alpha, str):
        raise InvalidOption(f"alpha: expected a number or a list of numbers, got {alpha!r}")
    settings = [AnnealingOptions(0.01, correction, random_walk, r, a, delta0, tau) for r in chosen for a in alphas]
    rules = Rules(max_drop, min_agreement, max_relative_deviation, quantile, confidence)
    asked = list(LEVELS if levels is None else levels)
    if not asked or isinstance(levels, str):
        raise InvalidOption(f"levels: expected a list of levels, got {levels!r}")
    model, notes = prepared(model, dense=True)
    targets, ignore = ([p] if isinstance(p, str) else list(p) for p in (targets, ignore))
    annealed = AnnealedModel(model, targets, ignore, null, settings[0])
    order = sorted(asked, key=annealed.numeric_level, reverse=True)
    measured = as_metric(metric)
    runs = [(r, a) for r in chosen for a in (alphas if r == "both" else [None])]  # "neyman" knows no α
    tracks = [_Track(r, a, level, annealed.numeric_level(level), measured) for r, a in runs for level in order]
    original = None if measured is None else RunningMetric(measured)
    first = _run_all(model, annealed, tracks, original, data, progress)
    points = tuple(track.point(rules, original) for track in tracks)
    before = None if original is None else original.done()[0]
    groups = ([p for p in points if (p.rule, p.alpha) == run] for run in runs)
    jumps = tuple(jump for group in groups for jump in find_jumps(group, before))
    best, reason = _recommend(points, jumps)
    built = None
    if best is not None:
        bonferroni = best.level == "bonferroni"
        built = reorganize(
            model,
            level=BONFERRONI if bonferroni else best.level,
            correction="bonferroni" if bonferroni else correction,
            null=null, random_walk=random_walk, rule=best.rule, alpha=best.alpha, delta0=delta0, tau=tau,
            targets=targets, ignore=ignore, only_if_faster=only_if_faster,
        )  # fmt: skip
        note_preparation_(built, notes)
        annealed.set_level(best.level, best.rule, best.alpha)
        _check_equal(built, annealed.model, first)
        best, built, reason = _described(best, built)
    samples = tracks[0].result().samples
    return Sweep(samples, measured.name if measured else None, before, points, jumps, best, reason, built)


class _Track:
    """One level while batches go by."""

    def __init__(
        self, rule: str, alpha: float | None, level: float | str, entry_level: float, metric: Metric | None
    ) -> None:
        self.rule, self.alpha, self.level, self.entry_level = rule, alpha, level, entry_level
        self.by_band_alone = False
        self.comparison = RunningComparison()
        self.metric = None if metric is None else RunningMetric(metric)
        self.structures: tuple[LayerStructure, ...] = ()

    def result(self) -> Comparison:
        return self.comparison.done()

    def point(self, rules: Rules, original: RunningMetric | None) -> SweepPoint:
        found = self.result()
        both: MetricResult | None = None
        if self.metric is not None and original is not None:
            both = RunningMetric.compare(original, self.metric)
        agreement = [float(o.agreement.mean()) for o in found.outputs if o.decides]
        return SweepPoint(
            self.rule, self.alpha, self.level, self.entry_level, self.by_band_alone, self.structures,
            None if both is None else both.reorganized,
            min(agreement, default=None),
            min(float(o.cosine.mean()) for o in found.outputs),
            max(float(o.deviation.mean()) for o in found.outputs),
            max(at_quantile(o.deviation, rules.quantile) for o in found.outputs),
            rules.judge(found, both),
        )  # fmt: skip


def _run_all(
    model: nn.Module,
    annealed: AnnealedModel,
    tracks: list[_Track],
    metric: RunningMetric | None,
    data: Any,
    progress: bool,
) -> Batch:
    """Run the original once and the annealed model once for each track, on all data; the first batch."""
    stream, first = batches(data), None
    with tqdm(unit="level", disable=not progress) as bar:
        while group := list(islice(stream, _GROUP)):
            if first is None:
                first = group[0]
                check_repeatable(model, first, "the model")
            expected = [batch.run(model) for batch in group]
            for batch, output in zip(group, expected, strict=True):
                if metric is not None:
                    metric.add(batch, output)
            for track in tracks:
                track.by_band_alone = annealed.set_level(track.level, track.rule, track.alpha)
                track.structures = track.structures or annealed.structures()
                for batch, output in zip(group, expected, strict=True):
                    found = batch.run(annealed.model)
                    track.comparison.add(batch, output, found)
                    if track.metric is not None:
                        track.metric.add(batch, found)
                bar.update()
    assert first is not None  # `batches` refuses data without a sample
    return first


def _check_equal(built: nn.Module, annealed: nn.Module, batch: Batch) -> None:
    expected, found = tensors(batch.run(annealed)), tensors(batch.run(built))
    for path, tensor in expected.items():
        if not equal_up_to_rounding(found[path], tensor):
            raise CrystalliteError(f"{path}: the reorganized model does not compute what the annealed one computes")


def _recommend(points: Sequence[SweepPoint], jumps: Sequence[Jump]) -> tuple[SweepPoint | None, str]:
    """The point whose model is worth building, or None and why."""
    accepted = [point for point in points if point.passed]
    if not accepted:
        closest = min(points, key=lambda p: (sum(not o.passed for o in p.outcomes), p.mean_deviation))
        why = next(o.reason for o in closest.outcomes if not o.passed)
        return None, f"No level is acceptable; the closest is {closest.name} ({closest.rule}): {why}."
    levels = f"{len(accepted)} of {len(points)} levels are acceptable"
    saving = [point for point in accepted if point.macs_share < 1]
    if not saving:
        return None, f"No level is worth it: {levels}, but no layer falls into blocks at any of them."
    steady = [point for point in saving if not any(jump.touches(point) for jump in jumps)]
    if not steady:
        best = min(saving, key=_cheapest)
        jump = next(jump for jump in jumps if jump.touches(best))
        return None, f"No level is safe: {levels}, but those that save anything sit on a jump. {jump} Try more levels."
    return min(steady, key=_cheapest), ""


def _cheapest(point: SweepPoint) -> tuple[float, float]:
    return point.macs_share, -point.entry_level


def _described(best: SweepPoint, built: nn.Module) -> tuple[SweepPoint | None, nn.Module | None, str]:
    """The recommendation in the numbers of the model that was built, or none if that is as expensive as before."""
    record: Any = built.reorganization
    changes: list[LayerChange] = record.changes
    before, after = sum(c.macs_before for c in changes), sum(c.macs_after for c in changes)
    if after >= before:
        blocks = f"its layers fall into {_span(best.blocks)} blocks, but none would run faster as blocks"
        return None, None, f"No level is worth it: at {best.name} ({best.rule}) {blocks} (only_if_faster=False)."
    replaced = sum(c.macs_after < c.macs_before for c in changes)
    saves = f"{replaced} of {len(best.layers)} layers become smaller, {after / before:.0%} of the multiply-adds"
    limits = "; ".join(o.reason for o in best.outcomes)
    alpha = "" if best.alpha is None else f", α {best.alpha:.3g}"
    return best, built, f"Recommended: level {best.name} ({best.rule}{alpha}): {saves}. {limits}."


def _span(numbers: Sequence[int]) -> str:
    """1 number, a few numbers, or how far they reach.

    >>> _span([4, 4]), _span([1, 2, 1]), _span([1, 2, 3, 4, 5])
    ('4', '1 2 1', '1…5')
    """
    if len(set(numbers)) == 1:
        return str(numbers[0])
    return " ".join(map(str, numbers)) if len(numbers) <= 4 else f"{min(numbers)}…{max(numbers)}"


def _row(point: SweepPoint) -> dict[str, Any]:
    """A point as plain values."""
    names = ("rule", "alpha", "level", "entry_level", "by_band_alone", "kept_share", "blocks", "dormant", "macs_share",
             "metric", "agreement", "cosine", "mean_deviation", "deviation", "passed")  # fmt: skip
    return {name: getattr(point, name) for name in names}
