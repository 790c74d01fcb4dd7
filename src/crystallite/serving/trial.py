"""What a model takes and returns, found by running it: its signature, and how requests may be computed together."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from crystallite.core.errors import InvalidOption
from crystallite.data.outputs import equal_up_to_rounding
from crystallite.serving.example import HEIGHT, WIDTH, Example
from crystallite.serving.joining import Joining
from crystallite.serving.network import Network
from crystallite.serving.signature import DATATYPES, Axis, Signature, Tensors, TensorSpec

__all__ = ["tried"]

_SAMPLES = 4  # few samples and many run in different kernels
Looked = list[tuple[int, Tensor]]  # rows of a table, and the numbers that were looked up in it


def tried(network: Network, examples: Iterable[Example]) -> tuple[Signature, Joining, Example]:
    """The signature of the first example that the model takes, how requests are joined, and the example.

    The runs also compile the kernels, so that the first request does not wait for them.
    """
    failed: InvalidOption | None = None
    for example in examples:
        try:
            return _tried(network, example)
        except InvalidOption as error:
            failed = failed or error
    if failed is None:
        raise InvalidOption(
            "cannot tell what the model takes: save it with example=, one batch that it was called with"
        )
    raise failed


def _tried(network: Network, example: Example) -> tuple[Signature, Joining, Example]:
    with _lookups(network) as looked:
        one, many = (_run(network, example, samples) for samples in (1, _SAMPLES))
    bounded = _bounded(example, looked)
    if bounded != example:  # it makes other numbers
        example, one, many = bounded, *(_run(network, bounded, samples) for samples in (1, _SAMPLES))
    shorter: dict[str, Tensors] = {}
    for axis, size in list(example.sizes.items()):
        found = _with_size(network, example, axis, _less(size), many)
        if found is None:
            example = example.fixed(axis)
        else:
            shorter[axis] = found
    outputs = tuple(_output(name, one[name], many[name], example, shorter) for name in many)
    signature = Signature(example.inputs, outputs, example.longest)
    return signature, _joining(network, example, outputs), example


def _run(network: Network, example: Example, samples: int) -> Tensors:
    given = example.made(samples)
    try:
        found = network(given)
    except Exception as error:  # whatever the model's own code raises
        taken = ", ".join(f"{tuple(x.shape[1:])} as {name}" for name, x in given.items())
        raise InvalidOption(f"the model does not take samples of shape {taken}: {error!s:.300}") from None
    for name, y in found.items():
        if y.ndim < 1 or len(y) != samples or y.dtype not in DATATYPES:
            came = f"{name}: {y.dtype} of shape {list(y.shape)} for {samples} samples"
            raise InvalidOption(f"expected outputs with a row per sample, got {came}; choose others, outputs=(…)")
    return found


def _with_size(network: Network, example: Example, axis: str, size: int, before: Tensors) -> Tensors | None:
    """The answer to inputs of another size; None if the model does not take them, or is not the same afterwards."""
    if axis in (HEIGHT, WIDTH):
        network = copy.deepcopy(network)  # some keep the size of the last picture
    try:
        found = network(example.made(_SAMPLES, {axis: size}))
        again = network(example.made(_SAMPLES))
    except Exception:  # whatever the model's own code raises
        return None
    return found if all(equal_up_to_rounding(again[name], before[name]) for name in before) else None


def _less(size: int) -> int:
    return max(1, size * 5 // 8)


def _output(name: str, one: Tensor, many: Tensor, example: Example, shorter: dict[str, Tensors]) -> TensorSpec:
    """An output whose axes are named as the inputs' axes that they follow."""
    axes: list[Axis] = []
    for place in range(1, many.ndim):
        size, found = many.shape[place], None
        for axis, answers in shorter.items():
            if answers[name].shape[place] != size:
                follows = size == example.sizes[axis] and answers[name].shape[place] == _less(size)
                found = axis if follows and found is None else f"{name}_{place}"
        if found is None and one.shape[place] != size:
            found = f"{name}_{place}"
        axes.append(size if found is None else found)
    return TensorSpec(name, many.dtype, tuple(axes))


def _joining(network: Network, example: Example, outputs: tuple[TensorSpec, ...]) -> Joining:
    """Together, if samples do not change each other's answers; filled up, where that changes none either."""
    equal = Joining(example.inputs, outputs)
    if not _is_equal(network, equal, [example.made(1, seed=seed) for seed in range(3)]):
        return dataclasses.replace(equal, alone=True)
    joining = equal
    for axis, size in example.sizes.items():
        filled = dataclasses.replace(
            joining, padded=joining.padded | {axis}, padding=example.padding, masks=example.masks
        )
        parts = [example.made(1, {axis: part}, seed) for seed, part in enumerate((size, _less(size), 1 + size // 4))]
        if _is_equal(network, filled, parts):
            joining = filled
    return joining


def _is_equal(network: Network, joining: Joining, parts: Sequence[Tensors]) -> bool:
    """Whether requests computed together have the answers that they have alone."""
    try:
        together = joining.split(network(joining.joined([joining.completed(part) for part in parts])), parts)
        alone = [network(part) for part in parts]
    except Exception:  # whatever the model's own code raises
        return False
    pairs = [(a[name], b[name]) for a, b in zip(together, alone, strict=True) for name in b]
    return all(found.shape == y.shape and equal_up_to_rounding(found, y) for found, y in pairs)


def _bounded(example: Example, looked: Looked) -> Example:
    """The example with the ends of the tables that its numbers, and its positions, are looked up in."""
    given, longest = example.made(_SAMPLES), dict(example.longest)
    inputs = []
    for spec in example.inputs:
        x = given.get(spec.name)
        ends = [rows for rows, seen in looked if x is not None and seen.shape == x.shape and torch.equal(seen, x)]
        if ends:
            spec = dataclasses.replace(spec, below=min([*ends, spec.below or ends[0]]))
        inputs.append(spec)
    for axis, size in example.sizes.items():
        for rows, seen in looked:
            row = seen.reshape(-1)[:size]
            if size > 2 and seen.numel() % size == 0 and torch.equal(row, row[0] + torch.arange(size)):
                longest[axis] = min(longest.get(axis, rows), rows - int(row[0]))
    return dataclasses.replace(example, inputs=tuple(inputs), longest=longest)


@contextmanager
def _lookups(network: Network) -> Iterator[Looked]:
    """What is looked up in tables meanwhile."""
    looked: Looked = []

    def look(table: nn.Embedding, given: tuple[Tensor, ...]) -> None:
        if given and isinstance(given[0], Tensor) and given[0].numel():
            looked.append((table.num_embeddings, given[0].detach()))

    parts = [part for module in network.parts for part in module.modules()]
    # one with a `forward` of its own may look up something else than it is given
    tables = [p for p in parts if isinstance(p, nn.Embedding) and type(p).forward is nn.Embedding.forward]
    hooks = [table.register_forward_pre_hook(look) for table in tables]
    try:
        yield looked
    finally:
        for hook in hooks:
            hook.remove()
