"""`Entry`: one tiny model of the zoo, what it is called with, and facts about its architecture."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["HIDDEN", "VOCABULARY", "Batches", "Entry", "Pairs", "images", "numbers", "plant_", "sounds", "texts"]

HIDDEN, VOCABULARY = 64, 128
SAMPLES, BATCH = 256, 32  # of calibration data
LENGTHS = (8, 24)  # of texts, from and to
DECAY = 2.0  # of planted singular values: σ_i ∝ exp(−DECAY·i/n); a quarter of them holds 64 % of the energy
_KIND = {"decoder", "encoder", "seq2seq", "vision", "audio", "plain"}

Batches = Callable[[int, int], list[Any]]  # seed, samples → batches as `cx.compress` takes them


@dataclass(frozen=True)
class Pairs:
    """Layers that belong together in every block of an architecture: who writes numbers that only the reader reads.

    Both are regular expressions for the end of a name of a module, or of a stacked parameter. Of queries and keys the
    reader is the key. `reason`: why they cannot be a unit. `stack`: the parameter that holds all experts' readers.
    """

    writer: str
    reader: str
    reason: str = ""
    stack: str = ""

    def expected(self, model: nn.Module) -> int:
        """How many there are: one for every reader."""
        if self.stack:
            return sum(len(stack) for name, stack in model.named_parameters() if _is(name, self.stack))
        names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
        return sum(_is(name, self.reader) for name in names)

    def is_in(self, layers: tuple[str, ...]) -> bool:
        """Whether some layers hold such a pair."""
        return any(_is(name, self.writer) for name in layers) and any(_is(name, self.reader) for name in layers)


def _is(name: str, end: str) -> bool:
    """`end` is the last part of a name; numbers of experts and heads in brackets do not count."""
    return re.fullmatch(rf"(.*\.)?({end})", re.sub(r"\[[^]]*\]", "", name)) is not None


@dataclass(frozen=True)
class Entry:
    """A model of the zoo."""

    name: str
    family: str
    kind: str  # decoder, encoder, seq2seq, vision, audio, plain
    build: Callable[[], nn.Module]
    batches: Batches
    feed_forward: tuple[Pairs, ...] = ()
    value_output: tuple[Pairs, ...] = ()
    query_key: tuple[Pairs, ...] = ()
    samples: int = SAMPLES  # of calibration data
    generates: bool = False
    own_code: bool = False  # loaded `into=` an instance of the original
    not_applicable: Mapping[str, str] = field(default_factory=dict)  # verb → why it says nothing about this model
    model_class: str = ""  # of transformers
    note: str = ""  # what is special about it
    needs: str = ""  # a package that not everybody has

    def __post_init__(self) -> None:
        assert self.kind in _KIND, self.kind

    @property
    def is_available(self) -> bool:
        """Whether the package that it needs is installed."""
        return not self.needs or find_spec(self.needs) is not None

    @property
    def title(self) -> str:
        """What users know it by."""
        note = f" ({self.note})" if self.note else ""
        return f"`{self.model_class}`{note}" if self.model_class else f"{self.name.replace('_', ' ')}{note}"

    def model(self) -> nn.Module:
        """The model, the same every time."""
        torch.manual_seed(0)
        return self.build().eval()


def texts(padded: bool = True, **more: Callable[[int, int], Tensor]) -> Batches:
    """Batches of token numbers from three sources of different statistics, of mixed lengths, padded on the right.

    more: other arguments of the model, made from (seed, samples).
    """

    def made(seed: int, samples: int) -> list[dict[str, Tensor]]:
        rng = torch.Generator().manual_seed(seed)
        longest = LENGTHS[1]
        zipf = 1 / torch.arange(1, VOCABULARY - 3).float()
        common = torch.multinomial(zipf, samples * longest, True, generator=rng).view(samples, longest) + 4
        even = torch.randint(4, VOCABULARY, (samples, longest), generator=rng)
        step = torch.randint(1, 7, (samples, 1), generator=rng)  # each token follows from the one before
        chained = (even[:, :1] + step * torch.arange(longest)) % (VOCABULARY - 4) + 4
        source = torch.arange(samples)[:, None] % 3
        ids = torch.where(source == 0, common, torch.where(source == 1, even, chained))
        length = torch.randint(LENGTHS[0], longest + 1, (samples, 1), generator=rng)
        mask = (torch.arange(longest) < length).long()
        whole = {"input_ids": ids * mask + (1 - mask), "attention_mask": mask} if padded else {"input_ids": ids}
        whole |= {name: make(seed + 1, samples) for name, make in more.items()}
        return _cut(whole)

    return made


def token_ids(length: int) -> Callable[[int, int], Tensor]:
    """Token numbers of one length, for decoders beside an encoder."""

    def made(seed: int, samples: int) -> Tensor:
        return torch.randint(4, VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(seed))

    return made


def images(name: str = "pixel_values", channels: int = 3, size: int = 32) -> Batches:
    """Smooth patches and edges plus noise, so that neighbouring pixels are related."""

    def made(seed: int, count: int) -> list[Any]:
        rng = torch.Generator().manual_seed(seed)
        coarse = torch.randn(count, channels, 5, 5, generator=rng)
        smooth = nn.functional.interpolate(coarse, (size, size), mode="bilinear")
        edges = nn.functional.interpolate(coarse[..., :4, :4], (size, size), mode="nearest")
        kind = (torch.arange(count) % 2).view(-1, 1, 1, 1)
        noise = 0.2 * torch.randn(count, channels, size, size, generator=rng)
        return _cut({name: torch.where(kind == 0, smooth, edges) + noise})

    return made


def sounds(length: int = 800) -> Batches:
    """Sums of sine waves and noise."""

    def made(seed: int, count: int) -> list[dict[str, Tensor]]:
        rng = torch.Generator().manual_seed(seed)
        pitch = torch.rand(count, 3, 1, generator=rng) * 0.5
        phase = torch.rand(count, 3, 1, generator=rng) * 6.28
        waves = (pitch * torch.arange(length) + phase).sin().mean(1)
        return _cut({"input_values": waves + 0.1 * torch.randn(count, length, generator=rng)})

    return made


def numbers(*shape: int, parts: int = 1) -> Batches:
    """Correlated normal numbers of one shape, for plain models; parts: as so many positional arguments."""

    def made(seed: int, count: int) -> list[Any]:
        mix = torch.randn(shape[-1], shape[-1], generator=torch.Generator().manual_seed(99)) / shape[-1] ** 0.5
        rng = torch.Generator().manual_seed(seed)
        found = [torch.randn(count, *shape, generator=rng) @ (mix + 0.5 * torch.eye(shape[-1])) for _ in range(parts)]
        cut = [part.split(BATCH) for part in found]
        return list(cut[0]) if parts == 1 else [(pair,) for pair in zip(*cut, strict=True)]

    return made


def _cut(whole: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    count = len(next(iter(whole.values())))
    return [{name: value[start : start + BATCH] for name, value in whole.items()} for start in range(0, count, BATCH)]


@torch.no_grad()
def plant_(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give a random model weights that depend on each other as trained ones do, all architectures alike.

    Every matrix (linear layers, kernels of convolutions, stacked experts, gates of recurrent layers) becomes
    U·diag(σ)·Vᵀ with random U, V and σ_i ∝ exp(−DECAY·i/n), its rows scaled by log-normal numbers so that some neurons
    matter more, and its norm such that white inputs of variance 1 give outputs of variance 1; of convolutions 2,
    against what ReLUs take away. Embeddings are drawn from N(0, 1), positions from N(0, 1/4); biases that are 0 from
    N(0, 1/100); scales of residual branches become 1/2.
    Whatever else a model has (norms, decays of state-space models) stays as it was initialised.
    """
    rng = torch.Generator().manual_seed(seed)
    owners = {
        f"{name}.{own}".lstrip("."): module for name, module in model.named_modules() for own in module._parameters
    }
    done = set[int]()
    for name, parameter in model.named_parameters():
        owner, last = owners[name], name.rpartition(".")[2]
        if id(parameter) in done or not parameter.is_floating_point():
            continue
        done.add(id(parameter))
        if "Sinusoidal" in type(owner).__name__:
            continue  # computed, so some models do not store them
        if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
            scale = 0.5 if "pos" in name else 1.0
            parameter.copy_(scale * torch.randn(parameter.shape, generator=rng))
        elif re.search(r"lambda|gamma|layer_scale|ls\d", name) and parameter.ndim == 1:
            parameter.copy_(0.5 + 0.05 * torch.randn(parameter.shape, generator=rng))
        elif _is_depthwise(owner) and parameter.ndim > 2:
            parameter.copy_(torch.randn(parameter.shape, generator=rng) * (2 / parameter[0].numel()) ** 0.5)
        elif parameter.ndim >= 2 and _is_matrix(parameter, owner, last):
            parameter.copy_(_decaying(parameter, owner, rng))
        elif last.startswith("bias") and not parameter.any():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=rng))
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.copy_(0.1 * torch.randn(module.running_mean.shape, generator=rng))
            module.running_var.copy_(0.5 + torch.rand(module.running_var.shape, generator=rng))
    return model


def _is_depthwise(owner: nn.Module) -> bool:
    """One kernel for each channel."""
    return isinstance(owner, nn.modules.conv._ConvNd) and owner.groups == owner.in_channels > 1


def _is_matrix(parameter: Tensor, owner: nn.Module, last: str) -> bool:
    """Whether a parameter multiplies what a layer reads."""
    known = (nn.Linear, nn.modules.conv._ConvNd, nn.RNNBase, nn.MultiheadAttention, nn.Bilinear)
    stacked = parameter.ndim == 3 and "proj" in last
    return isinstance(owner, known) or type(owner).__name__ == "Conv1D" or stacked or hasattr(owner, "in_features")


def _decaying(parameter: Tensor, owner: nn.Module, rng: torch.Generator) -> Tensor:
    shape = parameter.shape
    stacks = shape[0] if parameter.ndim == 3 and not isinstance(owner, nn.modules.conv._ConvNd) else 1
    flat = parameter.detach().reshape(stacks, -1, shape[-1]) if stacks > 1 or parameter.ndim == 2 else (
        parameter.detach().reshape(1, shape[0], -1)
    )  # fmt: skip
    parts = []
    for each in flat:
        rows, columns = each.shape
        least = min(rows, columns)
        left, _ = torch.linalg.qr(torch.randn(rows, least, generator=rng))
        right, _ = torch.linalg.qr(torch.randn(columns, least, generator=rng))
        matrix = left * torch.exp(-DECAY * torch.arange(least) / least) @ right.T
        matrix *= torch.exp(0.5 * torch.randn(rows, 1, generator=rng))
        outputs = columns if type(owner).__name__ == "Conv1D" else rows
        variance = 2 if isinstance(owner, nn.modules.conv._ConvNd) else 1  # half of it is lost behind each ReLU
        parts.append(matrix * ((variance * outputs) ** 0.5 / matrix.norm()))
    return torch.stack(parts).reshape(shape)
