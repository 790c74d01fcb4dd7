"""What both structures share: the paper's channels π_i → W^i → γ_i, and the zero channel m + 1 (section 4.3)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch

from crystallite.core.errors import InvalidMatrix
from crystallite.core.maps import Embedding, Permutation, Projection

__all__ = ["Channels"]

Array = TypeVar("Array", bound="np.ndarray | torch.Tensor")


class Channels(ABC):
    """P, Q and m sub-operators on the diagonal of PWQᵀ, with what belongs to none of them last."""

    @property
    @abstractmethod
    def P(self) -> Permutation:
        """Row permutation."""

    @property
    @abstractmethod
    def Q(self) -> Permutation:
        """Column permutation."""

    @property
    @abstractmethod
    def channel_shapes(self) -> np.ndarray:
        """(m, 2): rows and columns of W^1 … W^m."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""

    @cached_property
    def projections(self) -> list[Projection]:
        """π_1 … π_m, π_{m+1}: X_i = π_i X with X = Q X_Input; the last reads the inputs of the zero channel.

        >>> from crystallite import decompose
        >>> decompose(np.array([[0, 1, 0], [1, 0, 0]])).projections
        [Projection([0], size=3), Projection([1], size=3), Projection([2], size=3)]
        """
        return [Projection(positions, self.Q.size) for positions in self._positions(1)]

    @cached_property
    def embeddings(self) -> list[Embedding]:
        """γ_1 … γ_m, γ_{m+1}: Y = Σ γ_i Y_i and Y_Output = P⁻¹Y (eq. 4.11); the last writes the dormant outputs."""
        return [Embedding(positions, self.P.size) for positions in self._positions(0)]

    def apply(self, matrix: Array) -> Array:
        """PWQᵀ: the matrix with W^1 … W^m on the diagonal and the zero channel last.

        Args:
            matrix: NumPy array or torch tensor of the structure's shape.

        Returns:
            A reordered copy, of the same kind.

        Raises:
            InvalidMatrix: The shape is another one.
        """
        self._check(matrix, "matrix")
        return self.P @ matrix @ self.Q.T

    def sub_operators(self, matrix: Array, name: str = "matrix") -> list[Array]:
        """W^1 … W^m as copies: γ_i⁻¹(PWQᵀ)π_iᵀ of every sub-operator i, rows and columns in the order of P and Q.

        P and γ_i⁻¹ are value tables and so is their composition: each part is one selection, O(its size).

        Args:
            matrix: NumPy array or torch tensor of the structure's shape: a weight, an update, a gradient.
            name: What errors call the matrix.

        Returns:
            One matrix for each channel, of the same kind. The zero channel has none.

        Raises:
            InvalidMatrix: The shape is another one.

        Examples:
            >>> from crystallite import decompose
            >>> w = np.array([[0, 0, 1], [0, 0, 0], [0, 0, 1]])  # 2 → 0 and 2 → 2
            >>> [part.tolist() for part in decompose(w, "directed").sub_operators(np.arange(1, 10).reshape(3, 3))]
            [[[9, 7], [3, 1]]]
        """
        self._check(matrix, name)
        channels = zip(self.embeddings[:-1], self.projections[:-1], strict=True)
        return [(gamma.inverse() @ self.P).submatrix(matrix, pi @ self.Q) for gamma, pi in channels]

    def _positions(self, side: int) -> list[np.ndarray]:
        """Positions of each channel among the permuted rows (0) or columns (1)."""
        return np.split(np.arange(self.shape[side]), self.channel_shapes[:, side].cumsum())

    def _check(self, matrix: np.ndarray | torch.Tensor, name: str) -> None:
        if tuple(matrix.shape) != self.shape:
            raise InvalidMatrix(f"{name}: expected shape {self.shape}, as the structure has, got {tuple(matrix.shape)}")
