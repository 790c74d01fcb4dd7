"""`compare`: a smaller model beside what other methods make of the same model at the same cost."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.baselines.layers import find_layers, input_norms
from crystallite.baselines.onnx_runtime import InOnnxRuntime
from crystallite.baselines.pruning import find_removable, pruned
from crystallite.baselines.shapes import decomposed, random_blocks
from crystallite.baselines.torch_pruning import pruned_by_graph
from crystallite.core.errors import CrystalliteError, InvalidOption
from crystallite.core.suggest import check_choice, suggest_keywords
from crystallite.core.tables import text_table
from crystallite.data.batch import Batch, batches, evaluating
from crystallite.data.calibration import Calibration
from crystallite.data.outputs import main_output, tensors
from crystallite.graph.neuron_groups import NeuronGroup
from crystallite.graph.trace import Untraceable
from crystallite.models.preparing import prepared
from crystallite.validation.comparison import RunningComparison
from crystallite.validation.cost import count_macs
from crystallite.validation.metrics import Metric, RunningMetric, as_metric

__all__ = ["METHODS", "Row", "best_times", "compare", "makers", "table"]

METHODS = {
    "magnitude": "pruning",
    "Wanda score": "pruning",
    "Torch-Pruning": "pruning",
    "SVD": "low rank",
    "random blocks": "blocks",
    "ONNX Runtime fp32": "ONNX Runtime",
    "ONNX Runtime int8": "ONNX Runtime",
    "fitted + ONNX Runtime int8": "crystallite",
}  # each by its family
LIKENESS = ("cosine", "agreement")  # measures that need no targets
_SECONDS = 0.3  # of timing for each model
_TURNS = (4, 30)  # of all models, at least and at most
_IN_A_ROW = 5  # runs of a model in a turn, at most
_SHOWN = 8  # samples with which shapes are tried and multiply-adds are counted


@dataclass(frozen=True)
class Row:
    """What a method's model costs and how good it is, or why it was skipped. `crystallite report` draws such rows."""

    name: str
    family: str
    measure: str  # what quality is: a metric, or "cosine" or "agreement" with the dense model
    macs: int | None = None  # multiply-adds of inputs with weights for one sample
    share: float | None = None  # of the dense model's
    latency_ms: float | None = None  # for one batch, the best of several runs in turns
    batch: int | None = None  # samples in it
    quality: float | None = None  # more is better: a loss counts negative
    skipped: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@suggest_keywords
def compare(
    model: nn.Module,
    small: nn.Module,
    data: Any,
    metric: str | Metric | Callable[[Any, Tensor], Any] | None = None,
    *,
    calibration: Any,
    methods: Sequence[str] | None = None,
    groups: Sequence[NeuronGroup] | None = None,
    beside: Mapping[str, nn.Module] | None = None,
    targets: str | Sequence[str] = ("*",),
    ignore: str | Sequence[str] = (),
    seed: int = 0,
) -> list[Row]:
    """A row for the dense model, one for the smaller model, and one for each other method at the smaller one's cost.

    A method that does not apply, fails, or whose package is missing has a row that says why.

    Args:
        model: the dense model.
        small: what `compress(model, budget=…)` returned; others may keep as many multiply-adds as it has, random
            blocks, which come in whole numbers, 3 % more.
        data, metric: to judge by, as for `validate`; also "cosine" or "agreement" (equal argmax) with the dense model,
            which need no targets. None: accuracy where targets are whole numbers, else the cosine. The first batch is
            timed, on as many threads as PyTorch uses, all models in turns.
        calibration: batches of inputs, for the Wanda score.
        methods: names from `METHODS`; None: all. ONNX Runtime has no fewer multiply-adds, and is what a CPU user would
            pick instead. No method trains.
        groups: neurons that pruning may take out; None: those that `find_groups` finds.
        beside: other models to measure along with these, by name.
        targets, ignore: patterns of layer names, as they were when `small` was made.
        seed: of random blocks.

    Returns:
        A row for each model and method.

    Raises:
        InvalidOption: an option outside the values it may take, or a pattern that matches no layer; it names the
            nearest.

    Examples:
        >>> from crystallite import compress
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
        >>> x = torch.randn(400, 16)
        >>> small = compress(model, budget=0.5, calibration=x)
        >>> rows = compare(model, small, x, calibration=x, methods=["magnitude", "SVD"])
        >>> [(row.name, row.share <= 0.5) for row in rows]
        [('dense', False), ('fitted', True), ('magnitude', True), ('SVD', True)]
    """
    chosen = list(METHODS if methods is None else methods)
    for name in chosen:
        check_choice("methods", name, list(METHODS))
    model, small = prepared(model)[0], prepared(small)[0]
    judged = list(batches(data))
    measure = _measure(metric, judged[0])
    dense, small = copy.deepcopy(model).eval(), copy.deepcopy(small).eval()
    _qualities({"dense": dense}, judged[:2], measure)  # a metric that does not suit is refused before the work
    made = makers(dense, small, calibration, judged[0], groups, targets, ignore, seed)
    models: dict[str, nn.Module] = {"dense": dense, "fitted": small}
    reasons: dict[str, str] = {}
    by_loss = isinstance(measure, Metric) and measure.name == "loss"
    own_loss = by_loss and "output.loss" in tensors(judged[0].run(dense))
    for name in chosen:
        try:
            if own_loss and "ONNX Runtime" in name:
                raise InvalidOption("the model computes its loss itself, which ONNX leaves out; use another metric")
            models[name] = made[name]().eval()
        except Exception as error:  # whatever another package or the model's own code raises
            reasons[name] = _reason(error)
    with ExitStack() as stack:
        for other in (beside or {}).values():
            stack.enter_context(evaluating(other))
        models |= beside or {}
        quality, failed = _qualities(models, judged, measure)
        models = {name: each for name, each in models.items() if name in quality}
        few = judged[0].first(_SHOWN)
        macs = {name: _macs(name, models, few) for name in models}
        times = best_times(models, judged[0])
    said = measure if isinstance(measure, str) else measure.name
    ours = {name: "crystallite" for name, model in models.items() if hasattr(model, "reorganization")}
    families = {**ours, **METHODS, "fitted": "crystallite"}
    found = [
        Row(
            name, families.get(name, name), said, round(macs[name] / few.size), macs[name] / macs["dense"],
            1e3 * times[name], judged[0].size, quality[name],
        )
        for name in models
    ]  # fmt: skip
    return found + [Row(name, METHODS[name], said, skipped=reason) for name, reason in (reasons | failed).items()]


def makers(
    dense: nn.Module, small: nn.Module, calibration: Any, batch: Batch, groups: Sequence[NeuronGroup] | None = None,
    targets: str | Sequence[str] = ("*",), ignore: str | Sequence[str] = (), seed: int = 0,
) -> dict[str, Callable[[], nn.Module]]:  # fmt: skip
    """For each method a function that makes its model at the smaller model's cost, or raises why it cannot."""
    names = find_layers(dense, targets, ignore)
    if not names:
        raise InvalidOption(f"no linear layer or convolution matches targets {targets} and ignore {ignore}")
    few = batch.first(_SHOWN)
    total, limit = (count_macs(each, few) for each in (dense, small))
    if limit >= total:
        raise InvalidOption(
            f"expected a smaller model, got one of {limit:,} multiply-adds where the original has {total:,}"
        )

    @cache
    def known() -> Sequence[NeuronGroup]:
        return find_removable(dense, names, few) if groups is None else groups

    def wanda() -> nn.Module:
        inputs = Calibration.read(calibration).all  # as many as layers are fitted on
        return pruned(dense, known(), few, limit, input_norms(dense, names, inputs))

    def by_graph() -> nn.Module:
        try:
            heads = {name: group.heads for group in known() if group.heads for name in group.writers}
        except Untraceable:  # it follows models in its own way
            heads = {}
        return pruned_by_graph(dense, names, heads, few, limit)

    return {
        "magnitude": lambda: pruned(dense, known(), few, limit),
        "Wanda score": wanda,
        "Torch-Pruning": by_graph,
        "SVD": partial(decomposed, dense, find_layers(dense, targets, ignore, recurrent=True), few, limit),
        "random blocks": partial(random_blocks, dense, names, few, limit, seed),
        "ONNX Runtime fp32": partial(InOnnxRuntime, dense, few),
        "ONNX Runtime int8": partial(InOnnxRuntime, dense, few, int8=True),
        "fitted + ONNX Runtime int8": partial(InOnnxRuntime, small, few, int8=True),
    }


def _measure(metric: str | Metric | Callable[[Any, Tensor], Any] | None, batch: Batch) -> Metric | str:
    if metric is None:
        classes = batch.target is not None and not batch.target.is_floating_point()
        metric = "accuracy" if classes else "cosine"
    if isinstance(metric, str) and metric in LIKENESS:
        return metric
    found = as_metric(metric)
    assert found is not None
    return found


def _macs(name: str, models: Mapping[str, nn.Module], batch: Batch) -> int:
    """Multiply-adds for the batch; ONNX Runtime has those of the model that it runs."""
    if "ONNX Runtime" in name:
        name = "fitted" if name.startswith("fitted") else "dense"
    return count_macs(models[name], batch)


def _qualities(
    models: Mapping[str, nn.Module], judged: Sequence[Batch], measure: Metric | str
) -> tuple[dict[str, float], dict[str, str]]:
    """How good each model is, and why some methods' models could not be run on all batches."""
    running: dict[str, Any] = {
        name: RunningComparison() if isinstance(measure, str) else RunningMetric(measure) for name in models
    }
    failed: dict[str, str] = {}
    for batch in judged:
        dense = batch.run(models["dense"])
        for name in list(running):
            try:
                output = dense if name == "dense" else batch.run(models[name])
                seen = (main_output(dense), main_output(output)) if isinstance(measure, str) else (output,)
                running[name].add(batch, *seen)
            except Exception as error:
                if name not in METHODS:
                    raise
                failed[name] = _reason(error)
                del running[name]
    if isinstance(measure, Metric):
        sign = 1 if measure.greater_is_better else -1
        return {name: sign * each.done()[0] for name, each in running.items()}, failed
    compared = {name: each.done().outputs[0] for name, each in running.items()}
    if measure == "agreement" and not compared["dense"].decides:
        raise InvalidOption('agreement: the outputs have no argmax to take; use "cosine", or a metric and targets')
    return {name: float(getattr(each, measure).mean()) for name, each in compared.items()}, failed


def _reason(error: Exception) -> str:
    """Why a method was skipped: our own errors say it, of others the kind helps to find out."""
    if isinstance(error, CrystalliteError):
        return str(error)
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.200}"


def best_times(
    models: Mapping[str, nn.Module], batch: Batch, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Seconds that each model takes for a batch, the best of several runs in turns: a busy machine slows all."""
    best = dict.fromkeys(models, math.inf)
    least, most = _TURNS
    begun = time.perf_counter()
    with torch.inference_mode():
        for turn in range(most):
            for name, model in models.items():
                best[name] = min(best[name], _best_in_a_row(model, batch, clock))
            if turn + 1 >= least and time.perf_counter() - begun > _SECONDS * len(models):
                break
    return best


def _best_in_a_row(model: nn.Module, batch: Batch, clock: Callable[[], float]) -> float:
    """Quick models run several times: the first finds caches, and maybe threads, as another model left them."""
    best, begun = math.inf, time.perf_counter()
    for _ in range(_IN_A_ROW):
        start = clock()
        batch.run(model)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, clock() - start)
        if time.perf_counter() - begun > _SECONDS / 3:
            break
    return best


def table(rows: Sequence[Row]) -> str:
    """The rows for people, what was skipped below them.

    >>> print(table([Row("dense", "dense", "accuracy", 100, 1.0, 2.5, 32, 0.98), Row("SVD", "x", "", skipped="why")]))
    method  multiply-adds  ms, batch 32  accuracy
    dense          100.0%          2.50    0.9800
    Skipped: SVD (why)
    """
    measured = [row for row in rows if not row.skipped]
    first = measured[0]
    lines = [["method", "multiply-adds", f"ms, batch {first.batch}", first.measure]]
    lines += [[r.name, f"{r.share:.1%}", f"{r.latency_ms:.2f}", f"{r.quality:.4f}"] for r in measured]
    return "\n".join([*text_table(lines), *(f"Skipped: {row.name} ({row.skipped})" for row in rows if row.skipped)])
