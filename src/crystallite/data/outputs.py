"""What models return, as named tensors: alone, in tuples, dicts, dataclasses, or nested."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from crystallite.core.errors import InvalidOption

__all__ = ["ROUNDING", "class_axis", "equal_up_to_rounding", "judged", "main_output", "same_structure", "tensors"]

# what two orders of the same sums may differ by at the end of a deep network, relative to the size of its output
ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 2e-2}


def tensors(output: Any) -> dict[str, Tensor]:
    """Every tensor in what a model returned, by where it stands. Other values, such as caches, are left out.

    >>> [(path, t.tolist()) for path, t in tensors({"logits": torch.ones(1), "states": (torch.zeros(1), None)}).items()]
    [('output.logits', [1.0]), ('output.states[0]', [0.0])]
    """
    found = dict(_walk(output, "output"))
    if not found:
        raise InvalidOption(f"output: expected a tensor, or a tuple, dict or dataclass of them, got {type(output)}")
    return found


def _walk(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):  # the outputs of transformers are such
        for key, item in value.items():
            yield from _walk(item, f"{path}.{key}")
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from _walk(item, f"{path}[{i}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from _walk(getattr(value, part.name), f"{path}.{part.name}")


def class_axis(scores: Tensor) -> int:
    """Where classes stand that one is chosen from: last; of maps (samples, classes, height, width) second.

    >>> class_axis(torch.zeros(2, 7, 10)), class_axis(torch.zeros(2, 10, 8, 8))
    (-1, 1)
    """
    return 1 if scores.ndim > 3 else -1


def judged(output: Any) -> dict[str, Tensor]:
    """What a model returned in numbers whose differences count alike, with gradients: floating-point tensors.

    What is called logits is judged by the probabilities that a softmax makes of it, as 2√p: a small step there is as
    long as it changes what is decided (Fisher's metric), however unlikely tokens move meanwhile.

    >>> logits = torch.tensor([[9.0, 0.0, -50.0], [9.0, 0.0, -40.0]])
    >>> found = judged({"logits": logits, "values": logits, "count": torch.tensor(1)})
    >>> [(path, bool((t[0] - t[1]).abs().max() > 1e-6)) for path, t in found.items()]
    [('output.logits', False), ('output.values', True)]
    >>> (maps,) = judged({"logits": torch.zeros(1, 4, 2, 3)}).values()
    >>> float(maps[0, 0, 0, 0])  # √¼ twice: four classes at each place
    1.0
    """
    found = {path: value for path, value in tensors(output).items() if value.is_floating_point()}
    return {path: _decided(value) if _is_logits(path, value) else value for path, value in found.items()}


def _is_logits(path: str, value: Tensor) -> bool:
    return path.endswith(".logits") and value.ndim > 1 and value.shape[class_axis(value)] > 1  # one is no choice


def _decided(logits: Tensor) -> Tensor:
    single = torch.promote_types(logits.dtype, torch.float32)
    return 2 * (logits.to(single).log_softmax(class_axis(logits)) / 2).exp()


def same_structure(original: dict[str, Tensor], reorganized: dict[str, Tensor]) -> dict[str, Tensor]:
    """The original's outputs, after checking that the reorganized model's have the same places and shapes."""
    for path in [*original, *reorganized]:
        shapes = [tuple(side[path].shape) if path in side else "nothing" for side in (original, reorganized)]
        if shapes[0] != shapes[1]:
            raise InvalidOption(
                f"{path}: the original returns {shapes[0]} here, the reorganized model {shapes[1]}; "
                "expected the same outputs from both"
            )
    return original


def main_output(output: Any) -> Tensor:
    """The tensor that a task is about: the logits if something is called so, else the first that is no single number.

    >>> main_output((torch.tensor(0.5), torch.ones(2, 3))).shape
    torch.Size([2, 3])
    """
    found = tensors(output)
    return found.get("output.logits", next((t for t in found.values() if t.ndim), next(iter(found.values()))))


def equal_up_to_rounding(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors differ by no more than a different order of sums explains. NaN equals NaN."""
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    a, b = (t.double().nan_to_num(0.0, 0.0, 0.0) for t in (found, expected))
    same_gaps = torch.equal(found.isfinite(), expected.isfinite())
    return same_gaps and bool((a - b).norm() <= ROUNDING.get(expected.dtype, 1e-1) * b.norm())
