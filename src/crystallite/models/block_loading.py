"""`load_block`: one block of a saved layer, read without the others."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.core.errors import CheckpointError
from crystallite.models.description import build, check_indices
from crystallite.models.manifest import MANIFEST, read_manifest, weights_of
from crystallite.models.record import Record
from crystallite.operators.recurrent_layer import BlockRecurrentLayer, from_panels
from crystallite.weights.checkpoint import Checkpoint, open_checkpoint

__all__ = ["LoadedBlock", "load_block"]

_INSIDE = re.compile(r"(?:(.*)\.)?layers\.(\d+)(?:\.(.+))?", re.DOTALL)  # owner, number, what of that layer
_MATRICES = ("input", "recurrent", "communication")


@dataclass(frozen=True)
class LoadedBlock:
    """One sub-operator: y[rows] = weight @ x[columns] + bias."""

    weight: Tensor
    bias: Tensor | None
    rows: Tensor
    columns: Tensor


def load_block(path: str | os.PathLike[str], layer: str, block: int) -> LoadedBlock:
    """One block of a saved layer, with the neurons of the dense model that it reads and writes.

    | layer | its blocks |
    |---|---|
    | a `BlockLinear`, a `BlockConv` | as they are stored; of a convolution the kernel, rows and columns are channels |
    | "name.layers.1" of a `BlockChain` | those of that layer |
    | a linear layer, such as a factor of a low rank | block 0 is all of it |
    | "name.layers.0.input" of a `BlockRecurrent` | rows of weight_ih, inputs that they read, bias_ih |
    | "name.layers.0.recurrent" | rows of weight_hh, the block's own units, bias_hh |
    | "name.layers.0.communication" | rows of weight_hh, units of other blocks that it hears, no bias |
    | "name.layers.0.recurrent.down" of a `LowRankRecurrent` | block 0 is all of it, as for linear layers |

    Layers and directions of a recurrent network count through, forward before backward. Its blocks are those that run
    through time on their own, each after all that it hears: an irreducible block of the Frobenius form, or several
    small ones. The three matrices of a block have the same rows, gate after gate as PyTorch orders them, so that rows
    of the first gate are the hidden units; a matrix that is zero has no columns.

    Rows and columns are numbered as in the dense model, whatever was folded. Only this block is read, and index tables
    of O(n); the hash of the weights, for which all of them would be read, is not compared.

    Args:
        path: the folder that `save` wrote.
        layer: the name of the layer.
        block: its number, from 0.

    Returns:
        A `LoadedBlock`: y[rows] = weight @ x[columns] + bias.

    Raises:
        CheckpointError: there is no such layer or block, or the folder is damaged.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    described = _description_at(manifest["modules"], layer)
    chain, number = layer, -1
    if described.get("type") not in ("BlockLinear", "BlockConv", "Linear"):  # a layer may have a digit for a name
        inside = _INSIDE.fullmatch(layer)
        chain, number, part = (inside[1] or "", int(inside[2]), inside[3]) if inside else ("", -1, None)
        described = _description_at(manifest["modules"], chain) if inside else {}
        owner = described.get("type")
        if owner == "BlockRecurrent" and part in _MATRICES:
            return _recurrent_block(folder, manifest, described, chain, number, part, block)
        if owner == "LowRankRecurrent" and _is_linear(build(described, folder / MANIFEST), f"layers.{number}.{part}"):
            chain, number, described = layer, -1, {"type": "Linear"}
        elif owner != "BlockChain" or part:
            raise CheckpointError(
                f"{folder}: expected the name of a BlockLinear, a BlockConv, a linear layer, a BlockChain's layer, or "
                f"a recurrent layer's input, recurrent or communication, got {layer!r:.80}"
            )
    of_conv, dense = described["type"] == "BlockConv", described["type"] == "Linear"
    with open_checkpoint(weights_of(folder)) as checkpoint:

        def table(name: str, at: Tensor, inverse: bool = False) -> Tensor:
            """The entries of a table, or the places themselves where there is none."""
            if name not in checkpoint.tensors:
                return at
            entries = _tensor(checkpoint, name)
            return (torch.argsort(entries) if inverse else entries)[at]

        prefix, of_chain = _prefix(layer), _prefix(chain)

        def stored(stack: int) -> tuple[str, tuple[int, int, int]] | None:
            """The name of a stack, and how many blocks of how many rows and columns it holds; None past the last."""
            name = f"{prefix}parts.{stack}.weight" if of_conv else f"{prefix}weights.{stack}"
            name = f"{prefix}weight" if dense and not stack else name
            info = checkpoint.tensors.get(name)
            if info is None:
                return None
            if not of_conv:
                return name, (1, *info.shape) if dense else info.shape  # type: ignore[return-value]
            groups = int(described["parts"][stack][2])
            return name, (groups, info.shape[0] // groups, info.shape[1])

        row = column = stack = 0
        left = block
        while (found := stored(stack)) and left >= found[1][0]:
            count, height, width = found[1]
            stack, left, row, column = stack + 1, left - count, row + count * height, column + count * width
        if found is None or left < 0:
            raise CheckpointError(f"{folder}: no block {block} in layer {layer!r:.80}")
        _, height, width = found[1]
        lines = torch.arange(row + left * height, row + (left + 1) * height)
        reads = f"{prefix}{'inputs' if of_conv else 'columns'}"
        columns = table(reads, torch.arange(column + left * width, column + (left + 1) * width))
        if number < 0:
            rows = lines = table(f"{prefix}outputs", lines, inverse=True)
        elif number + 1 == len(described["layers"]):
            rows = table(f"{of_chain}outputs", lines, inverse=True)
        else:
            rows = table(f"{prefix}neurons", lines)
        if number > 0:
            columns = table(f"{of_chain}layers.{number - 1}.neurons", columns)
        bias = table(f"{prefix}bias", lines) if f"{prefix}bias" in checkpoint.tensors else None
        whole = _tensor(checkpoint, found[0])
        place = slice(left * height, (left + 1) * height)
        weight = (whole[place] if of_conv else whole if dense else whole[left]).clone()
    record = Record.from_plain(manifest["record"], folder / MANIFEST)
    outputs, inputs = _folded(record, chain, max(number, 0))
    rows, columns = (at if order is None else order[at] for order, at in ((outputs, rows), (inputs, columns)))
    return LoadedBlock(weight, bias, rows, columns)


def _recurrent_block(
    folder: Path, manifest: dict[str, Any], described: dict[str, Any], name: str, number: int, matrix: str, block: int
) -> LoadedBlock:
    """One matrix of a block of a `BlockRecurrent`'s layer."""
    layers: Any = build(described, folder / MANIFEST).get_submodule("layers")
    if number >= len(layers) or not 0 <= block < len(layers[number].form.blocks):
        raise CheckpointError(f"{folder}: no block {block} in layer {f'{_prefix(name)}layers.{number}'!r:.80}")
    layer: BlockRecurrentLayer = layers[number]
    prefix = f"{_prefix(name)}layers.{number}."
    with open_checkpoint(weights_of(folder)) as checkpoint:
        names = {own: manifest["tied"].get(prefix + own, prefix + own) for own in layer.state_dict()}
        try:  # mapped: what is not used is not read
            layer.load_state_dict({own: _tensor(checkpoint, stored) for own, stored in names.items()}, assign=True)
        except RuntimeError as error:
            raise CheckpointError(f"{folder}: {prefix.removesuffix('.')}: {error!s:.200}") from None
        check_indices(layer, folder)
        form, own = layer.form, layer.form.blocks[block]
        units = layer.order[own.first : own.first + own.size]
        rows = (torch.arange(form.gates)[:, None] * form.hidden + units).flatten()
        lines = slice(form.gates * own.first, form.gates * (own.first + own.size))  # as they are stored
        weight, columns = next(layer.parameters()).new_zeros(len(rows), 0), units[:0]
        if matrix == "input":
            for i, reads in enumerate(form.inputs):
                if reads.first <= own.first < reads.first + reads.size:
                    start = lines.start - form.gates * reads.first
                    weight, columns = layer.input_weights[i][start : start + len(rows)], layer.columns_of(i)
        elif matrix == "recurrent" and own.feedback:
            stack = next(i for i, stack in enumerate(form.stacks) if block in stack)
            panels = layer.recurrent_weights[stack][form.stacks[stack].index(block)]
            weight, columns = from_panels(panels, form.gates, own).flatten(0, 1), units
        elif matrix == "communication" and own.sources:
            weight = layer.communication_weights[form.hearing.index(block)]
            columns = layer.order[layer.sources_of(block)]
        bias = {"input": layer.bias_ih, "recurrent": layer.bias_hh}.get(matrix)
        return LoadedBlock(
            weight.detach().clone(), None if bias is None else bias.detach()[lines].clone(), rows, columns.clone()
        )


def _is_linear(network: nn.Module, name: str) -> bool:
    try:
        return isinstance(network.get_submodule(name), nn.Linear)
    except AttributeError:
        return False


def _prefix(name: str) -> str:
    return f"{name}." if name else ""


def _tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    """The stored tensor, mapped."""
    return torch.as_tensor(checkpoint.read(name))


def _description_at(modules: dict[str, Any], name: str) -> dict[str, Any]:
    """The description of a module, which may stand inside that of another; empty if there is none."""
    inside: list[str] = []
    while name not in modules and name:
        name, _, place = name.rpartition(".")
        inside.insert(0, place)
    found: Any = modules.get(name, {})
    for place in inside:
        found = found.get("children", found) if isinstance(found, dict) else {}
        found = found.get(place, {}) if isinstance(found, dict) else {}
    return dict(found) if isinstance(found, dict) else {}


def _folded(record: Record, name: str, number: int) -> list[Tensor | None]:
    """The orders folded into the rows and columns of a layer: that of this name, or so many after it in a chain."""
    names = [change.name for change in record.changes]
    place = names.index(name) + number if name in names else len(names)
    if place >= len(names):
        return [None, None]
    orders = {where: fold.order for fold in record.folds for where in fold.places}
    axes = (1, 0) if record.changes[place].kind == "Conv1D" else (0, 1)
    return [orders.get((f"{names[place]}.weight", axis)) for axis in axes]
