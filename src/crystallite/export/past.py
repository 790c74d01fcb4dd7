"""A decoder as one step of generation: past keys and values go in, present ones come out."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.core.errors import InvalidOption
from crystallite.data.batch import Batch
from crystallite.export.tracing import named_inputs

__all__ = ["take_past_"]

_STEP = ("input_ids", "attention_mask", "position_ids")  # what a step is told besides the past
_TRACED = 7  # tokens, at least, of the step that is traced: 3 after 4, as sizes below 2 would be taken for constants


def take_past_(model: nn.Module, batches: list[Batch]) -> list[Batch]:
    """Turn a decoder of transformers into a step of generation, and batches of texts into batches of steps.

    The model then takes `input_ids` (batch, new), `attention_mask` (batch, past + new), `position_ids` (batch, new)
    where the decoder has such an argument, and `past_key_values.N.key` and `.value` (batch, heads, past, size of a
    head). It returns the logits and `present.N.key` and `.value`, past + new long. These are the names that Hugging
    Face Optimum and ONNX Runtime's own generation use.

    Returns:
        A step in the middle of the first texts, which is fit to be traced; and of every batch the first step, one in
        the middle, and the last.
    """
    run, name = model.forward, type(model).__name__
    texts = [_texts(model, batch) for batch in batches]
    kind, layers = _cache(name, Batch(0, batches[0].size, named={**texts[0], "use_cache": True}).run(model))

    def forward(**named: Tensor) -> dict[str, Tensor]:
        cache = kind()  # without the configuration, layers that see a window keep all: the mask cuts the window out
        for layer in range(layers):
            cache.update(named[f"past_key_values.{layer}.key"], named[f"past_key_values.{layer}.value"], layer)
        given = {name: named[name] for name in _STEP if name in named}
        output = run(**given, past_key_values=cache, use_cache=True)
        return {"logits": output.logits, **_held("present", output.past_key_values)}

    def step(whole: dict[str, Tensor], past: int) -> Batch:
        before = {name: value[:, : max(past, 1)] for name, value in whole.items()}
        held = _held("past_key_values", run(**before, past_key_values=kind(), use_cache=True).past_key_values)
        held = {name: value[:, :, :past].clone() for name, value in held.items()}
        now = {name: value if name == "attention_mask" else value[:, past:] for name, value in whole.items()}
        return Batch(0, len(whole["input_ids"]), named={**now, **held})

    with torch.no_grad():
        first = {name: _enlarged(value) for name, value in texts[0].items()}
        made = [step(first, first["input_ids"].shape[1] // 2 + 1)]
        for whole in texts:
            length = whole["input_ids"].shape[1]
            made += [step(whole, past) for past in sorted({0, length // 2, length - 1})]
    model.forward = forward
    return made


def _texts(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Tokens, which of them are no padding, and their positions, as `generate` counts them."""
    given = named_inputs(model, batch)
    others = [name for name in given if name not in _STEP]
    if "input_ids" not in given or others:
        raise InvalidOption(
            f"past=True takes decoders and batches of input_ids and attention_mask, got {', '.join(given)} for a "
            f"{type(model).__name__}; leave it out to export the whole model without a cache"
        )
    mask = given.setdefault("attention_mask", torch.ones_like(given["input_ids"]))
    if "position_ids" in inspect.signature(model.forward).parameters:
        given.setdefault("position_ids", (mask.long().cumsum(-1) - 1).clamp(min=0))
    return {name: given[name] for name in _STEP if name in given}


def _enlarged(value: Tensor) -> Tensor:
    """The same with two samples and as many tokens as a step needs that is traced, repeated where there are fewer."""
    rows, length = value.shape
    return value.repeat(-(-2 // rows), -(-_TRACED // length))


def _cache(name: str, output: Any) -> tuple[Any, int]:
    """What makes an empty cache for a model, and how many layers it has; refuses one that is not of keys and values."""
    cache = getattr(output, "past_key_values", None)
    layers = getattr(cache, "layers", ())
    other = next((layer for layer in layers if not _holds_keys_and_values(layer)), None)
    if not layers or other is not None:
        states = [key for key in ("cache_params", "state", "rnn_state") if getattr(output, key, None) is not None]
        found = type(other).__name__ if other is not None else ", ".join(states) or type(cache).__name__
        raise InvalidOption(
            f"{name}: past=True needs a decoder whose state is keys and values, and this one's is not ({found}); leave "
            "past=True out to export it without its state"
        )
    return type(cache), len(layers)


def _holds_keys_and_values(layer: Any) -> bool:
    held = [getattr(layer, part, None) for part in ("keys", "values")]
    return all(isinstance(part, Tensor) and part.ndim == 4 for part in held) and not hasattr(layer, "conv_states")


def _held(prefix: str, cache: Any) -> dict[str, Tensor]:
    def parts() -> Iterator[tuple[str, Tensor]]:
        for number, layer in enumerate(cache.layers):
            yield f"{prefix}.{number}.key", layer.keys
            yield f"{prefix}.{number}.value", layer.values

    return dict(parts())
