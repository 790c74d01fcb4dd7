"""`block_roles`: what each block is for, from what the model loses while that block is switched off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crystallite.core.drawing import Drawing
from crystallite.core.errors import InvalidOption
from crystallite.core.run_charts import role_chart
from crystallite.core.suggest import suggest_keywords
from crystallite.core.tables import html_text, text_table
from crystallite.data.batch import Batch, batches
from crystallite.data.outputs import tensors
from crystallite.reorganization.switching import BlockSwitch, block_switches
from crystallite.validation.metrics import Metric, MetricResult, RunningMetric, as_metric, read_tokens, token_losses
from crystallite.validation.rules import slice_labels

__all__ = ["BlockRole", "BlockRoles", "Slices", "block_roles"]

Slices = Sequence[Any] | Callable[[Any, Any], Sequence[Any]]
_MOST_BLOCKS = 64  # switched off, the largest first: each is a run over all data
_MOST_FEATURES = 64  # of an output that are told apart
_MOST_TOKENS, _LEAST_OFTEN = 5, 3  # tokens that are named, and how often the data must have them
_SMALL = 0.1  # an output feature smaller than this share of the usual one is measured against that share
_SHOWN = 8  # columns of the table


@dataclass(frozen=True)
class BlockRole:
    """What is lost without one block. Nothing is lost where numbers are 0; below 0 the model is better without it."""

    layer: str
    block: int
    weights: int
    classes: dict[str, float]  # by how much the metric is worse, for each class or slice; {} without a metric
    outputs: dict[str, float]  # ‖y′ − y‖ / ‖y‖ of each output, or of each of its features where these are few
    tokens: dict[str, float]  # of a language model: by how much −log p of a token rises, the most affected ones


@dataclass(frozen=True, repr=False)
class BlockRoles:
    """What each block of a model is for, in the order of the model."""

    metric: str | None
    samples: int
    roles: tuple[BlockRole, ...]
    left_out: int  # blocks that were not switched off: only the 64 with the most weights are

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def to_pandas(self) -> Any:
        """One row per block, one column for each class and output."""
        import pandas

        return pandas.DataFrame(
            {"layer": r.layer, "block": r.block, "weights": r.weights, **r.classes, **r.outputs} for r in self.roles
        )

    def plot(self) -> Drawing:
        """A picture of blocks and what each of them serves: the darker, the more is lost without it."""
        return role_chart([asdict(role) for role in self.roles], self.metric)

    def _repr_html_(self) -> str:
        return html_text(repr(self))

    def __repr__(self) -> str:
        by_class = any(role.classes for role in self.roles)
        values = [role.classes if by_class else role.outputs for role in self.roles]
        largest = {key: max(abs(value[key]) for value in values) for key in values[0]}
        shown = [key for key in largest if key in sorted(largest, key=lambda key: -largest[key])[:_SHOWN]]
        what = f"loss of {self.metric} by class or slice" if by_class else "relative change of outputs"
        lines = [f"{what}, without one block at a time"]
        rows = [["layer", "block", *shown]]
        for role, value in zip(self.roles, values, strict=True):
            rows.append([role.layer or "(model)", str(role.block), *(f"{value[key]:.3g}" for key in shown)])
        lines += [f"  {line}" for line in text_table(rows)]
        for role in self.roles:
            if role.tokens:
                named = ", ".join(f"{token} {rise:+.2f}" for token, rise in role.tokens.items())
                lines.append(f"  {role.layer} {role.block}: −log p of tokens {named}")
        if len(shown) < len(largest):
            lines.append(f"  the {len(shown)} most affected of {len(largest)}; to_json() has all")
        if self.left_out:
            lines.append(f"  {self.left_out} smaller blocks were not switched off")
        return "\n".join(lines)


@suggest_keywords
def block_roles(
    model: nn.Module,
    data: Any,
    metric: str | Metric | Callable[[Any, Tensor], Any] | None = None,
    *,
    slices: Slices | None = None,
) -> BlockRoles:
    """What each block of a reorganized model is for: which classes, tasks or tokens suffer while it is switched off.

    A block that is switched off emits what its biases say: its weights count as zero. Blocks are those of the block
    operators, subnetworks of chains, and experts; the weights come back bit for bit. Cost: a run over all data for each
    block, of at most 64.

    Args:
        model: with block operators or experts, in evaluation mode.
        data: as for `validate`.
        metric: as for `validate`; what is lost is shown for each class of the targets, or for each slice. None: only
            how far outputs change.
        slices: a label for each sample, or a function (inputs, target) → labels of a batch: tasks, languages, sources.
            None: the classes, where every sample has one.

    Returns:
        `BlockRoles`, which prints as a table of blocks and what each of them serves.

    Raises:
        InvalidOption: a model without blocks, or a metric that does not suit the data.

    Examples:
        >>> from crystallite import reorganize
        >>> layer = nn.Linear(4, 2, bias=False)
        >>> _ = layer.weight.data.copy_(torch.tensor([[1.0, 1, 0, 0], [0, 0, 1, 1]]))
        >>> roles = block_roles(reorganize(layer, level=None, only_if_faster=False), torch.randn(64, 4)).roles
        >>> [{name: round(change, 3) for name, change in role.outputs.items()} for role in roles]
        [{'output[0]': 1.0, 'output[1]': 0.0}, {'output[0]': 0.0, 'output[1]': 1.0}]
    """
    switches = block_switches(model)
    if not switches:
        raise InvalidOption(
            f"{type(model).__name__}: expected a model with blocks or experts, as reorganize, compress and upgrade "
            "make them; here no operator has two"
        )
    chosen = sorted(sorted(range(len(switches)), key=lambda i: -switches[i].size)[:_MOST_BLOCKS])
    measured = as_metric(metric)
    whole = _Run(measured)
    runs = [(switches[i], _Run(measured)) for i in chosen]
    labels: list[str] = []
    alone = measured is not None and measured.of_tokens  # the logits of one sample fill memory enough
    for batch in (part for b in batches(data) for part in (b.split(1) if alone else [b])):
        expected = batch.run(model)
        whole.add(batch, expected, expected)
        for switch, run in runs:
            with switch.off():
                found = batch.run(model)
            run.add(batch, expected, found)
        labels += _labels(batch, slices)
    groups = _given(slices, labels, whole.samples)
    roles = tuple(run.role(switch, whole, groups) for switch, run in runs)
    return BlockRoles(measured.name if measured else None, whole.samples, roles, len(switches) - len(chosen))


def _labels(batch: Batch, slices: Slices | None) -> list[str]:
    if callable(slices):
        return slice_labels(batch, slices)
    target = batch.target
    classes = isinstance(target, Tensor) and target.ndim == 1 and not target.is_floating_point()
    return [str(label) for label in target.tolist()] if classes else ["all"] * batch.size  # type: ignore[union-attr]


def _given(slices: Slices | None, labels: list[str], samples: int) -> np.ndarray:
    if slices is not None and not callable(slices):
        labels = [str(label) for label in slices]
        if len(labels) != samples:
            raise InvalidOption(f"slices: expected one label for each of {samples} samples, got {len(labels)}")
    return np.array(labels)


class _Run:
    """The model without one block while batches go by, beside what it is with it."""

    def __init__(self, metric: Metric | None) -> None:
        self.metric = None if metric is None else RunningMetric(metric)
        self.of_tokens = metric is not None and metric.of_tokens
        self.samples = 0
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}  # path → Σ(y′ − y)², Σy² of each feature
        self._tokens: dict[int, tuple[float, int]] = {}  # token → Σ −log p, how often

    def add(self, batch: Batch, expected: Any, found: Any) -> None:
        self.samples += batch.size
        if self.metric is not None:
            self.metric.add(batch, found)
        others = tensors(found)
        for path, y in tensors(expected).items():
            if not y.is_floating_point():
                continue
            features = y.shape[-1] if y.ndim > 1 and y.shape[-1] <= _MOST_FEATURES else 1
            old, new = (t.detach().double().reshape(-1, features).cpu() for t in (y, others[path]))
            sums = (new - old).square().sum(0), old.square().sum(0)
            before = self._sums.get(path)
            self._sums[path] = sums if before is None else (before[0] + sums[0], before[1] + sums[1])
        if self.of_tokens:
            target = read_tokens(batch) if batch.target is None else batch.target
            assert target is not None  # the metric has seen it
            losses, tokens = token_losses(found, target)
            for token in tokens.unique().tolist():
                here = tokens == token
                loss, count = self._tokens.get(token, (0.0, 0))
                self._tokens[token] = loss + float(losses[here].sum()), count + int(here.sum())

    def role(self, switch: BlockSwitch, whole: _Run, labels: np.ndarray) -> BlockRole:
        classes: dict[str, float] = {}
        if self.metric is not None and whole.metric is not None:
            classes = _by_label(RunningMetric.compare(whole.metric, self.metric), labels)
        return BlockRole(switch.layer, switch.block, switch.size, classes, self._changes(), self._worst_tokens(whole))

    def _changes(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for path, (difference, size) in self._sums.items():
            floor = _SMALL**2 * size.mean()
            ratio = (difference / torch.maximum(size, floor).clamp_min(torch.finfo(torch.float64).tiny)).sqrt()
            names = [path] if len(ratio) == 1 else [f"{path}[{i}]" for i in range(len(ratio))]
            found |= dict(zip(names, ratio.tolist(), strict=True))
        return found

    def _worst_tokens(self, whole: _Run) -> dict[str, float]:
        rises = {
            str(token): (loss - whole._tokens[token][0]) / count
            for token, (loss, count) in self._tokens.items()
            if token >= 0 and count >= _LEAST_OFTEN
        }
        worst = sorted(rises, key=lambda token: -rises[token])[:_MOST_TOKENS]
        return {token: rises[token] for token in worst}


def _by_label(result: MetricResult, labels: np.ndarray) -> dict[str, float]:
    if not result.per_sample:
        return {"all": result.drop}
    names = sorted(set(labels.tolist()), key=lambda name: (len(name), name))  # numbers in their order
    return {name: float(result.drop_between(*result.among(labels == name))) for name in names}
