"""Runs layers of blocks one after the other: by compiled kernels on the CPU without gradients, else by PyTorch.

Both ways keep the state feature-major between layers, so that a shuffle moves whole lines, and convert once at the
ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils.parametrize import is_parametrized

from crystallite.errors import InvalidMatrix
from crystallite.operators import block_kernels as kernels
from crystallite.parallel import over_tasks

__all__ = [
    "Activation",
    "Block",
    "Plan",
    "Stage",
    "array",
    "as_rows",
    "can_plan",
    "can_run_compiled",
    "cut",
    "empty_blocks",
    "in_order",
    "joined",
    "products",
    "run",
]

Block = tuple[np.ndarray, np.ndarray]  # rows and columns
Activation = Callable[[Tensor], Tensor]
Piece = tuple[int, int, int, int, int]  # of a stage: stack, its rows from and to, its first column, its first row

_CODES = {torch.float32: "<f4", torch.float64: "<f8", torch.int64: "<i8"}
_KERNEL_DTYPES = (torch.float32, torch.float64)
_FEW = 3  # samples up to which a row at a time is faster than a panel that is mostly empty
_ROW_RATE, _LINE_RATE = 6e9, 35e9  # multiply-adds per second of one core, one sample at a time and in panels
_PARTS = 4  # of the work for each thread: who is late does fewer of them
_WORTH_A_THREAD = 250e-6  # seconds of work; handing some to another thread costs a third of that
_STATE_BYTES = 1 << 20  # of a state that is worked on at a time
_NOWHERE = np.zeros(0, np.int64)


def cut(weight: Tensor, blocks: Sequence[Block]) -> list[Tensor]:
    """The blocks of a matrix, consecutive ones of equal shape as one stack (blocks, rows, columns)."""
    runs = groupby(blocks, key=lambda b: (len(b[0]), len(b[1])))
    return [torch.stack([weight.detach()[rows][:, cols] for rows, cols in run]) for _, run in runs]


def empty_blocks(shapes: Sequence[Sequence[int]], rows: int, columns: int | None) -> list[Tensor]:
    """Stacks of these shapes, not filled, that fit into so many rows and columns; any columns if they are looked up.

    Compiled code believes the sizes of blocks, so those that do not fit are refused.
    """
    stacks = [torch.empty(*map(int, shape)) for shape in shapes]
    reads, writes = (sum(w.shape[0] * w.shape[side] for w in stacks) for side in (2, 1))
    if writes > rows or (columns is not None and reads > columns):
        raise InvalidMatrix(
            f"expected blocks of up to {rows} rows and {columns or 'any'} columns, got {writes} and {reads}"
        )
    return stacks


def in_order(indices: np.ndarray) -> bool:
    """Whether these are 0, 1, 2, …: then a slice does what a gather would do."""
    return bool(np.array_equal(indices, np.arange(len(indices))))


def products(state: Tensor, weights: Iterable[Tensor], bias: Tensor | None, rows: int) -> Tensor:
    """(columns of all blocks, samples) → (rows, samples): each block times its columns, plus the bias.

    Rows past those of the blocks are dormant: they are the bias, or zero.
    """
    made: list[Tensor] = []
    row = column = 0
    for stack in weights:
        count, height, depth = stack.shape
        piece = state.narrow(0, column, count * depth)
        add = None if bias is None else bias.narrow(0, row, count * height)
        if count == 1:
            made.append(stack[0] @ piece if add is None else torch.addmm(add[:, None], stack[0], piece))
        else:
            parts = piece.unflatten(0, (count, depth))
            product = (
                torch.bmm(stack, parts) if add is None else torch.baddbmm(add.view(count, height, 1), stack, parts)
            )
            made.append(product.flatten(0, 1))
        row, column = row + count * height, column + count * depth
    if row < rows or not made:
        idle = state.new_zeros(rows - row) if bias is None else bias.narrow(0, row, rows - row)
        idle = idle.to(made[0].dtype) if made else idle  # autocast makes products of another dtype
        made.append(idle[:, None].expand(-1, state.shape[1]))
    return torch.cat(made) if len(made) > 1 or row < rows else made[0]  # never the bias itself


def as_rows(x: Tensor) -> Tensor:
    """(…, features) → (samples, features)."""
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


def can_run_compiled(x: Tensor, module: nn.Module) -> bool:
    """Whether the kernels know these numbers, and nothing needs PyTorch's own operations.

    That is gradients of both modes, tracing, compiling, vmap, autocast, and dispatch modes such as counters.
    """
    if (
        torch.compiler.is_compiling()
        or type(x) is not Tensor
        or x.device.type != "cpu"
        or x.dtype not in _KERNEL_DTYPES
    ):
        return False
    if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in module.parameters())):
        return False
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.is_autocast_enabled("cpu")
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


@dataclass(frozen=True)
class Stage:
    """One layer of blocks as arrays: rows [0, …) are written by the stacks in turn, the rest by `bias` alone."""

    weights: list[np.ndarray]  # (blocks, rows, columns) each
    bias: np.ndarray  # as the rows are written; empty: none
    columns: np.ndarray  # what the columns of the blocks read, block after block; empty: in order
    relu: bool
    _shares: dict[int, list[list[Piece]]] = field(default_factory=dict)

    @cached_property
    def rows(self) -> int:
        return sum(w.shape[0] * w.shape[1] for w in self.weights)

    @cached_property
    def macs(self) -> int:
        return sum(w.size for w in self.weights)

    def shares(self, count: int) -> list[list[Piece]]:
        """So many equal shares of the multiply-adds."""
        if count not in self._shares:
            shares: list[list[Piece]] = [[] for _ in range(count)]
            before = row = column = 0
            for i, weight in enumerate(self.weights):
                blocks, height, depth = weight.shape
                bounds = [(self.macs * t // count - before) // max(depth, 1) for t in range(count + 1)]
                bounds = [min(max(bound, 0), blocks * height) for bound in bounds]
                if depth == 0:  # dormant rows go to the first
                    bounds[1:] = [blocks * height] * count
                for share, (low, high) in zip(shares, pairwise(bounds), strict=True):
                    if low < high:
                        share.append((i, low, high, column, row))
                before, row, column = before + weight.size, row + blocks * height, column + blocks * depth
            self._shares[count] = shares  # whole, as another thread may look
        return self._shares[count]


class Plan:
    """The arrays of a module's layers, valid as long as its parts stay what and where they are.

    Making arrays of tensors takes longer than a product of small blocks, so it is done once. Copies of a module start
    without a plan.

    Output j is row places[j] of the last stage, or zero where there is no such row, plus bias[j]. `activations` follow
    the stages; None where there is nothing to do or the stage does it itself.
    """

    def __init__(
        self, module: nn.Module | None = None, stages: Sequence[Stage] = (), places: np.ndarray = _NOWHERE,
        bias: np.ndarray = _NOWHERE, outputs: int = 0, activations: Sequence[Activation | None] = (),
    ) -> None:  # fmt: skip
        self.stages, self.places, self.bias, self.outputs = stages, places, bias, outputs
        self.activations = activations
        parts = [] if module is None else list(module.modules())
        homes = [home for part in parts for home in (part._parameters, part._buffers)]
        self._tensors = [(home, name, t, t.data_ptr()) for home in homes for name, t in home.items() if t is not None]
        self._children = [(part._modules, name, child) for part in parts for name, child in part._modules.items()]
        self._hooks = [hooks for part in parts[1:] for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        self._modes = [(part, part.training) for part in parts if isinstance(part, nn.Dropout)]
        self.macs = sum(stage.macs for stage in stages)
        self.dtype = (
            next((t.dtype for _, _, t, _ in self._tensors if t.is_floating_point()), None) if self.macs else None
        )
        self.width = max((stage.rows for stage in stages), default=0)

    def valid(self) -> bool:
        for tensors, name, tensor, place in self._tensors:
            if tensors.get(name) is not tensor or tensor.data_ptr() != place:
                return False
        for children, name, child in self._children:
            if children.get(name) is not child:
                return False
        return self.macs > 0 and not any(self._hooks) and all(part.training == mode for part, mode in self._modes)

    def __deepcopy__(self, _memo: Any) -> Plan:
        return Plan()

    def __reduce__(self) -> tuple[type[Plan], tuple[()]]:
        return Plan, ()


def can_plan(module: nn.Module, x: Tensor) -> bool:
    """Whether all numbers of a module are x's kind and lie where its own tensors say, in one piece."""
    parts = list(module.modules())
    tensors = [*module.parameters(), *module.buffers()]
    return (
        all(t.is_contiguous() and t.device == x.device for t in tensors)
        and {t.dtype for t in tensors if t.is_floating_point()} == {x.dtype}
        and not any(part._forward_hooks or part._forward_pre_hooks for part in parts[1:])
        and not any(is_parametrized(part) for part in parts)
    )


class _Memory:
    """What numpy asks for to see a tensor's memory; `Tensor.numpy` would forbid to resize it ever after."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor  # stays alive
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "typestr": _CODES[tensor.dtype],
            "data": (tensor.data_ptr(), False),
        }


def array(tensor: Tensor | None, like: Tensor | None = None) -> np.ndarray:
    """The memory of a contiguous tensor; no tensor is an empty array of the kind of `like`, or of indices."""
    if tensor is None:
        return np.zeros(0, _CODES[torch.int64 if like is None else like.dtype])
    if not tensor.numel():
        return np.zeros(tuple(tensor.shape), _CODES[tensor.dtype])
    return np.asarray(_Memory(tensor))


def joined(indices: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(indices) if indices else np.zeros(0, np.intp)


def run(plan: Plan, x: Tensor) -> Tensor:
    """(…, features) → (…, outputs) through all stages."""
    rows = array((x if x.dim() == 2 else as_rows(x)).contiguous())
    y = np.empty((len(rows), plan.outputs), rows.dtype)
    few = len(rows) <= _FEW
    threads = torch.get_num_threads()
    seconds = plan.macs * len(rows) / (_ROW_RATE if few else _LINE_RATE)
    inside = threads if seconds > _WORTH_A_THREAD * len(plan.stages) else 1
    width = 64 // rows.itemsize
    panels = -(-len(rows) // width)
    if few:
        _run_rows(plan, rows, y, inside)
    elif panels >= threads > 1 and seconds > _WORTH_A_THREAD and not any(plan.activations):
        # panels never meet: each thread takes some of them through all stages, and then some more
        parts = min(panels, _PARTS * threads)
        bounds = [panels * i // parts * width for i in range(parts + 1)]
        slices = [slice(low, high) for low, high in pairwise(bounds)]
        over_tasks(threads, slices, lambda some: _run_panels(plan, rows[some], y[some], 1))
    else:
        _run_panels(plan, rows, y, inside)
    made = torch.from_numpy(y)
    return made if x.dim() == 2 else made.view(*x.shape[:-1], plan.outputs)


def _run_rows(plan: Plan, state: np.ndarray, y: np.ndarray, threads: int) -> None:
    for i, stage in enumerate(plan.stages):
        out = np.empty((len(state), stage.rows), state.dtype)
        _products(kernels.row_products, stage, state, out, threads)
        state = _activated(plan, out, i)
    kernels.take_rows(state, plan.places, plan.bias, y)


def _run_panels(plan: Plan, rows: np.ndarray, y: np.ndarray, threads: int) -> None:
    """Some panels at a time, so that their state stays in the cache."""
    width = 64 // rows.itemsize
    panels = -(-len(rows) // width)
    step = min(panels, max(4, _STATE_BYTES // (64 * max(plan.width, rows.shape[1]))))
    for start in range(0, panels, step):
        count = min(step, panels - start)
        samples = slice(start * width, (start + count) * width)
        state = np.empty((count, rows.shape[1], width), rows.dtype)
        kernels.to_panels(rows[samples], state)
        for i, stage in enumerate(plan.stages):
            out = np.empty((count, stage.rows, width), rows.dtype)
            _products(kernels.panel_products, stage, state, out, threads)
            state = _activated(plan, out, i)
        kernels.from_panels(state, plan.places, plan.bias, y[samples])


def _products(kernel: Any, stage: Stage, state: np.ndarray, out: np.ndarray, threads: int) -> None:
    def work(pieces: list[Piece]) -> None:
        for stack, low, high, column, row in pieces:
            kernel(stage.weights[stack], low, high, stage.bias, stage.relu, state, stage.columns, column, out, row)

    if threads == 1:
        work(stage.shares(1)[0])
    else:
        over_tasks(threads, stage.shares(_PARTS * threads), work)


def _activated(plan: Plan, state: np.ndarray, i: int) -> np.ndarray:
    activation = plan.activations[i] if i < len(plan.activations) else None
    return state if activation is None else array(activation(torch.from_numpy(state)).contiguous())
