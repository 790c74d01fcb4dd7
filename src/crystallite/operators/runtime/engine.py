"""Runs layers of blocks one after the other: by compiled kernels on the CPU without gradients, else by PyTorch.

Both ways keep the state feature-major between layers, so that a shuffle moves whole lines, and convert once at the
ends.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils.parametrize import is_parametrized

from crystallite.core.compiling import COMPILES
from crystallite.core.errors import InvalidMatrix
from crystallite.core.parallel import run_on_openmp_threads
from crystallite.operators.runtime import block_kernels as kernels

__all__ = [
    "Block",
    "Plan",
    "Stage",
    "Unchanged",
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

# numbers of 16 bits as the integers that `instructions` takes for them
_CODES = {
    torch.float32: "<f4", torch.float64: "<f8", torch.bfloat16: "<u2", torch.float16: "<i2", torch.int64: "<i8",
}  # fmt: skip
_KERNEL_DTYPES = (torch.float32, torch.float64)
_HALVES = (torch.bfloat16, torch.float16)  # computed in float32
_ALL_DTYPES = frozenset((*_KERNEL_DTYPES, *_HALVES))
_FEW = 3  # samples up to which a row at a time is faster than a panel that is mostly empty
_ROW_RATE, _LINE_RATE = 6e9, 35e9  # multiply-adds per second of one core, one sample at a time and in panels
_PARTS = 4  # of a layer for each thread: who is late does fewer of them
_WORTH_A_TEAM = 40e-6  # seconds of work; a team costs a fifth of that
_STATE_BYTES = 1 << 20  # of a state that is worked on at a time
_DEEP = 256  # inputs of a block from which on a processor's own products of bfloat16 are faster than ours in float32
_FEWEST_PANELS = 4  # that a thread takes through all layers: each reads all weights
_LINE = 64  # bytes
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


def can_run_compiled(x: Tensor, module: nn.Module, halves: bool = False) -> bool:
    """Whether the kernels know these numbers, those of 16 bits where they may be, and nothing needs PyTorch's own ones.

    That is gradients of both modes, tracing, compiling, vmap, autocast, and dispatch modes such as counters.
    """
    if (
        not COMPILES
        or torch.compiler.is_compiling()
        or type(x) is not Tensor
        or not x.is_cpu
        or x.dtype not in (_ALL_DTYPES if halves else _KERNEL_DTYPES)
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
    activation: str = "none"  # one of kernels.ACTIVATIONS, which follows

    @property
    def rows(self) -> int:
        return sum(w.shape[0] * w.shape[1] for w in self.weights)

    @property
    def macs(self) -> int:
        return sum(w.size for w in self.weights)


class Unchanged:
    """Whether a module's parts stay what and where they are, so that what was made of their addresses holds.

    Copies of a module start without it.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        parts = [] if module is None else list(module.modules())
        homes = ((part._parameters, part._buffers, part._modules) for part in parts)
        self._homes: list[dict[str, Any]] = [home for some in homes for home in some if home]
        self._held = [thing for home in self._homes for thing in home.values()]
        self._tensors = [t for t in self._held if isinstance(t, Tensor)]
        self._places = [t.data_ptr() for t in self._tensors]

    def unchanged(self) -> bool:
        now = chain.from_iterable(map(dict.values, self._homes))  # all in C: chains hold hundreds of tensors
        if sum(map(len, self._homes)) != len(self._held) or not all(map(is_, now, self._held)):
            return False
        return list(map(Tensor.data_ptr, self._tensors)) == self._places

    def __deepcopy__(self, _memo: Any) -> Unchanged:
        return type(self)()

    def __reduce__(self) -> tuple[type[Unchanged], tuple[()]]:
        return type(self), ()


class Plan(Unchanged):
    """The arrays of a module's layers, valid as long as its parts stay what and where they are.

    Making arrays of tensors takes longer than a product of small blocks, so it is done once.

    Output j is row places[j] of the last stage, or zero where there is no such row, plus bias[j].
    """

    def __init__(
        self, module: nn.Module | None = None, stages: Sequence[Stage] = (), places: np.ndarray = _NOWHERE,
        bias: np.ndarray = _NOWHERE, inputs: int = 0, outputs: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(module)
        self.outputs = outputs
        parts = [] if module is None else list(module.modules())
        self._hooks = [hooks for part in parts[1:] for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        self._modes = [(part, part.training) for part in parts if isinstance(part, nn.Dropout)]
        self.macs = sum(stage.macs for stage in stages)
        self.dtype = next((t.dtype for t in self._tensors if t.is_floating_point()), None) if self.macs else None
        deep = self.macs > _DEEP * sum(stage.rows for stage in stages)
        self._few = deep and self.dtype == torch.bfloat16 and bool(torch.cpu._is_avx512_bf16_supported())
        self.line = _LINE // max((self.dtype or torch.float32).itemsize, 4)  # numbers
        self.width = max([inputs, *(stage.rows for stage in stages)])
        stage_table, stack_table = _tables(stages)
        tables = [stage_table, stack_table, places, bias]
        self._arrays = [*stages, *tables]  # stay alive
        ends = [number for table in tables for number in (table.ctypes.data, len(table))]
        head = (*ends, outputs, inputs, self.width)
        self._call_type = ctypes.c_int64 * (len(head) + 6 + 2 * len(stages) + 4)
        self._template = bytes(self._call_type(*head))

    def call(self, x: int, samples: int, y: int, scratch: int, parts: int, group: int) -> Any:
        """What `kernels.entry` asks for, and its counters; the arguments are what belongs to a call."""
        made = self._call_type.from_buffer_copy(self._template)
        made[11], made[12], made[13], made[14], made[15], made[16] = x, samples, y, scratch, parts, group
        return made

    def takes(self, x: Tensor) -> bool:
        """Whether these are the plan's numbers, and kernels are faster than what PyTorch has for so many samples."""
        return self.dtype == x.dtype and not (self._few and x.numel() > _FEW * x.shape[-1])

    def valid(self) -> bool:
        if not self.unchanged() or any(self._hooks) or not self.macs:
            return False
        return not self._modes or all(part.training == mode for part, mode in self._modes)


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
    shape, halves = x.shape, x.dtype in _HALVES
    rows = x if len(shape) == 2 else as_rows(x)
    rows = rows.float() if halves else rows
    rows = rows if rows.is_contiguous() else rows.contiguous()
    samples, line = shape[0] if rows is x else len(rows), plan.line
    y = torch.empty(samples, plan.outputs, dtype=rows.dtype)
    few, panels = samples <= _FEW, -(-samples // line)
    seconds = plan.macs * samples / (_ROW_RATE if few else _LINE_RATE)
    threads = torch.get_num_threads() if seconds > _WORTH_A_TEAM else 1
    parts, group = 1 if threads == 1 else _PARTS * threads, 0
    if few:
        scratch = None if threads == 1 else rows.new_empty(2 * samples * plan.width)
    else:
        group = max(_FEWEST_PANELS, min(_STATE_BYTES // (_LINE * plan.width), -(-panels // (2 * threads))))
        if panels >= group * threads:  # enough for all
            parts = 0
        scratch = rows.new_empty(2 * panels * line * plan.width if parts else 0)
    memory = 0 if scratch is None else scratch.data_ptr()
    call = plan.call(rows.data_ptr(), samples, y.data_ptr(), memory, parts, group)
    run_on_openmp_threads(threads, _entry(x.dtype), ctypes.addressof(call))
    y = y.to(x.dtype) if halves else y
    return y if len(shape) == 2 else y.view(*shape[:-1], plan.outputs)


@functools.cache
def _entry(dtype: torch.dtype) -> Any:
    stored = np.dtype(_CODES[dtype]).type
    return kernels.entry(np.float32 if dtype in _HALVES else stored, stored)


def _tables(stages: Sequence[Stage]) -> tuple[np.ndarray, np.ndarray]:
    """The stages, and their stacks, as the kernels read them."""
    stage_rows: list[tuple[int, ...]] = []
    stack_rows: list[tuple[int, ...]] = []
    for stage in stages:
        first, row, column = len(stack_rows), 0, 0
        for weight in stage.weights:
            blocks, height, depth = weight.shape
            stack_rows.append((weight.ctypes.data, blocks, height, depth, column, row))
            row, column = row + blocks * height, column + blocks * depth
        bias, columns, code = stage.bias, stage.columns, kernels.ACTIVATIONS.index(stage.activation)
        ends = (bias.ctypes.data, len(bias), columns.ctypes.data, len(columns), code, stage.rows, stage.macs)
        stage_rows.append((first, len(stack_rows), *ends))
    return np.array(stage_rows, np.int64).reshape(-1, 9), np.array(stack_rows, np.int64).reshape(-1, 6)
