"""Index maps (paper, section 4.2): permutations, projections and embeddings as value tables.

A table says where each new position takes its value from; applying it moves n values and multiplies nothing.
The operators read as the paper writes them: with a permutation P, `P @ W @ Q.T` is PWQᵀ, for NumPy arrays and
torch tensors alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from crystallite.core.errors import InvalidMap
from crystallite.core.tables import Table

__all__ = ["Embedding", "Permutation", "Projection"]

Array = TypeVar("Array", bound="np.ndarray | torch.Tensor")


class _IndexMap:
    """What the three maps share: a table, its size, application to rows and columns, and printing."""

    __array_ufunc__ = None  # `array @ map.T` is ours to answer, not NumPy's
    __slots__ = ("_index", "size")

    _index: np.ndarray
    size: int

    def __init__(self, index: Any, size: int, what: str):
        table = _as_table(index, what)
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 0:
            raise InvalidMap(f"{what}: size must be an integer ≥ 0, got {size!r}")
        if table.size and (table.min() < 0 or table.max() >= size):
            bad = int(table[(table < 0) | (table >= size)][0])
            raise InvalidMap(f"{what}: every index must lie in 0…{size - 1}, got {bad}")
        counts = np.bincount(table, minlength=1)
        if counts.max(initial=0) > 1:
            raise InvalidMap(f"{what}: index {int(counts.argmax())} appears {int(counts.max())} times, expected once")
        table.flags.writeable = False
        self._index = table
        self.size = int(size)

    @property
    def T(self) -> _Transposed:
        """The same map for columns: `a @ m.T` is `m.cols(a)`."""
        return _Transposed(self)  # type: ignore[arg-type]  # the three public maps are all there are

    def __len__(self) -> int:
        return len(self._index)

    def __bool__(self) -> bool:
        """A map is something also when it keeps nothing."""
        return True

    def __rmatmul__(self, array: Array) -> Array:
        """AP for an array: as a matrix the inverse is the transpose, so this is A(P⁻¹)ᵀ."""
        if not isinstance(array, (np.ndarray, torch.Tensor)):
            return NotImplemented
        return self.T.T.inverse().cols(array)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        assert isinstance(other, _IndexMap)
        return self.size == other.size and np.array_equal(self._index, other._index)

    def __hash__(self) -> int:
        return hash((type(self), self.size, self._index.tobytes()))

    def _check_axis(self, array: Any, axis: int, expected: int) -> None:
        if not isinstance(array, (np.ndarray, torch.Tensor)):
            raise InvalidMap(
                f"{type(self).__name__} applies to NumPy arrays and torch tensors, got {type(array).__name__}"
            )
        if array.ndim == 0 or array.shape[axis] != expected:
            got = "a scalar" if array.ndim == 0 else f"shape {tuple(array.shape)}"
            side = "first" if axis == 0 else "last"
            raise InvalidMap(f"{type(self).__name__} needs {expected} entries on the {side} axis, got {got}")


@dataclass(frozen=True, eq=False)
class _Transposed:
    """A map written on the right of a matrix; `.T` gives the map back."""

    map: Permutation | Projection | Embedding
    __array_ufunc__ = None

    @property
    def T(self) -> Permutation | Projection | Embedding:
        return self.map

    def inverse(self) -> _Transposed:
        """(Pᵀ)⁻¹ = (P⁻¹)ᵀ."""
        return _Transposed(self.map.inverse())

    def __rmatmul__(self, array: Array) -> Array:
        return self.map.cols(array)

    def __matmul__(self, other: Any) -> Any:
        """QᵀPᵀ = (PQ)ᵀ, or PᵀA = P⁻¹A for an array.

        >>> p, a = Permutation([2, 0, 1]), np.arange(9).reshape(3, 3)
        >>> bool((p.T @ (p @ a @ p.T) @ p == a).all())
        True
        """
        if isinstance(other, _Transposed):
            return _Transposed(other.map @ self.map)
        if isinstance(other, (np.ndarray, torch.Tensor)):
            return self.map.inverse().rows(other)
        return NotImplemented


class _Selection(_IndexMap):
    """Maps that read: new position i takes its value from old position source[i]."""

    __slots__ = ()

    @property
    def source(self) -> np.ndarray:
        """Value table: the old position that each new position takes its value from."""
        return self._index

    def rows(self, array: Array) -> Array:
        """PA: row i of the result is row source[i] of the array."""
        self._check_axis(array, 0, self.size)
        return _take(array, self._index, 0)

    def cols(self, array: Array) -> Array:
        """APᵀ: column j of the result is column source[j] of the array."""
        self._check_axis(array, -1, self.size)
        return _take(array, self._index, -1)

    def table(self) -> Table:
        """The paper's value table, counted from 1.

        >>> print(Permutation([2, 0, 1]).table())
        new  old
          1    3
          2    1
          3    2
        """
        return Table(("new", "old"), np.column_stack([np.arange(1, len(self) + 1), self._index + 1]))


class Permutation(_Selection):
    """A bijection of 0…n−1 with `source[new] = old`: (PX)(i) = X(source[i]). O(n).

    >>> p = Permutation([2, 0, 1])
    >>> p @ np.array([10, 20, 30])
    array([30, 10, 20])
    >>> p.inverse() @ (p @ np.array([10, 20, 30]))
    array([10, 20, 30])
    """

    __slots__ = ()

    def __init__(self, source: Any):
        table = _as_table(source, "permutation")
        super().__init__(table, len(table), "permutation")

    @classmethod
    def identity(cls, size: int) -> Permutation:
        """I_n."""
        return cls(np.arange(size))

    def inverse(self) -> Permutation:
        """P⁻¹, the table with its two columns exchanged."""
        inverse = np.empty_like(self._index)
        inverse[self._index] = np.arange(self.size)
        return Permutation(inverse)

    def rows_(self, array: Array) -> Array:
        """PA in place: rows move along the cycles of P, one at a time. O(n) moves and one row of extra memory.

        >>> a = np.array([10, 20, 30])
        >>> Permutation([2, 0, 1]).rows_(a) is a, a.tolist()
        (True, [30, 10, 20])
        """
        self._check_axis(array, 0, self.size)
        with torch.no_grad():
            self._move(array)
        return array

    def cols_(self, array: Array) -> Array:
        """APᵀ in place; P.rows_(W) and Q.cols_(W) make PWQᵀ of W."""
        self._check_axis(array, -1, self.size)
        with torch.no_grad():
            self._move(array.movedim(-1, 0) if isinstance(array, torch.Tensor) else np.moveaxis(array, -1, 0))
        return array

    def _move(self, lines: Any) -> None:
        source = self._index.tolist()
        for start in range(self.size):
            held, at = None, start
            while source[at] >= 0:
                if held is None and source[at] != start:
                    held = lines[at].clone() if isinstance(lines, torch.Tensor) else np.copy(lines[at])
                after, source[at] = source[at], -1  # moved
                if after != at:
                    lines[at] = held if after == start else lines[after]
                at = after

    def __matmul__(self, other: Any) -> Any:
        """Composition by the paper's rule (PQ)(i) = Q(P(i)), or PA for an array.

        >>> Permutation([1, 2, 0]) @ Permutation([0, 2, 1])
        Permutation([2, 1, 0])
        """
        if isinstance(other, Permutation):
            _check_sizes(self, other)
            return Permutation(other._index[self._index])
        if isinstance(other, Projection):
            if self.size != len(other):
                raise InvalidMap(f"cannot compose maps of sizes {self.size} and {len(other)}")
            return Projection(other._index[self._index], other.size)
        if isinstance(other, Embedding):  # new position i of the outer space holds old position source[i]
            _check_sizes(self, other)
            return Embedding(self.inverse()._index[other._index], self.size)
        if isinstance(other, (np.ndarray, torch.Tensor)):
            return self.rows(other)
        return NotImplemented

    def __repr__(self) -> str:
        return f"Permutation({_short(self._index)})"


class Projection(_Selection):
    """π: keeps k of n positions, `source[new] = old`: (πX)(i) = X(source[i]).

    >>> p = Projection([3, 1], size=4)
    >>> p @ np.array([10, 20, 30, 40])
    array([40, 20])
    >>> p.inverse() @ np.array([40, 20])
    array([ 0, 20,  0, 40])
    """

    __slots__ = ()

    def __init__(self, source: Any, size: int):
        super().__init__(source, size, "projection")

    def submatrix(self, matrix: Array, columns: Projection | None = None) -> Array:
        """πAπᵀ, or πAρᵀ with another projection ρ for the columns, as a copy."""
        return (self if columns is None else columns).cols(self.rows(matrix))

    def inverse(self) -> Embedding:
        """π⁻¹, the embedding that puts the kept positions back and zeros elsewhere."""
        return Embedding(self._index, self.size)

    def __matmul__(self, other: Any) -> Any:
        """(πP)(i) = P(π(i)): permute, then project; or πA for an array."""
        if isinstance(other, (Permutation, Projection)):
            if self.size != len(other):
                raise InvalidMap(f"cannot compose maps of sizes {self.size} and {len(other)}")
            return Projection(other._index[self._index], other.size)
        if isinstance(other, (np.ndarray, torch.Tensor)):
            return self.rows(other)
        return NotImplemented

    def __repr__(self) -> str:
        return f"Projection({_short(self._index)}, size={self.size})"


class Embedding(_IndexMap):
    """γ: places k positions into n, zeros elsewhere: (γX)(target[i]) = X(i).

    >>> g = Embedding([3, 1], size=4)
    >>> g @ np.array([40, 20])
    array([ 0, 20,  0, 40])
    >>> g.inverse() @ np.array([10, 20, 30, 40])
    array([40, 20])
    """

    __slots__ = ()

    def __init__(self, target: Any, size: int):
        super().__init__(target, size, "embedding")

    @property
    def target(self) -> np.ndarray:
        """Where each position goes."""
        return self._index

    def rows(self, array: Array) -> Array:
        """γA: row i of the array becomes row target[i]."""
        self._check_axis(array, 0, len(self))
        result = _zeros_like(array, (self.size, *array.shape[1:]))
        result[_index_for(array, self._index)] = array
        return result

    def cols(self, array: Array) -> Array:
        """Aγᵀ: column j of the array becomes column target[j]."""
        self._check_axis(array, -1, len(self))
        result = _zeros_like(array, (*array.shape[:-1], self.size))
        result[..., _index_for(array, self._index)] = array
        return result

    def fill(self, matrix: Array, block: Array, columns: Embedding | None = None) -> Array:
        """γAγᵀ into an existing matrix, in place: the submatrix at (target, columns' target) becomes `block`."""
        columns = self if columns is None else columns
        self._check_axis(matrix, 0, self.size)
        columns._check_axis(matrix, -1, columns.size)
        if tuple(block.shape) != (len(self), len(columns)):
            raise InvalidMap(f"expected a block of shape {(len(self), len(columns))}, got {tuple(block.shape)}")
        rows = _index_for(matrix, self._index)
        matrix[rows[:, None], _index_for(matrix, columns._index)] = block  # type: ignore[assignment]
        return matrix

    def inverse(self) -> Projection:
        """γ⁻¹, the projection that reads the placed positions back."""
        return Projection(self._index, self.size)

    def __matmul__(self, other: Any) -> Any:
        """Composition with another embedding or a permutation (first `other`, then this), or γA for an array."""
        if isinstance(other, Embedding):
            if len(self) != other.size:
                raise InvalidMap(f"cannot compose maps of sizes {len(self)} and {other.size}")
            return Embedding(self._index[other._index], self.size)
        if isinstance(other, Permutation):
            if len(self) != other.size:
                raise InvalidMap(f"cannot compose maps of sizes {len(self)} and {other.size}")
            return Embedding(self._index[other.inverse()._index], self.size)
        if isinstance(other, (np.ndarray, torch.Tensor)):
            return self.rows(other)
        return NotImplemented

    def table(self) -> Table:
        """The paper's value table of γ, counted from 1."""
        return Table(("new", "old"), np.column_stack([self._index + 1, np.arange(1, len(self) + 1)]))

    def __repr__(self) -> str:
        return f"Embedding({_short(self._index)}, size={self.size})"


def _as_table(index: Any, what: str) -> np.ndarray:
    if isinstance(index, torch.Tensor):
        index = index.detach().cpu().numpy()
    try:
        table = np.asarray(index)
    except ValueError as error:
        raise InvalidMap(f"{what}: expected a list of indices, got {error}") from None
    if table.ndim != 1:
        raise InvalidMap(f"{what}: expected a 1-D table, got {table.ndim}-D of shape {table.shape}")
    if table.size and table.dtype.kind not in "iu":
        raise InvalidMap(f"{what}: expected integer indices, got dtype {table.dtype}")
    return table.astype(np.intp)  # always a copy: the map owns its table


def _check_sizes(left: _IndexMap, right: _IndexMap) -> None:
    if left.size != right.size:
        raise InvalidMap(f"cannot compose maps of sizes {left.size} and {right.size}")


def _index_for(array: Any, index: np.ndarray) -> Any:
    return torch.from_numpy(index.copy()).to(array.device) if isinstance(array, torch.Tensor) else index


def _take(array: Any, index: np.ndarray, axis: int) -> Any:
    if isinstance(array, torch.Tensor):
        return array.index_select(axis, _index_for(array, index))
    return array.take(index, axis=axis)


def _zeros_like(array: Any, shape: tuple[int, ...]) -> Any:
    return array.new_zeros(shape) if isinstance(array, torch.Tensor) else np.zeros(shape, array.dtype)


def _short(index: np.ndarray) -> str:
    if len(index) <= 16:
        return str(index.tolist())
    return f"[{', '.join(map(str, index[:6]))}, …, {index[-1]}]"
