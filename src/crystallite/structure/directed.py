"""What a feedback matrix falls into: strongly connected blocks, their layers and their weak components."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from crystallite.core.drawing import Drawing
from crystallite.core.maps import Permutation, Projection
from crystallite.core.tables import Table
from crystallite.structure.channels import Array, Channels
from crystallite.structure.figures import directed_figure
from crystallite.structure.strong import unpacked

__all__ = ["DirectedStructure"]


@dataclass(frozen=True, eq=False, repr=False)
class DirectedStructure(Channels):
    """Frobenius form of a feedback matrix (eqs. 4.3, 4.4), where W(i, j) ≠ 0 means j → i.

    SCCs are numbered by their first node, weak components by theirs; layer 0 depends on nothing else.

    >>> from crystallite import decompose
    >>> decompose(np.array([[0, 1, 0], [1, 0, 0], [0, 1, 0]]), kind="directed")
    DirectedStructure(3 nodes: 2 SCCs, largest 2; 1 weak component, 2 layers, 0 isolated)
    """

    scc: np.ndarray  # (nodes,) strongly connected component of each node
    component: np.ndarray  # (nodes,) weakly connected component
    layer: np.ndarray  # (nodes,) layer of the node's SCC in the condensation
    isolated: np.ndarray  # (nodes,) no edge at all, not even to itself: the dormant neurons
    condensation_words: np.ndarray  # the condensation as a bit matrix, 1/8 of a Boolean one

    def __post_init__(self) -> None:
        for field in (self.scc, self.component, self.layer, self.isolated, self.condensation_words):
            field.flags.writeable = False

    @property
    def size(self) -> int:
        return len(self.scc)

    @property
    def shape(self) -> tuple[int, int]:
        return self.size, self.size

    @property
    def n_scc(self) -> int:
        """Order k of the condensation."""
        return len(self.condensation_words)

    @property
    def n_components(self) -> int:
        """Weakly connected components, isolated nodes included."""
        return int(self.component.max(initial=-1)) + 1

    @property
    def n_layers(self) -> int:
        return int(self.layer.max(initial=-1)) + 1

    @cached_property
    def P(self) -> Permutation:
        """Node permutation: by component, layer, SCC; isolated nodes last. `P @ W @ P.T` is block lower triangular."""
        return Permutation(np.lexsort((self.scc, self.layer, self.component, self.isolated)))

    @property
    def Q(self) -> Permutation:
        """P: rows and columns are the same nodes."""
        return self.P

    @cached_property
    def components(self) -> list[np.ndarray]:
        """Nodes of each weak component in the order of P: the sub-operators W^1 … W^m, isolated nodes left out."""
        order = self.P.source[: self.size - int(self.isolated.sum())].copy()
        return np.split(order, np.flatnonzero(np.diff(self.component[order])) + 1) if len(order) else []

    @cached_property
    def channel_shapes(self) -> np.ndarray:
        """(m, 2): nodes of each weak component, twice."""
        return np.array([[len(nodes)] * 2 for nodes in self.components], np.intp).reshape(-1, 2)

    @cached_property
    def blocks(self) -> list[np.ndarray]:
        """Nodes of each SCC in the order of P: the diagonal (Frobenius) blocks, isolated nodes left out."""
        order = self.P.source[: self.size - int(self.isolated.sum())].copy()
        return np.split(order, np.flatnonzero(np.diff(self.scc[order])) + 1) if len(order) else []

    @cached_property
    def frobenius_counts(self) -> list[tuple[int, int]]:
        """(p, q) of each weak component: its independent blocks, which hear no other, and the dependent ones."""
        first = np.array([nodes[0] for nodes in self.blocks], np.intp)
        which = np.unique(self.component[first], return_inverse=True)[1]  # components ascend in the order of P
        p, q = (
            np.bincount(which[side], minlength=len(self.components))
            for side in (self.layer[first] == 0, self.layer[first] > 0)
        )
        return list(zip(p.tolist(), q.tolist(), strict=True))

    def diagonal_blocks(self, matrix: Array) -> list[Array]:
        """D_11, D_22, … of a matrix in the order of P, as copies: its irreducible blocks, isolated nodes left out."""
        self._check(matrix, "matrix")
        return [Projection(nodes, self.size).submatrix(matrix) for nodes in self.blocks]

    def communication(self, matrix: Array) -> dict[tuple[int, int], Array]:
        """U_ij of a matrix by (i, j), as copies: what block i hears from block j, both numbered in the order of P.

        Only pairs with an edge are there. W(i, j) is the edge j → i, so that j < i: the blocks lie below the diagonal.

        Args:
            matrix: NumPy array or torch tensor of the structure's shape.

        Raises:
            InvalidMatrix: The shape is another one.

        Examples:
            >>> from crystallite import decompose
            >>> w = np.array([[0, 1, 0], [1, 0, 0], [0, 5, 0]])
            >>> {pair: block.tolist() for pair, block in decompose(w, "directed").communication(w).items()}
            {(1, 0): [[0, 5]]}
        """
        self._check(matrix, "matrix")
        number = {int(self.scc[nodes[0]]): i for i, nodes in enumerate(self.blocks)}
        pairs = sorted((number[p], number[q]) for p, q in np.argwhere(self.condensation).tolist())
        sides = [Projection(nodes, self.size) for nodes in self.blocks]
        return {(i, j): sides[i].submatrix(matrix, sides[j]) for i, j in pairs}

    @cached_property
    def condensation(self) -> np.ndarray:
        """M_C (k, k) Boolean: entry (p, q) is True where SCC q feeds SCC p. Unpacked when first asked for."""
        return unpacked(self.condensation_words, self.n_scc)

    @property
    def largest_share(self) -> float:
        """Nodes in the largest SCC as a share of all."""
        return float(np.bincount(self.scc, minlength=1).max()) / max(1, self.size)

    def table(self, literal: bool = False) -> Table:
        """The paper's table V (section 8.2), sorted by NewIndex, counted from 1.

        Deviates from the pseudo-code in two places, neither of which the paper's example shows: isolated nodes come
        last whatever their component (the pseudo-code sorts by G_TAG first, so that they stand between the blocks of
        eq. PWPT), and a node with an edge to itself is a 1×1 block, not isolated (I_TAG counts nodes of a component).

        Args:
            literal: Print what the pseudo-code prints instead, steps 8-2, 11 and 12 as they stand. P stays as it is.

        Returns:
            Columns Index, S_TAG, G_TAG, L_TAG, I_TAG, NewIndex.
        """
        order, isolated = self.P.source, self.isolated
        if literal:
            alone = np.bincount(self.component, minlength=1)[self.component] == 1
            isolated = alone & (self.n_scc != 1)  # step 8-2 jumps over step 11
            order = np.lexsort((self.scc, self.layer, isolated, self.component))
        tags = (self.scc + 1, self.component + 1, self.layer + 1, isolated.astype(np.intp))
        return Table(
            ("Index", "S_TAG", "G_TAG", "L_TAG", "I_TAG", "NewIndex"),
            np.column_stack([order + 1, *(tag[order] for tag in tags), np.arange(1, self.size + 1)]),
        )

    def plot(self, w: Array | None = None) -> Drawing:
        """A picture of PWPᵀ (weak components, D_ii, U_ij, isolated nodes) beside the condensation by layers.

        Args:
            w: The matrix, for the shades of its entries; without it only the blocks are outlined.

        Returns:
            A drawing with `svg()`, `png()`, `save(path)` and a text alternative; notebooks show it.
        """
        return directed_figure(self, w)

    def _repr_html_(self) -> str:
        return self.plot().svg()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DirectedStructure):
            return NotImplemented
        mine, theirs = ((s.scc, s.component, s.layer, s.isolated, s.condensation_words) for s in (self, other))
        return all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))

    def __repr__(self) -> str:
        largest = np.bincount(self.scc, minlength=1).max()
        sccs = f"{self.n_scc} SCC{'s' * (self.n_scc != 1)}, largest {largest}"
        weak = f"{self.n_components} weak component{'s' * (self.n_components != 1)}"
        layers = f"{self.n_layers} layer{'s' * (self.n_layers != 1)}"
        return f"DirectedStructure({self.size} nodes: {sccs}; {weak}, {layers}, {int(self.isolated.sum())} isolated)"
