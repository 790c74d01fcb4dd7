"""`validate`: the original and the reorganized system on the same inputs, and whether one may replace the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from crystallite.core.errors import InvalidOption
from crystallite.core.suggest import check_choice, suggest_keywords
from crystallite.data.batch import Batch, batches, check_repeatable, repeatable
from crystallite.models.artifact import load
from crystallite.models.familiarity import Unfamiliar, known_inputs, scoring
from crystallite.models.manifest import attach_verdict, check_source
from crystallite.models.preparing import prepared
from crystallite.models.record import CompressedOptions, ExactOptions, find_record
from crystallite.models.recorded_call import recorded_call
from crystallite.validation.block_roles import Slices, block_roles
from crystallite.validation.comparison import Comparison, RunningComparison
from crystallite.validation.continuity import LEAST_LEVELS
from crystallite.validation.cost import count_macs, count_parameters, measure_latency
from crystallite.validation.layers import LayerWatch, comparable
from crystallite.validation.metrics import Metric, MetricResult, RunningMetric, as_metric, check_causal
from crystallite.validation.rules import Outcome, Rules, SliceResult, at_quantile, slice_labels
from crystallite.validation.sweep import LEVELS, Sweep, sweep
from crystallite.validation.verdict import Verdict

__all__ = ["validate"]

_TESTS = ("null", "rule", "random_walk", "correction", "alpha", "delta0", "tau")  # of `ExactOptions`

_DEVIATION = 0.1
_MIXED = "it writes sums of the numbers that it wrote in each attention head"
_BATCH_SIZES = 3  # so many different ones are timed


@suggest_keywords
def validate(
    original: nn.Module,
    reorganized: nn.Module | str | os.PathLike[str],
    data: Any,
    metric: str | Metric | Callable[[Any, Tensor], Any] | None = None,
    levels: str | Sequence[float | str] | None = None,
    *,
    max_drop: float | None = 0.01,
    min_agreement: float | None = None,
    max_relative_deviation: float | str | None = "auto",
    quantile: float = 1.0,
    confidence: float = 0.95,
    slices: Slices | None = None,
    layers: bool = True,
    ablate_blocks: bool = False,
) -> Verdict:
    """A verdict on whether a reorganized model may take the place of the original, from both on the same inputs.

    Both models must be deterministic: call `.eval()` first. Outputs may be tensors, tuples, dicts or dataclasses.
    Beside ten numbers per sample and output, no more than one batch is held.

    Args:
        original: the model that would be replaced.
        reorganized: a model, or the folder of a saved one: it is loaded, and the verdict is written into its manifest,
            bound to the weights it was given on.
        data: an iterable of batches (a `DataLoader`, a list, a generator); a tensor or a dict alone is one batch. A
            batch is a tensor, a dict of keyword arguments (its "labels" are the target), or (inputs, target); several
            positional inputs are a tuple, ((a, b), target). Data that training has not seen say most.
        metric: "accuracy", "loss", "retrieval" (does the nearest other sample have the same label? States of tokens
            are averaged; `texts(…, halves=True)` makes such data of plain text), "perplexity" (of a causal language
            model, see `texts`; no labels needed; run sample by sample, so that the logits of one are held), a function
            (output, target) → one number, or one per sample, where more is better, or a `Metric`.
        max_drop, min_agreement, max_relative_deviation: see `Rules`; None switches a rule off. A drop or an agreement
            must be shown by enough samples. The drop of a perplexity is a share: 0.1 allows 10 % more. "auto" is 0.1,
            or None for perplexity: logits that differ may say the same.
        quantile: of the samples, at which the deviation is judged; 1: the worst.
        confidence: with which a drop or an agreement must be shown.
        slices: a label for each sample, or a function (inputs, target) → labels of a batch. Rules hold in each slice.
        layers: compare the outputs of layers too; holds the original's for one batch, and a dense copy of the model.
        ablate_blocks: also switch off the blocks of the reorganized model one at a time, to see which classes or
            slices, outputs and tokens each of them serves (`block_roles`); a run over all data for each block.
        levels: also sweep the significance level, "default" or levels as for `sweep`, with the same rules.

    Returns:
        A `Verdict`: whether every rule is kept, with the numbers, the worst samples and the timings behind it.

    Raises:
        InvalidOption: a rule that says nothing, a metric that does not suit the data, or a model that is not
            deterministic.

    Examples:
        >>> import torch
        >>> from crystallite import reorganize
        >>> model = nn.Linear(4, 2)
        >>> _ = nn.init.eye_(model.weight)
        >>> small = reorganize(model, level=None, only_if_faster=False)
        >>> verdict = validate(model, small, torch.randn(64, 4), min_agreement=0.95)
        >>> verdict.passed, verdict.macs
        (True, (512, 128))
    """
    measured = as_metric(metric)
    of_tokens = measured is not None and measured.of_tokens
    rules = Rules(max_drop, min_agreement, _deviation(max_relative_deviation, of_tokens), quantile, confidence)
    original, _ = prepared(original)
    if isinstance(reorganized, nn.Module):
        model, _ = prepared(reorganized)
    else:
        check_source(reorganized, original)  # before the work, not after it
        model = load(reorganized, into=original).eval()
    data = repeatable(data) if levels is not None or ablate_blocks else data
    collected = _Both(original, model, measured, slices)
    dense = comparable(model) if layers else None
    watch = None if dense is None else LayerWatch(original, dense, dict.fromkeys(_mixed_heads(model), _MIXED))
    collected.run(data, None if dense is model else dense, watch)
    comparison, result = collected.comparison.done(), collected.metric_result()
    parts = _slice_results(comparison, result, collected.labels, rules)
    samples = list(collected.timed.values())
    swept = None if levels is None else _sweep_like(original, model, data, measured, levels, rules)
    verdict = Verdict(
        rules,
        (*rules.judge(comparison, result, parts), *_continuity(model, swept)),
        comparison,
        result,
        (count_parameters(original), count_parameters(model)),
        (count_macs(original, samples[0]), count_macs(model, samples[0])),
        measure_latency(original, model, samples),
        parts,
        *(((), {}) if watch is None else watch.done()),
        swept,
        _guarantee(model),
        collected.unfamiliar if collected.known else None,
        samples[0].sample,
        block_roles(model, data, measured, slices=slices) if ablate_blocks else None,
    )
    if not isinstance(reorganized, nn.Module):
        call = recorded_call(model, (batch.arguments for batch in samples))
        attach_verdict(Path(reorganized), verdict.to_json(), call)
    return verdict


def _deviation(limit: float | str | None, of_tokens: bool) -> float | None:
    if isinstance(limit, str):
        check_choice("max_relative_deviation", limit, ["auto"], "a number")
        return None if of_tokens else _DEVIATION
    return limit


def _mixed_heads(model: nn.Module) -> tuple[str, ...]:
    """Layers whose outputs are compared only by what is read of them."""
    found = find_record(model)
    return found.options.heads_mixed if found is not None and isinstance(found.options, CompressedOptions) else ()


def _guarantee(model: nn.Module) -> str | None:
    """The sentence about it in the record of a model that was fitted to a tolerance."""
    found = find_record(model)
    if found is None or not isinstance(found.options, CompressedOptions) or found.options.guarantee is None:
        return None
    return str(found.options.guarantee)


class _Both:
    """Both systems while batches go by."""

    def __init__(
        self, original: nn.Module, reorganized: nn.Module, metric: Metric | None, slices: Slices | None
    ) -> None:
        self.models = original, reorganized
        self.comparison = RunningComparison()
        self.metrics = None if metric is None else (RunningMetric(metric), RunningMetric(metric))
        self.known, self.unfamiliar = known_inputs(reorganized), Unfamiliar()
        self.of_tokens = metric is not None and metric.of_tokens
        self.slices = slices
        self.labels: list[str] = []
        self.timed: dict[int, Batch] = {}

    def run(self, data: Any, dense: nn.Module | None, watch: LayerWatch | None) -> None:
        """All batches; a dense form of the reorganized model runs along for the layers it can be compared by."""
        for batch in batches(data) if not self.of_tokens else (part for b in batches(data) for part in b.split(1)):
            if not self.timed:
                for model, who in zip(self.models, ("the original", "the reorganized model"), strict=True):
                    check_repeatable(model, batch, who)
                if self.of_tokens:
                    check_causal(self.models[0], batch)
            with watch or nullcontext(), scoring(self.models[1], self.known, self.unfamiliar.add):
                outputs = [batch.run(model) for model in self.models]
                if dense is not None:
                    batch.run(dense)
            self.comparison.add(batch, *outputs)
            for metric, output in zip(self.metrics or (), outputs, strict=False):
                metric.add(batch, output)
            if callable(self.slices):
                self.labels += slice_labels(batch, self.slices)
            if len(self.timed) < _BATCH_SIZES:
                self.timed.setdefault(batch.size, batch)
        if self.slices is not None and not callable(self.slices):
            self.labels = [str(label) for label in self.slices]
            samples = self.comparison.samples
            if len(self.labels) != samples:
                raise InvalidOption(f"slices: expected one label for each of {samples} samples, got {len(self.labels)}")

    def metric_result(self) -> MetricResult | None:
        return None if self.metrics is None else RunningMetric.compare(*self.metrics)


def _slice_results(
    comparison: Comparison, metric: MetricResult | None, labels: list[str], rules: Rules
) -> tuple[SliceResult, ...]:
    found = []
    for label in sorted(set(labels)):
        inside = np.array([own == label for own in labels])
        outputs = [o for o in comparison.outputs if len(o.index) == comparison.samples]
        agreement = [float(o.agreement[inside].mean()) for o in outputs if o.decides]
        both = metric.among(inside) if metric is not None and metric.per_sample else [None, None]
        deviation = at_quantile(comparison.deviation[inside], rules.quantile)
        found.append(SliceResult(label, int(inside.sum()), min(agreement, default=None), deviation, *both))
    return tuple(found)


def _sweep_like(
    original: nn.Module, reorganized: nn.Module, data: Any, metric: Metric | None, levels: Any, rules: Rules
) -> Sweep:
    """A sweep with the options that the model was reorganized with, where it says them."""
    found, known = find_record(reorganized), dict[str, Any]()
    chosen = list(LEVELS if isinstance(levels, str) and levels == "default" else levels)
    if found is not None:
        known["targets"] = [change.name for change in found.changes]
        if isinstance(found.options, ExactOptions):
            known |= {name: getattr(found.options, name) for name in _TESTS}
            own = found.options.level
            chosen += [own] if own is not None and own not in chosen else []
    if known.get("null", "auto") not in ("auto", "init", "empirical"):
        raise InvalidOption(f"the model was annealed against {known['null']}: call sweep(…, null=…) with it instead")
    return sweep(original, data, chosen, metric=metric, **asdict(rules), **known)


def _continuity(reorganized: nn.Module, swept: Sweep | None) -> tuple[Outcome, ...]:
    """Whether results change gradually around the level that the model was annealed at, where the sweep can tell."""
    found = find_record(reorganized)
    if swept is None or found is None or not isinstance(found.options, ExactOptions):
        return ()
    points = [p for p in swept.points if p.rule == found.options.rule]
    own = [p for p in points if p.level == found.options.level]
    if not own or len(points) < LEAST_LEVELS:
        return ()
    touching = [str(jump) for jump in swept.jumps if jump.touches(own[0])]
    gradual = f"outputs and structure change gradually around level {own[0].name}"
    reason = f"level {own[0].name} sits on a jump: {' '.join(touching)}" if touching else gradual
    return (Outcome("continuity", None, float(len(touching)), "violated" if touching else "passed", reason),)
