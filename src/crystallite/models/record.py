"""`Record`: what was done to a model, kept on it as `model.reorganization`; `record(model)` returns it.

It serves summaries and artifacts, and undoes what can be undone. A record is a value: a stage that does more to a model
sets a new one (`dataclasses.replace`). Sentences about it are made when they are printed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor, nn

from crystallite.annealing.distributions import Normal, Orthogonal, TruncatedNormal, Uniform
from crystallite.annealing.fitting import Empirical
from crystallite.annealing.random_walk import DELTA0, TAU
from crystallite.core.axes import error_share
from crystallite.core.errors import CheckpointError, CrystalliteError, InvalidOption
from crystallite.data.calibration import FittedOn
from crystallite.models.recorded_call import RecordedCall
from crystallite.models.typed_json import from_plain, to_plain

__all__ = [
    "OUTSIDE_EXPERTS", "RISKS", "TOO_FEW", "CompressedOptions", "Epoch", "ExactOptions", "Familiar", "Fold",
    "Guarantee", "LayerChange", "OperatorRecord", "Polish", "Recipe", "RecipeSearch", "Record", "StorableNull", "Trial",
    "UpgradedOptions", "find_record", "record", "set_record_",
]  # fmt: skip

OUTSIDE_EXPERTS = "outside experts: "  # begins a reason that holds for all neurons but those of experts
TOO_FEW = "too few positions"  # begins the reason why an expert was not fitted
RISKS = {"deviation": "mean relative deviation", "disagreement": "share of other decisions (argmax)"}
_FEED_FORWARD = {
    "feed-forward pair": "feed-forward pair",
    "feed-forward layers": "feed-forward layers",
    "feed-forward channels": "feed-forward channel by channel",
}
StorableNull = Uniform | Normal | Empirical | TruncatedNormal | Orthogonal  # those that a few numbers describe
OperatorKind = Literal[
    "left alone", "dense", "low rank", "blocks", "chain", "feed-forward pair", "feed-forward layers",
    "feed-forward channels",
]  # fmt: skip


@dataclass(frozen=True)
class OperatorRecord:
    """What stands in the place of a layer, or of one product of a recurrent layer, in numbers; `str` says it.

    >>> str(OperatorRecord("blocks", blocks=4, inputs=(24, 64), error=0.0123))
    '24 of 64 inputs, 4 blocks, error 1.23%'
    """

    kind: OperatorKind
    blocks: int = 1  # 0: dormant. Of a dense layer: those that were found and not used
    rank: int = 0  # 0: not of low rank
    outputs: tuple[int, int] | None = None  # how many are left of how many, where that is known
    inputs: tuple[int, int] | None = None
    subnetworks: int = 1  # of the chain that the blocks are in
    sccs: int = 0  # strongly connected components of a recurrent layer
    part: str = ""  # of a recurrent layer, where each product has an operator of its own: "inputs", "states 1", …
    reason: str = ""  # why it was left alone, or is dense
    error: float | None = None  # share of the layer's variance that it gets wrong on samples it was not fitted to
    repairs: bool = False  # of what it adds to a stream and what the stream had lost before it, which it may not know
    copies: int = 0  # inputs that blocks read beside the first one that does; their weights are in the cost

    def __str__(self) -> str:
        sizes = [(side, size) for side, size in (("outputs", self.outputs), ("inputs", self.inputs)) if size]
        texts = [f"{left} of {before} {side}" for side, (left, before) in sizes if left < before]
        texts += [self._operator()] if self.kind != "dense" or not texts else []
        texts += [f"{self.copies} copied input{'s' * (self.copies > 1)}"] if self.copies else []
        share = ", losses of earlier layers included" * self.repairs
        texts += [] if self.error is None else [f"error {error_share(self.error)}{share}"]
        return f"{self.part}: " * bool(self.part) + ", ".join(texts)

    def _operator(self) -> str:
        blocks = f"{self.blocks} block{'s' * (self.blocks != 1)}"
        blocks = blocks if self.blocks else "dormant: only the bias is left"
        if self.kind == "left alone":
            return f"left alone: {self.reason}"
        if self.kind == "dense":
            return f"dense, {self.reason}"
        if self.kind == "chain":
            return f"{blocks} in a chain{f' of {self.subnetworks} subnetworks' * (self.subnetworks > 1)}"
        if self.kind in _FEED_FORWARD:
            return f"{_FEED_FORWARD[self.kind]}, {blocks}"
        names = [f"{self.sccs} SCCs in " * bool(self.sccs) + blocks] * (self.kind == "blocks")
        names += [f"rank {self.rank}"] * bool(self.rank)
        return " + ".join(names)


@dataclass(frozen=True)
class LayerChange:
    """What became of one layer, and what it costs: multiply-adds as often as its weights are used.

    In a compressed model that is for what `CompressedOptions.counted` says, elsewhere for one vector or position.
    """

    name: str
    kind: str  # the class of the layer
    operators: tuple[OperatorRecord, ...]  # one, or one for each product of a recurrent layer
    macs_before: int
    macs_after: int
    parameters_before: int  # without those that an earlier layer holds too
    parameters_after: int
    kept_share: float = 1.0
    role: str = ""  # "first", "second" or "gate" of the feed-forward module that was replaced as a whole

    @property
    def became(self) -> str:
        """What the layer is now, or why it was left as it was, with the error where one was measured."""
        return "; ".join(map(str, self.operators))

    @property
    def blocks(self) -> int:
        return max(operator.blocks for operator in self.operators)

    @property
    def error(self) -> float | None:
        """The largest error of its operators on samples they were not fitted to; None if none was measured."""
        return max((o.error for o in self.operators if o.error is not None), default=None)

    def used(self, calls: float) -> LayerChange:
        """The same for a layer whose weight is used so often: of an expert, at a share of the positions."""
        macs = {name: round(getattr(self, name) * calls) for name in ("macs_before", "macs_after")}
        return replace(self, **macs)

    def to_row(self) -> dict[str, Any]:
        """A row of a table: plain values."""
        row = {name: value for name, value in vars(self).items() if name != "operators"}
        return row | {"became": self.became, "blocks": self.blocks, "error": self.error}


@dataclass(frozen=True)
class Fold:
    """An order of hidden neurons that now lies in the stored weights: nothing moves at run time.

    Wherever a tensor of the dense model carries these neurons, `new.select(axis, i) = old.select(axis, order[i])`.
    """

    order: Tensor  # (neurons,) int64
    places: tuple[tuple[str, int], ...]  # names of parameters and buffers of the dense model, and the axis

    def __post_init__(self) -> None:
        count = len(self.order)
        if sorted(self.order.tolist()) != list(range(count)):
            raise ValueError(f"an order of {count} neurons that does not hold every index below {count} once")


@dataclass(frozen=True)
class ExactOptions:
    """How a model was reorganized exactly; see `reorganize`."""

    level: float | str | None = None  # None: zeros were taken as they are
    null: str = "auto"
    correction: str | None = None
    random_walk: str | None = "calibrated"
    rule: str = "both"
    alpha: float | None = None
    delta0: float = DELTA0
    tau: float = TAU
    channels: int | None = None
    feed_forward: str | None = None


@dataclass(frozen=True)
class Polish:
    """What training inside the structure came to; errors are those of the outputs on held-out samples."""

    steps: int  # taken
    before: float
    after: float  # of the state that was kept
    history: tuple[tuple[int, float], ...]  # step, error


@dataclass(frozen=True)
class Guarantee:
    """That a risk is at most the tolerance on data like the samples set aside, and how it was shown."""

    budget: float
    risk: str  # of RISKS: the mean of a loss between 0 and 1
    tolerance: float
    confidence: float
    samples: int  # that were set aside: neither fitted on nor used to choose sizes
    tested: tuple[tuple[float, float, float], ...]  # budget, mean loss, p-value: in the order of the tests

    def __post_init__(self) -> None:
        if self.risk not in RISKS:
            raise ValueError(f"a guarantee of the unknown risk {self.risk!r:.80}")

    @property
    def observed(self) -> float:
        """The mean loss of the model that was chosen."""
        return next((mean for budget, mean, _ in self.tested if budget == self.budget), math.nan)

    def __str__(self) -> str:
        return (
            f"guaranteed with confidence {self.confidence:g}: {RISKS[self.risk]} ≤ {self.tolerance:g} from the "
            f"dense model on data like the calibration data ({self.observed:.3g} on {self.samples} samples set aside)"
        )


@dataclass(frozen=True)
class Familiar:
    """What a layer read when the model was fitted; see `models/familiarity.py`."""

    layer: str
    mean: tuple[float, ...]  # of some sums of what it read
    covariance: tuple[float, ...]  # of the same, lower triangle row by row
    usual: float  # what a sample may score

    def __post_init__(self) -> None:
        count = len(self.mean)
        if not count or len(self.covariance) != count * (count + 1) // 2:
            raise ValueError(f"covariance: expected {count * (count + 1) // 2} numbers, got {len(self.covariance)}")
        if not all(map(math.isfinite, (*self.mean, *self.covariance, self.usual))) or self.usual <= 0:
            raise ValueError("expected finite numbers, and a positive one for what is usual")


@dataclass(frozen=True)
class CompressedOptions:
    """How a model was compressed, and what that did to its outputs; see `compress`."""

    ridge: float
    seed: int
    held_out_error: float  # of the outputs: share of their variance, on samples not fitted on
    budget: float | None = None
    blocks: int | None = None
    joint: bool = False
    objective: Literal["macs", "parameters", "latency", "int8"] = "macs"
    form: Literal["any", "dense", "uniform"] = "any"
    sensitive: dict[str, float] = field(default_factory=dict)  # kept dense → the error of half of it; worst first
    neurons_kept: str = ""  # why no hidden neurons were taken out, if so; see OUTSIDE_EXPERTS
    heads_kept: dict[str, str] = field(default_factory=dict)  # parts of attention that stay whole → why
    heads_mixed: tuple[str, ...] = ()  # layers that write sums of the numbers they wrote, inside each attention head
    polish: Polish | None = None
    guarantee: Guarantee | None = None
    inputs: tuple[Familiar, ...] = ()  # what a few layers read on the calibration data
    data: FittedOn | None = None  # how much of it there was
    counted: str = ""  # what multiply-adds of layers are of: "for one sample (input_ids [104])"


@dataclass(frozen=True)
class Epoch:
    """What one epoch of an upgrade came to."""

    epoch: int
    loss: float  # mean over its batches, without what blocks alone lose
    metric: float | None
    threshold: float  # at its end, as a share of the final one
    acting: float  # share of the weights inside blocks that reach it


@dataclass(frozen=True)
class Recipe:
    """What an upgrade is trained with."""

    partition: str  # "regions", "spread", "random", "modules", or "given"
    learning_rate: float  # the highest
    smoothing: float = 0.0  # share of each label that is spread over all classes
    block_loss: float = 0.0  # weight of what blocks alone would lose

    def __str__(self) -> str:
        return (
            f"{self.partition}, rate {self.learning_rate:g}, smoothing {self.smoothing:g}, "
            f"block loss {self.block_loss:g}"
        )


@dataclass(frozen=True)
class Trial:
    """A short training of an upgrade, and what it came to on samples it was not trained on: smaller is better."""

    recipe: Recipe
    score: float | None  # None: not a number


@dataclass(frozen=True)
class RecipeSearch:
    """How the recipe of an upgrade was chosen."""

    trials: tuple[Trial, ...] = ()
    epochs: int = 0  # of each
    trained_on: int = 0  # samples
    held_out: int = 0  # samples that judged
    cost: float = 0.0  # training steps of all trials, as a share of those of the upgrade itself
    note: str = ""  # why nothing was tried, if so
    partition: RecipeSearch | None = None  # of a network with new weights, which chose the partition first

    def __str__(self) -> str:
        first = "" if self.partition is None else f"; partition {self.partition}, by a network with new weights"
        if self.note:
            return f"not searched: {self.note}{first}"
        return (
            f"chosen from {len(self.trials)} trials by {self.held_out} held-out samples, at {self.cost:.1f} × the cost "
            f"of training{first}"
        )


@dataclass(frozen=True)
class UpgradedOptions:
    """How a model was upgraded; see `upgrade`."""

    blocks: int  # of every chain, found by `decompose` in the annealed weights
    chains: tuple[tuple[str, ...], ...]  # layers that separate together
    labels: tuple[dict[str, tuple[int, ...]], ...]  # by chain and group of neurons: the block of each
    nulls: dict[str, StorableNull]  # by parameter: `anneal(w, null, level, rule="neyman")` keeps all nonzeros; without
    # nulls that hold the initial weights themselves, which whoever passed them has
    level: float
    thresholds: dict[str, float]  # by layer: what the null asks for at the level
    recipe: Recipe
    search: RecipeSearch  # that chose it
    history: tuple[Epoch, ...]
    balanced: tuple[str, ...]  # layers whose inputs were brought into balanced units first
    strays: int  # weights of fragments beside the blocks that were set to zero at the end
    copies: tuple[dict[str, tuple[tuple[int, ...], ...]], ...] = ()  # by chain and group of inputs: for each block, the
    # inputs of other blocks that it reads too
    start: float | None = None  # the metric before the first step: what least squares alone gives

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(name for chain in self.chains for name in chain)

    def __post_init__(self) -> None:
        if not self.history:
            raise ValueError("an upgrade of no epochs")

    def __str__(self) -> str:
        first, last, chains = self.history[0], self.history[-1], len(self.chains)
        metric = "" if last.metric is None else f", metric {last.metric:.4g}"
        return (
            f"upgraded to {self.blocks} blocks in {chains} chain{'s' * (chains > 1)}, "
            f"{len(self.history)} epochs: loss {first.loss:.4g} → {last.loss:.4g}{metric}, "
            f"{last.acting:.0%} of the weights inside blocks act\n{self.recipe}; {self.search}"
        )


Options = ExactOptions | CompressedOptions | UpgradedOptions
Method = Literal["exact", "compressed", "upgraded"]
_METHODS: dict[type, Method] = {ExactOptions: "exact", CompressedOptions: "compressed", UpgradedOptions: "upgraded"}


@dataclass(frozen=True)
class Record:
    """One row per layer that was considered, the orders folded into weights, and the options that led here."""

    options: Options
    changes: tuple[LayerChange, ...] = ()
    folds: tuple[Fold, ...] = ()
    not_folded: str = ""  # why no orders were folded, where they could have been
    prepared: tuple[str, ...] = ()  # what was taken off the model before: wrappers, weights computed from others
    call: RecordedCall | None = None  # what the model was called with, where that is known

    @property
    def method(self) -> Method:
        """How the model was made; of a compressed one nothing says what its layers were.

        >>> Record(ExactOptions(level=0.01)).method
        'exact'
        """
        return _METHODS[type(self.options)]

    def to_plain(self) -> dict[str, Any]:
        """The record as JSON values.

        >>> import torch
        >>> Record(ExactOptions(), folds=(Fold(torch.tensor([1, 0]), (("a.weight", 0),)),)).to_plain()["folds"]
        [{'order': '1 0', 'places': [['a.weight', 0]]}]
        """
        return dict(to_plain(Record, self))

    @classmethod
    def from_plain(cls, plain: Any, source: object) -> Record:
        """What `to_plain` gave, which may be hostile; `source` is where it stood, for the error."""
        try:
            found: Record = from_plain(cls, plain, "record")
        except (CrystalliteError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{source}: expected the record of a reorganization, got {error!s:.200}") from None
        return found


def record(model: nn.Module) -> Record:
    """What `reorganize`, `compress` or `upgrade` did to a model.

    Args:
        model: what one of them returned, or what `load` opened.

    Returns:
        The `Record`: one `LayerChange` for each layer, and the options of the method.

    Raises:
        InvalidOption: a model that none of them made.

    Examples:
        >>> record(nn.Linear(2, 2))
        Traceback (most recent call last):
        crystallite.core.errors.InvalidOption: this model was not made by reorganize, compress or upgrade; pass their
        result
    """
    found = find_record(model)
    if found is None:
        raise InvalidOption("this model was not made by reorganize, compress or upgrade; pass their result")
    return found


def find_record(model: nn.Module) -> Record | None:
    """The same, or None where nothing was done."""
    found = getattr(model, "reorganization", None)
    return found if isinstance(found, Record) else None


def set_record_(model: nn.Module, new: Record) -> None:
    """Put a record on a model, in the place of the one it has."""
    model.reorganization = new  # type: ignore[assignment]
