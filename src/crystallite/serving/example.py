"""`Example`: inputs of any size that a model should take, by a recorded call, a config, its first layer or a shape."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.core.errors import InvalidOption
from crystallite.models.recorded_call import RecordedCall
from crystallite.serving.signature import DATATYPES, INPUT, Axis, TensorSpec

__all__ = ["HEIGHT", "WIDTH", "Example", "examples"]

LENGTH, DECODER_LENGTH, HEIGHT, WIDTH = "length", "decoder_length", "height", "width"
_TOKENS = {
    "input_ids": LENGTH, "attention_mask": LENGTH, "token_type_ids": LENGTH, "decoder_input_ids": DECODER_LENGTH,
    "decoder_attention_mask": DECODER_LENGTH,
}  # fmt: skip
_MAXIMA = ("max_position_embeddings", "n_positions", "n_ctx")
_TRIED = 8  # size of a free axis that nothing else is known about
_SOUND, _PICTURE = 3200, 64  # numbers of a recording, and of a side of a picture


@dataclass(frozen=True)
class Example:
    """Inputs of a model, of which some can be left out, and sizes of its free axes to try it with."""

    inputs: tuple[TensorSpec, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)
    positional: tuple[str, ...] = ()
    longest: Mapping[str, int] = field(default_factory=dict)
    padding: Mapping[str, int] = field(default_factory=dict)

    def made(self, samples: int, sizes: Mapping[str, int] | None = None, seed: int = 0) -> dict[str, Tensor]:
        """Random inputs, without those that are optional.

        >>> spec = TensorSpec("input_ids", torch.int64, ("length",), below=10)
        >>> Example((spec,), {"length": 8}).made(2, {"length": 3})["input_ids"].shape
        torch.Size([2, 3])
        """
        known, rng = {**self.sizes, **(sizes or {})}, torch.Generator().manual_seed(seed)
        found = {}
        for spec in self.inputs:
            if spec.optional:
                continue
            shape = (samples, *(known[axis] if isinstance(axis, str) else axis for axis in spec.shape))
            if spec.dtype is not None and spec.dtype.is_floating_point:
                found[spec.name] = torch.randn(shape, generator=rng).to(spec.dtype)
            elif spec.name.endswith("mask"):
                found[spec.name] = torch.ones(shape, dtype=spec.dtype)
            else:
                numbers = torch.randint(spec.below or 2, shape, generator=rng)
                if spec.name in self.padding:  # which may mean something else than other numbers
                    numbers[numbers == self.padding[spec.name]] += 1
                found[spec.name] = (numbers % (spec.below or 2)).to(spec.dtype)
        return found

    @property
    def masks(self) -> tuple[str, ...]:
        """Optional inputs that say what is no padding."""
        return tuple(spec.name for spec in self.inputs if spec.optional and spec.name.endswith("attention_mask"))

    def fixed(self, axis: str) -> Example:
        """The same where an axis is not free."""
        size = self.sizes[axis]
        inputs = tuple(
            dataclasses.replace(spec, shape=tuple(size if known == axis else known for known in spec.shape))
            for spec in self.inputs
        )
        return dataclasses.replace(self, inputs=inputs, sizes={a: s for a, s in self.sizes.items() if a != axis})


def examples(model: nn.Module, shape: Sequence[int] | None, call: RecordedCall | None) -> Iterator[Example]:
    """Inputs that a model should take, the likeliest first: as `shape` says, as recorded, as its config or layers say.

    shape: of a sample of its only input, -1 for free axes.
    """
    config: Any = getattr(model, "config", None)
    is_transformers = config is not None and hasattr(model, "main_input_name")
    if shape is not None and not is_transformers:
        yield _of_one(model, tuple(shape))
        return
    if call is not None:
        yield _recorded(model, call, config if is_transformers else None)
    if is_transformers:
        yield from _of_config(model, config)
    elif call is None:
        yield _of_one(model, None)


def _of_one(model: nn.Module, shape: tuple[int, ...] | None) -> Example:
    """One tensor, of a shape that the first layer has if nobody says it."""
    first = next((m for m in model.modules() if any(True for _ in m.parameters(recurse=False))), model)
    inside = next((m for m in model.modules() if isinstance(getattr(m, "in_features", None), int)), None)
    vocabulary = first.num_embeddings if isinstance(first, nn.Embedding) else None
    if shape is None:
        if inside is None or not (inside is first or any(m is first for m in inside.modules())):
            raise InvalidOption(f"cannot tell a sample's shape from a {type(first).__name__}: say it, shape=(…)")
        shape = (int(inside.in_features),)  # type: ignore[arg-type]
    dtype = _dtype(model) if vocabulary is None else torch.int64
    axes = tuple(f"axis_{i}" if size == -1 else size for i, size in enumerate(shape, 1))
    sizes = {axis: _TRIED for axis in axes if isinstance(axis, str)}
    return Example((TensorSpec(INPUT, dtype, axes, below=vocabulary),), sizes, (INPUT,))


def _dtype(model: nn.Module) -> torch.dtype:
    dtype = next(parameter.dtype for parameter in model.parameters())
    if dtype not in DATATYPES or not dtype.is_floating_point:
        raise InvalidOption(f"expected a model of FP64, FP32, FP16 or BF16, got {dtype}")
    return dtype


def _recorded(model: nn.Module, call: RecordedCall, config: Any) -> Example:
    """What was recorded; of a transformers model, texts of any length, and masks can be left out."""
    sizes: dict[str, int] = {}
    inputs = []
    for given in call.inputs:
        dtype = getattr(torch, given.dtype, None)
        if dtype not in DATATYPES:
            raise InvalidOption(
                f"{given.name}: expected an input of {', '.join(DATATYPES.values())}, got {given.dtype}"
            )
        axes: tuple[Axis, ...] = tuple(name or size for name, size in zip(given.axes, given.shape, strict=True))
        if config is not None and given.name in _TOKENS and len(axes) == 1:
            axes = (_TOKENS[given.name],)
        sizes |= {axis: size for axis, size in zip(axes, given.shape, strict=True) if isinstance(axis, str)}
        is_mask = given.name.endswith("attention_mask")
        optional = config is not None and (is_mask or given.name == "token_type_ids")
        inputs.append(
            TensorSpec(given.name, dtype, axes, optional, 2 if is_mask and not dtype.is_floating_point else None)
        )
    positional = tuple(given.name for given in call.inputs if given.positional)
    if config is None:
        return Example(tuple(inputs), sizes, positional)
    return _with_text(model, config, tuple(inputs), sizes, positional)


def _of_config(model: Any, config: Any) -> Iterator[Example]:
    """What a model of transformers takes, by the arguments of `forward` and the numbers in its config."""
    known = inspect.signature(model.forward).parameters
    main = model.main_input_name
    also = [name for name in ("input_ids", "pixel_values") if name in known and name != main]
    dtype = _dtype(model)
    for names in ((main,), (main, *also)):
        inputs, sizes = [], dict[str, int]()
        for name in names:
            spec = _spec(name, config, dtype)
            if spec is None:
                return
            inputs.append(spec[0])
            sizes |= spec[1]
        if config.is_encoder_decoder and main != "decoder_input_ids" and "decoder_input_ids" in known:
            inputs.append(TensorSpec("decoder_input_ids", torch.int64, (DECODER_LENGTH,)))
            sizes[DECODER_LENGTH] = _TRIED
        yield _with_text(model, config, tuple(inputs), sizes, ())


def _spec(name: str, config: Any, dtype: torch.dtype) -> tuple[TensorSpec, dict[str, int]] | None:
    """A main input by its name, and sizes to try its free axes with."""
    if name in _TOKENS:
        return TensorSpec(name, torch.int64, (LENGTH,)), {LENGTH: _TRIED}
    if name == "pixel_values":
        part = getattr(config, "vision_config", config)
        size, channels = getattr(part, "image_size", None) or _PICTURE, getattr(part, "num_channels", 3)
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        return TensorSpec(name, dtype, (channels, HEIGHT, WIDTH)), {HEIGHT: height, WIDTH: width}
    if name == "input_values" and hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
        return TensorSpec(name, dtype, (config.max_length, config.num_mel_bins)), {}
    if name == "input_values":
        return TensorSpec(name, dtype, (LENGTH,)), {LENGTH: _SOUND}
    if name == "input_features" and hasattr(config, "max_source_positions"):
        return TensorSpec(name, dtype, (config.num_mel_bins, 2 * config.max_source_positions)), {}
    return None


def _with_text(
    model: Any, config: Any, inputs: tuple[TensorSpec, ...], sizes: dict[str, int], positional: tuple[str, ...]
) -> Example:
    """The inputs with bounds of token numbers, and with the masks and kinds that can come beside them."""
    known, text = inspect.signature(model.forward).parameters, config.get_text_config()
    try:
        table = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        table = None
    vocabulary = getattr(table, "num_embeddings", None) or getattr(text, "vocab_size", None)
    padding = getattr(text, "pad_token_id", None)
    bounds = {"input_ids": vocabulary, "decoder_input_ids": vocabulary}
    inputs = tuple(
        dataclasses.replace(spec, below=bounds[spec.name]) if spec.name in bounds else spec for spec in inputs
    )
    named = {spec.name for spec in inputs}
    others = [("attention_mask", LENGTH, 2), ("decoder_attention_mask", DECODER_LENGTH, 2)]
    others += [("token_type_ids", LENGTH, getattr(text, "type_vocab_size", 0) or 0)]
    for name, axis, below in others:
        if name in known and name not in named and axis in sizes and below:
            inputs = (*inputs, TensorSpec(name, torch.int64, (axis,), optional=True, below=below))
    most = min((n for n in (getattr(text, name, None) for name in _MAXIMA) if isinstance(n, int) and n > 0), default=0)
    longest = dict.fromkeys({LENGTH, DECODER_LENGTH} & sizes.keys(), most) if most and "input_ids" in named else {}
    filled = padding if isinstance(padding, int) and 0 <= padding < (vocabulary or 0) else 0
    return Example(inputs, sizes, positional, longest, dict.fromkeys(bounds, filled))
