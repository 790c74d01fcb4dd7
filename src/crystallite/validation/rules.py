"""When a reorganized system may take the place of the original: rules, and whether the data support them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from torch import Tensor

from crystallite.core.errors import InvalidOption
from crystallite.data.batch import Batch
from crystallite.validation.comparison import Comparison
from crystallite.validation.metrics import MetricResult

__all__ = ["Outcome", "Rules", "SliceResult", "slice_labels", "wilson_interval"]


@dataclass(frozen=True)
class Outcome:
    """What came of one rule.

    status: "passed"; "violated" by what was observed; or "unproven": passed by what was observed, but on so few samples
    that it may be violated on others.
    """

    rule: str
    limit: float | None
    observed: float
    status: str
    reason: str

    @property
    def passed(self) -> bool:
        return self.status == "passed"


@dataclass(frozen=True)
class SliceResult:
    """The samples of one slice."""

    label: str
    samples: int
    agreement: float | None
    deviation: float  # at the quantile that the rules state
    original: float | None  # the metric
    reorganized: float | None


@dataclass(frozen=True)
class Rules:
    """Limits that a reorganized system must keep; None switches a rule off.

    - `max_drop`: how much worse the metric may be, in its own units; a perplexity, by which share of the original's.
    - `min_agreement`: the least share of samples with the same argmax, for each output.
    - `max_relative_deviation`: of the worst sample, or of the given `quantile` of the samples, for each output.
    - `confidence`: with which drop and agreement must keep their limits on other samples than these.

    Outputs that are not finite violate all rules, so none needs to be given for them.
    """

    max_drop: float | None = 0.01
    min_agreement: float | None = None
    max_relative_deviation: float | None = 0.1
    quantile: float = 1.0
    confidence: float = 0.95

    def __post_init__(self) -> None:
        if self.max_drop is None and self.min_agreement is None and self.max_relative_deviation is None:
            raise InvalidOption("a verdict needs a rule: max_drop, min_agreement or max_relative_deviation")
        for name, low, high in (
            ("max_drop", 0, math.inf),
            ("min_agreement", 0, 1),
            ("max_relative_deviation", 0, math.inf),
            ("quantile", 0, 1),
            ("confidence", 0.5, 1 - 1e-12),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise InvalidOption(f"{name} must be between {low} and {high:.3g}, got {value!r}")

    def judge(
        self, comparison: Comparison, metric: MetricResult | None, slices: Sequence[SliceResult] = ()
    ) -> tuple[Outcome, ...]:
        """One outcome for each rule and what it applies to."""
        found = [*self._finite(comparison), *self._drop(metric), *self._agreement(comparison)]
        found += [*self._deviation(comparison), *self._slices(slices, metric)]
        if not found:
            raise InvalidOption("no rule applies to this data: max_drop needs a metric, min_agreement an argmax")
        return tuple(found)

    def _finite(self, comparison: Comparison) -> Iterator[Outcome]:
        broken = comparison.not_finite
        if broken:
            names = ", ".join(str(case.index) for case in broken[:5]) + (", …" if len(broken) > 5 else "")
            outputs = f"{len(broken)} output{'s' * (len(broken) > 1)}"
            reason = f"{broken[0].output}: NaN or infinity in {outputs}, of sample {names}"
            yield Outcome("finite", None, len(broken), "violated", reason)

    def _drop(self, metric: MetricResult | None) -> Iterator[Outcome]:
        if metric is None or self.max_drop is None:
            return
        observed, n = metric.drop, len(metric.losses)
        text = f"{metric}: {_change(observed)} on {n} samples, at most {self.max_drop:g} worse allowed"
        if not observed <= self.max_drop:
            yield Outcome("max_drop", self.max_drop, observed, "violated", text)
            return
        if not metric.per_sample:
            allowed = f"at most {self.max_drop:g} worse allowed (no bound: one number per batch)"
            text = f"{metric}: {_change(observed)}, {allowed}"
            yield Outcome("max_drop", self.max_drop, observed, "passed", text)
            return
        bound = drop_bound(metric.losses, self.confidence)
        bound = bound if metric.tokens is None else math.expm1(min(bound, 700.0))  # no float is beyond e^709
        if bound <= self.max_drop:
            yield Outcome("max_drop", self.max_drop, observed, "passed", f"{text} ({_bounded(bound)} {self._sure})")
            return
        text += f", but so few samples show only {_bounded(bound)} {self._sure}"
        yield Outcome("max_drop", self.max_drop, observed, "unproven", text)

    def _agreement(self, comparison: Comparison) -> Iterator[Outcome]:
        if self.min_agreement is None:
            return
        deciding = [output for output in comparison.outputs if output.decides]
        if not deciding:
            names = ", ".join(output.path for output in comparison.outputs)
            raise InvalidOption(
                f"min_agreement needs an output whose largest entry is a decision; {names}: none is one"
            )
        for output in deciding:
            observed, n = float(output.agreement.mean()), len(output.agreement)
            shown = wilson_interval(observed, n, self.confidence)[0]
            text = f"{output.path}: agreement {observed:.4g} on {n} samples, at least {self.min_agreement:g} expected"
            status = "passed"
            if observed < self.min_agreement:
                status = "violated"
            elif shown < self.min_agreement:
                status = "unproven"
                text += f", but so few samples show only {shown:.3g} {self._sure}"
                if observed == 1:
                    text += f"; it takes {self._samples_needed(1 - self.min_agreement)}"
            else:
                text += f" (≥ {shown:.4g} {self._sure})"
            yield Outcome("min_agreement", self.min_agreement, observed, status, text)

    def _deviation(self, comparison: Comparison) -> Iterator[Outcome]:
        limit = self.max_relative_deviation
        if limit is None:
            return
        for output in comparison.outputs:
            observed, n = at_quantile(output.deviation, self.quantile), len(output.deviation)
            which = "worst" if self.quantile == 1 else f"{self.quantile:.4g} quantile"
            text = f"{output.path}: relative deviation {observed:.3g} ({which} of {n}), at most {limit:g} allowed"
            status = "passed" if observed <= limit else "violated"
            if status == "passed" and self.quantile == 1:  # no sample of n was beyond: what that says about others
                share = (1 - self.confidence) ** (1 / n)
                text += f" (shown for {share:.2%} of such inputs {self._sure})"
            elif status == "violated":
                beyond = np.flatnonzero(output.deviation > limit)
                text += f"; {len(beyond)} beyond it, sample {output.index[output.deviation.argmax()]:.0f} most"
            yield Outcome("max_relative_deviation", limit, observed, status, text)

    def _slices(self, slices: Sequence[SliceResult], metric: MetricResult | None) -> Iterator[Outcome]:
        """What a slice shows against a rule; slices are often too small to prove anything for it."""
        for part in slices:
            name = f"slice {part.label} ({part.samples} samples)"
            if part.original is not None and part.reorganized is not None and metric and self.max_drop is not None:
                drop = metric.drop_between(part.original, part.reorganized)
                if not drop <= self.max_drop:
                    text = f"{name}: {metric.name} {part.original:.4g} → {part.reorganized:.4g}"
                    yield Outcome("max_drop", self.max_drop, drop, "violated", text)
            if part.agreement is not None and self.min_agreement is not None and part.agreement < self.min_agreement:
                text = f"{name}: agreement {part.agreement:.4g}, at least {self.min_agreement:g} expected"
                yield Outcome("min_agreement", self.min_agreement, part.agreement, "violated", text)
            limit = self.max_relative_deviation
            if limit is not None and part.deviation > limit:
                text = f"{name}: relative deviation {part.deviation:.3g}, at most {limit:g} allowed"
                yield Outcome("max_relative_deviation", limit, part.deviation, "violated", text)

    @property
    def _sure(self) -> str:
        return f"at {self.confidence:g} confidence"

    def _samples_needed(self, share: float) -> str:
        """How many samples without a fault show that at most a share has one."""
        if share <= 0:
            return "more samples than there can be"
        return f"{math.ceil(_z(self.confidence) ** 2 * (1 / share - 1))} samples without a difference"


def _change(drop: float) -> str:
    """How much worse or better a metric became.

    >>> _change(0.008), _change(-0.014), _change(0.0)
    ('0.008 worse', '0.014 better', 'unchanged')
    """
    return f"{abs(drop):.4g} {'worse' if drop > 0 else 'better'}" if drop else "unchanged"


def _bounded(drop: float) -> str:
    """What a bound on the drop of a metric says.

    >>> _bounded(0.005), _bounded(-0.004)
    ('at most 0.005 worse', 'at least 0.004 better')
    """
    return f"at most {drop:.3g} worse" if drop >= 0 else f"at least {-drop:.3g} better"


def slice_labels(batch: Batch, of: Callable[[Any, Any], Sequence[Any]]) -> list[str]:
    """What a function (inputs, target) → labels says of each sample of a batch."""
    inputs: Any = batch.named or (batch.positional[0] if len(batch.positional) == 1 else batch.positional)
    found = of(inputs, batch.target)
    labels = [str(label) for label in (found.tolist() if isinstance(found, (Tensor, np.ndarray)) else found)]
    if len(labels) != batch.size:
        raise InvalidOption(f"slices: expected one label for each of {batch.size} samples, got {len(labels)}")
    return labels


def at_quantile(values: np.ndarray, quantile: float) -> float:
    """The smallest of the values that at least this share does not exceed.

    >>> at_quantile(np.array([1.0, 2.0, 3.0, 4.0]), 0.5)
    2.0
    """
    return float(np.sort(values)[max(math.ceil(quantile * len(values) - 1e-9), 1) - 1])


def wilson_interval(share: float, samples: int, confidence: float = 0.95) -> tuple[float, float]:
    """Below and above which the true share lies with at most 1 − confidence each (Wilson's score bounds).

    >>> [round(bound, 3) for bound in wilson_interval(1.0, 50)]
    [0.949, 1.0]
    """
    from scipy.stats import binomtest  # slow to import, and few programs validate

    def bounds(count: int) -> tuple[float, float]:
        low, high = binomtest(count, samples).proportion_ci(2 * confidence - 1, "wilson")
        return float(low), float(high)

    count = share * samples  # a sample may agree in part: to the safe side
    return bounds(math.floor(count + 1e-9))[0], bounds(math.ceil(count - 1e-9))[1]


def drop_bound(losses: np.ndarray, confidence: float) -> float:
    """What the mean loss on other samples stays below with this confidence.

    Where samples are right or wrong, Wilson's bounds of the shares that were lost and gained are joined (Newcombe's
    square-and-add); otherwise the mean plus its standard error. One sample bounds nothing.

    >>> round(drop_bound(np.zeros(50), 0.95), 3), round(drop_bound(np.array([1.0] + [0.0] * 99), 0.95), 3)
    (0.051, 0.044)
    """
    mean, n = float(losses.mean()), len(losses)
    if np.isin(losses, (-1.0, 0.0, 1.0)).all():
        lost, gained = float((losses > 0).mean()), float((losses < 0).mean())
        above = wilson_interval(lost, n, confidence)[1] - lost
        below = gained - wilson_interval(gained, n, confidence)[0]
        return mean + math.hypot(above, below)
    return mean + _z(confidence) * float(losses.std(ddof=1)) / math.sqrt(n) if n > 1 else math.inf


def _z(confidence: float) -> float:
    return NormalDist().inv_cdf(confidence)
