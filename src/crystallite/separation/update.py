"""The paper's update rule: W_i(t+1) = W_i(t) − γ_i⁻¹(P ΔW(t) Qᵀ)π_iᵀ, and the same for masked dense weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from crystallite.core.errors import InvalidMatrix, InvalidOption
from crystallite.structure.bipartite import BipartiteStructure
from crystallite.structure.directed import DirectedStructure

__all__ = ["mask_gradients", "redistribute", "updated"]

Array = TypeVar("Array", np.ndarray, Tensor)


def redistribute(update: Array, structure: BipartiteStructure | DirectedStructure) -> list[Array]:
    """γ_i⁻¹(P ΔW Qᵀ)π_iᵀ of every sub-operator i: the part of a global update that is its own (eq. 4.12).

    For feedback networks Q = P, and sub-operators are the weak components without the isolated nodes. Rows and columns
    come in the order of P and Q, as `structure.sub_operators` cuts the weights.

    Args:
        update: ΔW(t) of the whole matrix, a NumPy array or a torch tensor.
        structure: What `decompose` found in the matrix.

    Returns:
        One part for each sub-operator.

    Raises:
        InvalidMatrix: The update has another shape than the matrix.

    Examples:
        >>> from crystallite import decompose
        >>> structure = decompose(np.array([[0, 1, 0], [1, 0, 1]]))
        >>> [part.tolist() for part in redistribute(np.array([[1, 2, 3], [4, 5, 6]]), structure)]
        [[[2]], [[4, 6]]]
    """
    return structure.sub_operators(update, "update")


def updated(
    operators: Sequence[Array], update: Array, structure: BipartiteStructure | DirectedStructure
) -> list[Array]:
    """The sub-operators after a global update ΔW: W_i − γ_i⁻¹(P ΔW Qᵀ)π_iᵀ.

    Bit for bit what the same update does to these weights in the whole matrix. What ΔW holds between blocks is lost:
    there is no weight for it.

    >>> from crystallite import decompose
    >>> w = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    >>> [part.tolist() for part in updated(redistribute(w, decompose(w)), np.full((2, 3), 0.5), decompose(w))]
    [[[0.5]], [[0.5, 0.5]]]
    """
    parts = redistribute(update, structure)
    shapes = [[tuple(part.shape) for part in side] for side in (parts, operators)]
    if shapes[0] != shapes[1]:
        raise InvalidMatrix(f"operators: expected shapes {shapes[0]}, as the structure has, got {shapes[1]}")
    return [operator - part for operator, part in zip(operators, parts, strict=True)]


def mask_gradients(model: nn.Module, masks: Mapping[str, Tensor] | None = None) -> list[RemovableHandle]:
    """Let gradients reach only the weights that are kept; returns handles whose `remove()` ends it.

    masks: bool by parameter name; by default the nonzeros of every parameter that is a matrix and has zeros. Pruned
    weights then have gradient 0 from the first step on, so moments of optimizers stay 0 and the weights stay zero.

    >>> import torch
    >>> layer = nn.Linear(2, 1, bias=False)
    >>> with torch.no_grad():
    ...     layer.weight[0, 1] = 0
    >>> _ = mask_gradients(layer)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> layer.weight.grad.tolist()
    [[1.0, 0.0]]
    """
    parameters = dict(model.named_parameters())
    if masks is None:
        masks = {n: p.detach() != 0 for n, p in parameters.items() if p.ndim > 1 and bool((p.detach() == 0).any())}
    handles = []
    for name, mask in masks.items():
        parameter = parameters.get(name)
        if parameter is None or parameter.shape != mask.shape:
            got = "no such parameter" if parameter is None else f"a parameter of shape {tuple(parameter.shape)}"
            raise InvalidOption(f"{name}: expected a parameter of shape {tuple(mask.shape)}, got {got}")
        if parameter.requires_grad:
            handles.append(parameter.register_hook(_Masked(mask)))
    return handles


class _Masked:
    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def __call__(self, gradient: Tensor) -> Tensor:
        return gradient.masked_fill(~self.mask.to(gradient.device), 0)
