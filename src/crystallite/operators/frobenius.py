"""The order of hidden units that puts a recurrent layer into Frobenius normal form (paper, eq. EQ:Frobenius).

Units that feed each other in a circle stand together, after all they listen to; what lies between such blocks points
forward only. So each block can run through the whole sequence before the next one starts, and what the next one hears
from it is one matrix product over all time steps.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from crystallite.core.errors import InvalidOption
from crystallite.structure.decompose import decompose

__all__ = ["Block", "FrobeniusForm", "InputBlock", "Maps", "frobenius_form"]


@dataclass(frozen=True)
class Block:
    """Neighbouring hidden units (in the new order) that run through time together."""

    first: int  # position of the first unit
    size: int
    depth: int  # blocks of one depth do not hear each other
    continues: bool  # whether a weakly connected component of the block before goes on in this one
    feedback: int  # how many units of the block each hears: all; 1, itself; or none
    sources: int  # how many units of other blocks it hears


@dataclass(frozen=True)
class InputBlock:
    """Neighbouring hidden units that read the same inputs, and no other units do."""

    first: int
    size: int
    columns: int  # how many inputs they read


class Maps(NamedTuple):
    """The index tables that go with a form: O(hidden units + inputs + Σ sources)."""

    order: np.ndarray  # (hidden,) the unit at each position
    component: np.ndarray  # (hidden,) weakly connected component of the unit at each position
    rank: np.ndarray  # (hidden,) ascending; units of one rank form an SCC, and none hears a higher rank
    sources: np.ndarray  # positions that the blocks hear, block after block, ascending in each
    columns: np.ndarray  # inputs that the input blocks read, block after block, ascending in each


@dataclass(frozen=True)
class FrobeniusForm:
    """The sizes of a recurrent layer in Frobenius form; which units they are is said by the `Maps`.

    Gate values of a block lie together: those of gate g of the unit at position u, in block b, at column
    gates·first(b) + g·size(b) + u − first(b).
    """

    gates: int
    hidden: int
    blocks: tuple[Block, ...]
    inputs: tuple[InputBlock, ...]

    def describe(self) -> dict[str, Any]:
        """The form as plain values."""
        blocks, inputs = ([list(astuple(b)) for b in group] for group in (self.blocks, self.inputs))
        return {"gates": self.gates, "hidden": self.hidden, "blocks": blocks, "inputs": inputs}

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> FrobeniusForm:
        """The form that was described, if its blocks lie side by side as those of a form do.

        Compiled code believes these numbers, so others are refused.

        >>> FrobeniusForm.from_description({"gates": 1, "hidden": 2, "blocks": [[0, 3, 0, False, 3, 0]], "inputs": []})
        Traceback (most recent call last):
        crystallite.core.errors.InvalidOption: form: expected blocks that fill 2 units, got one at 0 that ends at 3
        """
        hidden = description["hidden"]
        sizes = [v for group in ("blocks", "inputs") for values in description[group] for v in values]
        if not all(type(v) in (int, bool) for v in (hidden, description["gates"], *sizes)):
            raise InvalidOption("form: expected whole numbers as sizes and depths")
        blocks = tuple(Block(*values) for values in description["blocks"])
        inputs = tuple(InputBlock(*values) for values in description["inputs"])
        for group in (blocks, inputs):
            stop = 0
            for block in group:
                if block.first != stop or block.size < 1 or stop + block.size > hidden:
                    came = f"one at {block.first} that ends at {block.first + block.size}"
                    raise InvalidOption(f"form: expected blocks that fill {hidden} units, got {came}")
                stop += block.size
            if group is blocks and stop != hidden:
                raise InvalidOption(f"form: expected blocks that fill {hidden} units, got blocks that end at {stop}")
        for b in blocks:
            possible = 0 <= b.depth < len(blocks) and 0 <= b.sources <= b.first
            if b.feedback not in (0, 1, b.size) or not possible or (b.continues and not b.first):
                raise InvalidOption(f"form: expected a block with a possible depth, feedback and sources, got {b}")
        starts = {b.first for b in blocks}
        if any(i.first not in starts or i.first + i.size not in {*starts, hidden} or i.columns < 1 for i in inputs):
            raise InvalidOption("form: expected input blocks that begin and end where blocks do and read inputs")
        return cls(description["gates"], hidden, blocks, inputs)

    def check_tables(self, sources: np.ndarray, columns: np.ndarray, rank: np.ndarray) -> None:
        """Refuse tables of `Maps` that go with no form: a block may hear only what has run before it.

        Compiled code runs depth after depth, and finds whatever lay in memory where nothing has been computed yet.
        """
        count = [b.sources for b in self.blocks]
        begins: list[int] = []  # where the first of the blocks that share components with this one begins
        for b in self.blocks:
            begins.append(begins[-1] if b.continues else b.first)
        first, depth = np.array([(b.first, b.depth) for b in self.blocks]).T
        depth_at = np.repeat(depth, [b.size for b in self.blocks])
        owner = np.repeat(np.arange(len(self.blocks)), count)
        wrong = (sources >= first[owner]) | (sources < np.array(begins)[owner]) | (depth_at[sources] >= depth[owner])
        if wrong.any():
            at = int(np.argmax(wrong))
            block, begin = self.blocks[owner[at]], begins[owner[at]]
            raise InvalidOption(
                f"sources: expected positions from {begin} below {block.first}, of less depth than {block.depth}, for "
                f"the block at {block.first}, got {sources[at]}"
            )
        reader = np.repeat(np.arange(len(self.inputs)), [i.columns for i in self.inputs])
        for name, table, of in (("sources", sources, owner), ("columns", columns, reader)):
            if ((np.diff(table) <= 0) & (np.diff(of) == 0)).any():
                raise InvalidOption(f"{name}: expected ascending indices in each block")
        if rank[0] != 0 or not np.isin(np.diff(rank), (0, 1)).all():
            raise InvalidOption("rank: expected the numbers of components in ascending order, from 0")

    @cached_property
    def stacks(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the blocks of equal depth and size, by depth: they run together, their weights are one tensor."""
        stacks: dict[tuple[int, int, int], list[int]] = {}
        for i, block in enumerate(self.blocks):
            stacks.setdefault((block.depth, block.size, block.feedback), []).append(i)
        return tuple(tuple(stack) for _, stack in sorted(stacks.items()))

    @cached_property
    def hearing(self) -> tuple[int, ...]:
        """Indices of the blocks that hear others."""
        return tuple(i for i, block in enumerate(self.blocks) if block.sources)

    @property
    def depth(self) -> int:
        return max(block.depth for block in self.blocks) + 1

    @property
    def macs(self) -> int:
        """Multiply-accumulates for one time step of one sequence."""
        heard = sum(b.size * (b.sources + b.feedback) for b in self.blocks)
        return self.gates * (heard + sum(i.size * i.columns for i in self.inputs))

    @cached_property
    def gate_columns(self) -> np.ndarray:
        """(gates, hidden): the column of each gate of the unit at each position."""
        table = np.empty((self.gates, self.hidden), np.int64)
        for b in self.blocks:
            own = np.arange(self.gates * b.size).reshape(self.gates, b.size)
            table[:, b.first : b.first + b.size] = self.gates * b.first + own
        return table

    def bins(self, wanted: int) -> list[tuple[int, int, int]]:
        """(input block or −1, first, stop) of runs of whole components, each of about `wanted` units or one component.

        Units of different bins do not hear each other, so each bin is a recurrent layer of its own.
        """
        bounds = [(i.first, n) for n, i in enumerate(self.inputs)]
        idle = sum(i.size for i in self.inputs)
        if idle < self.hidden:
            bounds.append((idle, -1))  # units that read no input come last
        bins: list[tuple[int, int, int]] = []
        for block in self.blocks:
            reads = max(b for b in bounds if b[0] <= block.first)[1]
            stop = block.first + block.size
            if block.continues or (bins and bins[-1][0] == reads and stop - bins[-1][1] <= wanted):
                bins[-1] = (reads, bins[-1][1], stop)
            else:
                bins.append((reads, block.first, stop))
        return bins


def frobenius_form(
    edges: np.ndarray, reads: np.ndarray, gates: int = 1, smallest: int = 1
) -> tuple[FrobeniusForm, Maps]:
    """Frobenius form of a layer with `edges[i, j]` where unit i hears unit j and `reads[i, j]` where it reads input j.

    Weak components that share inputs stand together (the bipartite blocks of components × inputs), in each of them
    component after component, by depth. Units that hear at most themselves, and otherwise the same blocks, are one
    block: nothing in it needs a matrix. Neighbouring blocks of up to `smallest` units in all become one. O(n²).

    >>> hears = np.array([[1, 0, 0], [1, 1, 1], [0, 1, 1]], bool)
    >>> form, maps = frobenius_form(hears, np.ones((3, 2), bool))
    >>> [(b.size, b.depth, b.sources) for b in form.blocks], maps.order
    ([(1, 0, 0), (2, 1, 1)], array([0, 1, 2]))
    """
    structure = decompose(edges, kind="directed", name="recurrent mask")
    scc, weak, hidden = structure.scc, structure.component, structure.size
    input_block, column_block = _input_blocks(weak, reads)
    single = np.bincount(scc)[scc] == 1
    hears = np.zeros(hidden, np.intp)  # equal where single units hear the same blocks
    if single.any():
        hears[single] = np.unique(structure.condensation_words[scc[single]], axis=0, return_inverse=True)[1].ravel()
    keys = (
        np.where(single, -1 - edges.diagonal().astype(np.intp), scc),
        hears,
        structure.layer,
        np.where(np.bincount(weak)[weak] == 1, hidden, weak),  # components of one unit stand together
        input_block,  # the most important
    )
    order = np.lexsort(keys)
    bounds = _merged(_changes(*(key[order] for key in keys)), set(_changes(input_block[order])), hidden, smallest)
    blocks, sources = _blocks(edges[order][:, order], weak[order], bounds)
    columns = [np.flatnonzero(column_block == i) for i in range(int(column_block.max(initial=-1)) + 1)]
    firsts = np.searchsorted(input_block[order], np.arange(len(columns) + 1)).tolist()
    inputs = tuple(InputBlock(f, g - f, len(c)) for (f, g), c in zip(pairwise(firsts), columns, strict=True))
    rank = np.zeros(hidden, np.int64)
    rank[_changes(scc[order])[1:]] = 1
    tables = (order, weak[order], np.cumsum(rank), np.concatenate(sources), np.concatenate([*columns, order[:0]]))
    return FrobeniusForm(gates, hidden, blocks, inputs), Maps(*(table.astype(np.int64) for table in tables))


def _changes(*labels: np.ndarray) -> list[int]:
    """Where a run of equal labels begins."""
    table = np.stack(labels)
    return [0, *(np.flatnonzero((table[:, 1:] != table[:, :-1]).any(0)) + 1).tolist()]


def _merged(starts: list[int], walls: set[int], hidden: int, smallest: int) -> list[tuple[int, int]]:
    """(first, stop) of blocks, neighbours joined up to `smallest` units, but not across a wall."""
    bounds: list[tuple[int, int]] = []
    for first, stop in pairwise([*starts, hidden]):
        if bounds and first not in walls and stop - bounds[-1][0] <= smallest:
            bounds[-1] = (bounds[-1][0], stop)
        else:
            bounds.append((first, stop))
    return bounds


def _blocks(
    edges: np.ndarray, component: np.ndarray, bounds: list[tuple[int, int]]
) -> tuple[tuple[Block, ...], list[np.ndarray]]:
    """The blocks at these bounds of edges in Frobenius form, and the positions that each hears outside of it."""
    blocks: list[Block] = []
    sources = []
    depth = np.zeros(len(edges), np.intp)
    for first, stop in bounds:
        rows = edges[first:stop]
        heard = np.flatnonzero(rows[:, :first].any(0))  # nobody hears what comes later
        depth[first:stop] = depth[heard].max(initial=-1) + 1
        own = rows[:, first:stop]
        feedback = int(own.any()) if not (own & ~np.eye(stop - first, dtype=bool)).any() else stop - first
        continues = first > 0 and bool(component[first] == component[first - 1])
        blocks.append(Block(first, stop - first, int(depth[first]), continues, feedback, len(heard)))
        sources.append(heard)
    return tuple(blocks), sources


def _input_blocks(component: np.ndarray, reads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bipartite block of each unit and of each input; units that read nothing get the highest number."""
    by_component = np.argsort(component, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(component[by_component]) != 0])
    structure = decompose(np.logical_or.reduceat(reads[by_component], starts, axis=0), name="input mask")
    rows = np.where(structure.row_block < 0, structure.n_blocks, structure.row_block)
    return rows[component], structure.col_block
