"""What the task calls good, measured on both systems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crystallite.core.errors import InvalidOption
from crystallite.core.suggest import check_choice
from crystallite.data.batch import Batch
from crystallite.data.outputs import equal_up_to_rounding, main_output, tensors

__all__ = [
    "METRICS",
    "Metric",
    "MetricResult",
    "RunningMetric",
    "as_metric",
    "check_causal",
    "read_tokens",
    "token_losses",
]

_AT_ONCE = 1 << 22  # logits that are looked at together
_NO_TOKENS = "perplexity: expected a causal language model, or logits (samples, tokens, vocabulary) with labels"
_IGNORED = -100  # the label of positions that do not count, as everywhere in PyTorch


@dataclass(frozen=True)
class Metric:
    """How well outputs meet their targets.

    measure: (output, target) → one value per sample, or one number for the batch. `finish` turns what all batches gave
    and all targets into one value per sample, for a metric that looks at samples together.

    of_tokens: `measure` gives Σ −log p and the number of tokens of each sample, (samples, 2). The metric is the
    exponential of their ratio over all samples, and what it loses is a share of it. Without labels, the tokens that the
    model reads are the target.

    of_vectors: `measure` is given one vector for each sample: where a model returns states of tokens (samples, tokens,
    features), their mean over the tokens that the batch's `attention_mask` counts.
    """

    name: str
    measure: Callable[[Any, Tensor], Any]
    greater_is_better: bool = True
    finish: Callable[[Tensor, Tensor], Tensor] | None = None
    of_tokens: bool = False
    of_vectors: bool = False


@dataclass(frozen=True, eq=False)
class MetricResult:
    """A metric of both systems; `values` by sample where the metric gives them, else by batch."""

    name: str
    greater_is_better: bool
    original: float
    reorganized: float
    values: np.ndarray  # (2, samples or batches)
    per_sample: bool
    tokens: np.ndarray | None = None  # (samples,) of a metric of tokens, whose values are then −log p of each

    @property
    def drop(self) -> float:
        """By how much the reorganized system is worse; negative if it is better. Of a metric of tokens, as a share."""
        return self.drop_between(self.original, self.reorganized)

    def drop_between(self, original: float, reorganized: float) -> float:
        """By how much one result is worse than another."""
        if self.tokens is not None:
            return reorganized / original - 1
        loss = original - reorganized
        return loss if self.greater_is_better else -loss

    @property
    def losses(self) -> np.ndarray:
        """(samples or batches,) by how much each is worse; long samples of a metric of tokens count for more."""
        loss = self.values[0] - self.values[1]
        loss = loss if self.greater_is_better else -loss
        return loss if self.tokens is None else loss * self.tokens / self.tokens.mean()

    def among(self, chosen: np.ndarray) -> list[float]:
        """The metric of both systems over some of the samples."""
        if self.tokens is None:
            return self.values[:, chosen].mean(1).tolist()
        return np.exp(np.average(self.values[:, chosen], axis=1, weights=self.tokens[chosen])).tolist()

    def __str__(self) -> str:
        return f"{self.name} {self.original:.4g} → {self.reorganized:.4g}"


def as_metric(metric: str | Metric | Callable[[Any, Tensor], Any] | None) -> Metric | None:
    """A metric by its name, a function (output, target) for which more is better, or a `Metric` as it is.

    >>> as_metric("accuracy").name, as_metric(lambda output, target: 1.0).greater_is_better
    ('accuracy', True)
    >>> as_metric("f1")
    Traceback (most recent call last):
    crystallite.core.errors.InvalidOption: metric must be one of accuracy, loss, retrieval, perplexity or a function of
    (output, target), got 'f1'
    """
    if metric is None or isinstance(metric, Metric):
        return metric
    if callable(metric):
        return Metric(getattr(metric, "__name__", "metric"), metric)
    check_choice("metric", metric, list(METRICS), "a function of (output, target)")
    return METRICS[metric]


class RunningMetric:
    """A metric of one system while batches come in."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self._values: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._sizes: list[int] = []

    def add(self, batch: Batch, output: Any) -> None:
        """What the system returned on a batch."""
        target = read_tokens(batch) if self.metric.of_tokens and batch.target is None else batch.target
        if target is None and self.metric.of_tokens:
            raise InvalidOption(f"{_NO_TOKENS}, got a batch without either")
        if target is None:
            raise InvalidOption(
                f"the metric {self.metric.name} needs a target for every sample: give data as (inputs, target), or "
                'as dicts with "labels"'
            )
        seen = _mean_of_tokens(batch, main_output(output)) if self.metric.of_vectors else output
        value = torch.as_tensor(self.metric.measure(seen, target)).detach().cpu().double()
        if value.ndim and len(value) != batch.size:
            raise InvalidOption(
                f"the metric {self.metric.name} must give one number, or one for each of the {batch.size} samples of "
                f"a batch, got shape {tuple(value.shape)}"
            )
        self._values.append(value)
        self._targets += [target.cpu()] if self.metric.finish else []
        self._sizes.append(batch.size)

    def done(self) -> tuple[float, np.ndarray]:
        """The metric over all samples, and its value for each of them (or for each batch)."""
        if self.metric.of_tokens:
            found, tokens = torch.cat(self._values).numpy().T
            return float(np.exp(found.sum() / max(tokens.sum(), 1))), found / np.maximum(tokens, 1)
        if self.metric.finish is not None:
            values = self.metric.finish(torch.cat(self._values), torch.cat(self._targets)).double().numpy()
            return float(values.mean()), values
        if all(value.ndim for value in self._values):
            values = torch.cat(self._values).flatten().numpy()
            return float(values.mean()), values
        per_batch = np.array([float(value.mean()) for value in self._values])
        return float(np.average(per_batch, weights=self._sizes)), per_batch

    @staticmethod
    def compare(original: RunningMetric, reorganized: RunningMetric) -> MetricResult:
        """Both systems' results side by side."""
        metric, (before, old), (after, new) = original.metric, original.done(), reorganized.done()
        per_sample = len(old) == sum(original._sizes)
        tokens = torch.cat(original._values)[:, 1].numpy() if metric.of_tokens else None
        values = np.stack([old, new])
        return MetricResult(metric.name, metric.greater_is_better, before, after, values, per_sample, tokens)


def _scores_and_classes(output: Any, target: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Scores with the classes on axis 1, and the class of each position."""
    scores = main_output(output).detach().cpu()
    target = target.cpu()
    if scores.shape[:-1] == target.shape:
        return _known_classes(scores.movedim(-1, 1), target, name) if scores.ndim > 1 else (scores, target)
    if scores.ndim > 1 and (scores.shape[0], *scores.shape[2:]) == target.shape:
        return _known_classes(scores, target, name)
    raise InvalidOption(
        f"{name}: expected one class per row of the output, {tuple(scores.shape[:-1])}, got labels of shape "
        f"{tuple(target.shape)}; pass a function of (output, target) for another task"
    )


def _known_classes(scores: Tensor, target: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Both as they are, if the output has a score for every label."""
    wrong = target[(target != _IGNORED) & ((target < 0) | (target >= scores.shape[1]))]
    if len(wrong):
        raise InvalidOption(
            f"{name}: expected labels from 0 to {scores.shape[1] - 1}, which the output has scores for, or {_IGNORED}, "
            f"which does not count, got {wrong[0].item():g}; pass a function of (output, target) for another task"
        )
    return scores, target


def _mean_per_sample(values: Tensor, counted: Tensor) -> Tensor:
    """(samples,) means over the positions that count; a sample where none does counts as 0."""
    values, counted = (t.reshape(len(t), -1).double() for t in (values, counted))
    return (values * counted).sum(1) / counted.sum(1).clamp(min=1)


def _accuracy(output: Any, target: Tensor) -> Tensor:
    scores, classes = _scores_and_classes(output, target, "accuracy")
    return _mean_per_sample(scores.argmax(1) == classes, classes != _IGNORED)


def _loss(output: Any, target: Tensor) -> Tensor:
    """The model's own loss if it returns one; cross-entropy for classes; the mean square for numbers."""
    own = tensors(output).get("output.loss")
    if own is not None and own.ndim == 0:
        return own
    if not target.is_floating_point():
        scores, classes = _scores_and_classes(output, target, "loss")
        entropy = F.cross_entropy(scores.double(), classes.long(), reduction="none", ignore_index=_IGNORED)
        return _mean_per_sample(entropy, classes != _IGNORED)
    found = main_output(output).detach().cpu()
    if found.shape != target.shape:
        raise InvalidOption(f"loss: expected a target of shape {tuple(found.shape)}, got {tuple(target.shape)}")
    squares = (found.double() - target.cpu().double()).square()
    return _mean_per_sample(squares, torch.ones_like(squares))


def read_tokens(batch: Batch) -> Tensor | None:
    """(samples, tokens) of what a language model reads, padding marked as positions that do not count; None if none.

    >>> read_tokens(Batch(0, 1, named={"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.tensor([[1, 0]])}))
    tensor([[   5, -100]])
    """
    ids = batch.named.get("input_ids", batch.positional[0] if batch.positional else None)
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.ndim != 2:
        return None
    mask = batch.named.get("attention_mask")
    return ids.masked_fill(mask == 0, _IGNORED) if isinstance(mask, Tensor) and mask.shape == ids.shape else ids


def check_causal(model: nn.Module, batch: Batch) -> None:
    """Refuse a model whose outputs at a token depend on later ones: what it says of those is no prediction."""
    tokens = read_tokens(batch)
    if tokens is None and batch.target is None:
        raise InvalidOption(f"{_NO_TOKENS}; the {type(model).__name__} reads no tokens")
    if tokens is None or tokens.shape[1] < 2:
        return
    if (logits := main_output(batch.without_target().run(model))).ndim != 3:
        raise InvalidOption(f"{_NO_TOKENS}; the {type(model).__name__} returns {list(logits.shape)}")
    last = int((tokens[0] != _IGNORED).nonzero().amax())
    other = tokens.clamp(min=0).clone()
    other[0, last] = 0 if other[0, last] else 1
    named = {"input_ids": other} if "input_ids" in batch.named else {}
    positional = batch.positional if named else (other, *batch.positional[1:])
    changed = replace(batch, positional=positional, named={**batch.named, **named}, target=None)
    before, after = (main_output(one.run(model))[0, :last] for one in (batch.without_target(), changed))
    if not equal_up_to_rounding(after, before):
        raise InvalidOption(
            f"perplexity: the {type(model).__name__} looks ahead: what it returns for a token depends on later ones; "
            "expected a causal language model"
        )


def token_losses(output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    """(samples, tokens − 1) −log p of every token given those before it, 0 where none counts, and these tokens."""
    logits = main_output(output).detach()
    if logits.ndim != 3 or logits.shape[:2] != target.shape:
        raise InvalidOption(
            f"perplexity: expected logits (samples, tokens, vocabulary) of a causal language model for tokens of shape "
            f"{tuple(target.shape)}, got an output of shape {tuple(logits.shape)}"
        )
    following = target[:, 1:].to(logits.device).long()
    if not (following != _IGNORED).any():
        raise InvalidOption("perplexity: expected samples of at least two tokens")
    if following.amax() >= logits.shape[2]:
        raise InvalidOption(f"perplexity: token {int(following.amax())} is beyond the {logits.shape[2]} of the model")
    found = torch.zeros(following.shape, dtype=torch.float64)
    step = max(1, _AT_ONCE // (len(logits) * logits.shape[2]))
    for start in range(0, following.shape[1], step):
        part = following[:, start : start + step]
        scores = logits[:, start : start + part.shape[1]].float()  # (samples, positions, vocabulary)
        lost = F.cross_entropy(scores.flatten(0, 1), part.flatten(), reduction="none", ignore_index=_IGNORED)
        found[:, start : start + part.shape[1]] = lost.view(part.shape).double().cpu()
    return found, following.cpu()


def _surprise(output: Any, target: Tensor) -> Tensor:
    """(samples, 2) Σ −log p of every token given those before it, and how many count."""
    losses, tokens = token_losses(output, target)
    return torch.stack([losses.sum(1), (tokens != _IGNORED).sum(1).double()], 1)


def _mean_of_tokens(batch: Batch, states: Tensor) -> Tensor:
    """(samples, features) of states (samples, tokens, features); any other output as it is."""
    if states.ndim != 3:
        return states
    mask = batch.named.get("attention_mask", torch.ones(states.shape[:2]))
    if mask.shape != states.shape[:2]:
        raise InvalidOption(
            f"retrieval: expected an attention_mask of shape {tuple(states.shape[:2])} for states of tokens of shape "
            f"{tuple(states.shape)}, got {tuple(mask.shape)}; wrap the model so that it pools its output"
        )
    weights = mask.to(states.device, torch.float32)[:, :, None]
    return (states.float() * weights).sum(1) / weights.sum(1).clamp(min=1)


def _vectors(vectors: Tensor, target: Tensor) -> Tensor:
    if vectors.ndim != 2 or target.ndim != 1:
        raise InvalidOption(
            f"retrieval: expected one vector and one label per sample, got {tuple(vectors.shape)} and "
            f"{tuple(target.shape)}; wrap the model so that it pools its output"
        )
    return vectors


def _nearest_has_same_label(vectors: Tensor, labels: Tensor) -> Tensor:
    """(samples,) whether the sample with the closest vector, by cosine, has the same label. O(samples²), by rows."""
    if len(vectors) < 2:
        raise InvalidOption("retrieval: expected at least two samples, got one")
    unit = F.normalize(vectors, dim=1)
    hits = []
    for start in range(0, len(unit), 1024):
        likeness = unit[start : start + 1024] @ unit.T  # (rows, samples)
        rows = torch.arange(len(likeness))
        likeness[rows, rows + start] = -2.0  # not itself
        hits.append(labels[likeness.argmax(1)] == labels[start : start + len(likeness)])
    return torch.cat(hits)


METRICS = {
    "accuracy": Metric("accuracy", _accuracy),
    "loss": Metric("loss", _loss, greater_is_better=False),
    "retrieval": Metric("retrieval", _vectors, finish=_nearest_has_same_label, of_vectors=True),
    "perplexity": Metric("perplexity", _surprise, greater_is_better=False, of_tokens=True),
}
