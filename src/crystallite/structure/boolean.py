"""The paper's Boolean-matrix algorithms (part II) on torch tensors: the matrix engine, on any device.

Nothing here walks a graph: products, closures and comparisons of 0/1 matrices only, O(log n) of them one after another.
It is the reference for the graph engine and the engine for accelerators; on a CPU the graph engine is far faster.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "boolean_product",
    "class_labels",
    "closure",
    "co_image",
    "co_source",
    "compression",
    "condensation",
    "layers",
    "plus_closure",
    "power",
]


def boolean_product(a: Tensor, b: Tensor) -> Tensor:
    """A ⊙ B with (A ⊙ B)(i, j) = ⋁ₖ A(i, k) ∧ B(k, j) (definition 6.1). One real product; counts stay exact to 2²⁴.

    >>> boolean_product(torch.tensor([[True, False]]), torch.tensor([[True], [True]]))
    tensor([[True]])
    """
    return (a.float() @ b.float()) > 0


def closure(a: Tensor) -> Tensor:
    """A* = I ∨ A ∨ A² ∨ …, by repeated squaring of I ∨ A (Kleene–Valiant, theorem 6.1), stopping once it is stable.

    At most ⌈log₂(n − 1)⌉ squarings are needed, none for n ≤ 2.

    >>> closure(torch.tensor([[0, 0, 0], [1, 0, 0], [0, 1, 0]], dtype=torch.bool)).int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    n = a.shape[0]
    result = a | torch.eye(n, dtype=torch.bool, device=a.device)
    for _ in range(max(n - 2, 0).bit_length()):  # ⌈log₂(n − 1)⌉
        squared = boolean_product(result, result)
        if torch.equal(squared, result):
            break
        result = squared
    return result


def power(a: Tensor, k: int) -> Tensor:
    """A^k = A ⊙ … ⊙ A (definition 6.1): where walks of exactly k edges lead; A⁰ = I. O(log k) products.

    >>> power(torch.tensor([[0, 0, 0], [1, 0, 0], [0, 1, 0]], dtype=torch.bool), 2).int().tolist()
    [[0, 0, 0], [0, 0, 0], [1, 0, 0]]
    """
    result = torch.eye(a.shape[0], dtype=torch.bool, device=a.device)
    while k:
        if k & 1:
            result = boolean_product(result, a)
        a, k = (boolean_product(a, a), k >> 1) if k > 1 else (a, 0)
    return result


def plus_closure(a: Tensor) -> Tensor:
    """A⁺ = A ∨ A² ∨ … = A ⊙ A*: paths with at least one edge, so that the diagonal says who is on a cycle.

    The printed A⁺ stops at Aⁿ⁻¹, which misses the diagonal of a cycle through all n nodes; theorem 6.1(1), A⁺ = A*,
    holds off the diagonal only (docs/paper.md).
    """
    return boolean_product(a, closure(a))


def co_source(m: Tensor) -> Tensor:
    """M_Y = M ⊙ Mᵀ: which outputs share an input (theorem 7.1)."""
    return boolean_product(m, m.T)


def co_image(m: Tensor) -> Tensor:
    """M_X = Mᵀ ⊙ M: which inputs share an output."""
    return boolean_product(m.T, m)


def class_labels(equivalence: Tensor) -> Tensor:
    """Class numbers 0, 1, … in order of their first member, from the matrix of an equivalence relation.

    The first member of i's class is the first 1 of row i; the paper's loop over unlabelled nodes gives the same.
    """
    n = equivalence.shape[0]
    if n == 0:
        return torch.zeros(0, dtype=torch.long, device=equivalence.device)
    first = equivalence.to(torch.uint8).argmax(1)
    is_first = first == torch.arange(n, device=first.device)
    return (is_first.cumsum(0) - 1)[first]


def compression(labels: Tensor, count: int) -> Tensor:
    """R with R(s, i) = 1 ⇔ node i is in class s (definitions 7.2 and 8.2)."""
    return labels == torch.arange(count, device=labels.device)[:, None]


def condensation(m: Tensor, labels: Tensor, count: int) -> Tensor:
    """M_C = (R ⊙ M ⊙ Rᵀ) ∧ ¬I (theorem 8.1)."""
    r = compression(labels, count)
    return boolean_product(boolean_product(r, m), r.T) & ~torch.eye(count, dtype=torch.bool, device=m.device)


def layers(condensed: Tensor) -> Tensor:
    """Layer of each component of an acyclic graph: the length of the longest path that ends there, sources 0.

    The paper peels off one layer after another (step 9): as many dependent steps as there are layers. Here C^(2^b)
    comes by squaring until it is zero, and then all nodes walk back at once, in steps of falling powers of 2, as long
    as a path of that length exists: 2·⌈log₂ layers⌉ products. O(k²·log layers) memory.

    >>> layers(torch.tensor([[0, 0, 0], [1, 0, 0], [0, 1, 0]], dtype=torch.bool)).tolist()
    [0, 1, 2]
    """
    count = condensed.shape[0]
    powers, square = [], condensed
    while bool(square.any()):
        powers.append(square)
        square = boolean_product(square, square)
    ends = torch.eye(count, dtype=torch.bool, device=condensed.device)  # row v: where its walk may have come to
    layer = torch.zeros(count, dtype=torch.long, device=condensed.device)
    for b in range(len(powers) - 1, -1, -1):
        further = boolean_product(ends, powers[b])
        longer = further.any(1)
        ends = torch.where(longer[:, None], further, ends)
        layer += longer.long() << b
    return layer


def bipartite_labels(m: Tensor, side: str = "smaller") -> tuple[Tensor, Tensor]:
    """Block labels of rows and columns (−1: no edge) by the co-source or co-image construction (section 7.3).

    side: "source" closes the relation on rows, "image" the one on columns, "smaller" whichever matrix is smaller.
    """
    if side == "smaller":
        side = "source" if m.shape[0] <= m.shape[1] else "image"
    if side == "image":
        cols, rows = bipartite_labels(m.T, "source")
        return rows, cols
    labels = class_labels(closure(co_source(m)))
    count = int(labels.max()) + 1 if len(labels) else 0
    domain = boolean_product(compression(labels, count), m)  # D_Y: the inputs of each class
    minus_one = torch.tensor(-1, device=m.device)
    rows = torch.where(domain.any(1)[labels], labels, minus_one) if count else labels
    if count == 0 or m.shape[1] == 0:
        return torch.full((m.shape[0],), -1, device=m.device), torch.full((m.shape[1],), -1, device=m.device)
    cols = torch.where(domain.any(0), domain.to(torch.uint8).argmax(0), minus_one)
    return rows, cols


def directed_labels(m: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """SCC label, weak component and layer of each node, and the condensation (section 8.3, steps 5 to 10)."""
    if m.shape[0] == 0:
        nothing = torch.zeros(0, dtype=torch.long, device=m.device)
        return nothing, nothing, nothing, m
    reach = closure(m)
    scc = class_labels(reach & reach.T)
    count = int(scc.max()) + 1
    condensed = condensation(m, scc, count)
    layer = layers(condensed)[scc]
    weak = class_labels(closure(condensed | condensed.T))[scc]
    return scc, weak, layer, condensed
