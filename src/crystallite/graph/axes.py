"""Which axes of which tensors share one order of neurons: union-find over axes that can be split and joined."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

__all__ = ["Axes", "Axis"]

Axis = tuple[int, ...]  # the pieces an axis is the product of, outermost first; an axis of length 1 has none


class Axes:
    """Pieces of axes, each a set of neurons whose order may change wherever the piece occurs at once.

    A piece that lies `within` others has an order of its own for each of their elements: a head's features for each
    head. A piece may also turn out to be a concatenation of axes. Whatever is not understood is fixed for good.

    >>> axes = Axes()
    >>> hidden, heads = axes.new(12), axes.new(3)
    >>> split = axes.reshape([hidden], [3, 4])  # features as heads × features of a head
    >>> axes.join(split[0], heads)
    >>> axes.fix(heads, "a graph input")
    >>> [axes.reason[piece] for piece in axes.pieces(hidden)]
    ['a graph input', '']
    """

    def __init__(self) -> None:
        self.size: list[int] = []
        self.reason: list[str] = []  # why the order must stay, or an empty string
        self.within: list[Axis] = []
        self._same: list[int] = []  # union-find
        self._product: dict[int, Axis] = {}  # a piece that was split, as its two factors
        self._parts: dict[int, list[Axis]] = {}  # a piece that is a concatenation

    def new(self, size: int, reason: str = "", within: Axis = ()) -> Axis:
        """A new axis of one piece."""
        if size == 1:
            return ()
        self.size.append(size)
        self.reason.append(reason)
        self.within.append(within)
        self._same.append(len(self._same))
        return (len(self._same) - 1,)

    def pieces(self, axis: Axis) -> Axis:
        """The axis as the pieces known today."""
        found: list[int] = []
        for piece in axis:
            root = self._root(piece)
            found += self.pieces(self._product[root]) if root in self._product else (root,)
        return tuple(found)

    def length(self, axis: Axis) -> int:
        return math.prod(self.size[piece] for piece in axis)

    def parts(self, axis: Axis) -> list[Axis]:
        """The axes that this one is the concatenation of; itself, where it is none."""
        axis = self.pieces(axis)
        if len(axis) != 1 or axis[0] not in self._parts:
            return [axis]
        return [part for member in self._parts[axis[0]] for part in self.parts(member)]

    def fix(self, axis: Axis, reason: str) -> None:
        """Keep the order of this axis as it is; the first reason given is remembered."""
        for piece in self.pieces(axis):
            self.reason[piece] = self.reason[piece] or reason
            self.within[piece] = ()
            for part in self._parts.pop(piece, []):
                self.fix(part, reason)

    def join(self, one: Axis, other: Axis) -> None:
        """Give two axes of equal length the same order."""
        one, other = self.pieces(one), self.pieces(other)
        while one and other:
            big, small = (one, other) if self.size[one[0]] >= self.size[other[0]] else (other, one)
            outer, rest = self.size[small[0]], self.size[big[0]]
            if rest == outer:
                self._unite(one[0], other[0])
                one, other = self.pieces(one[1:]), self.pieces(other[1:])
            elif outer and rest % outer == 0:
                self._split(big[0], outer)
                one, other = self.pieces(one), self.pieces(other)
            else:
                break
        self.fix(one + other, "it is cut into heads or groups in two ways that do not fit")

    def reshape(self, axes: Sequence[Axis], shape: Iterable[int]) -> list[Axis]:
        """The axes of a tensor seen in another shape."""
        shape = list(shape)
        waiting = self.pieces(sum(axes, ()))
        result: list[Axis] = []
        for size in shape:
            axis: Axis = ()
            while size > 1:
                piece, waiting = waiting[0], waiting[1:]
                if self.size[piece] > size and self.size[piece] % size == 0:
                    self._split(piece, size)
                    piece, *rest = self.pieces((piece,))
                    waiting = self.pieces((*rest, *waiting))
                if not self.size[piece] or size % self.size[piece]:
                    reason = "a reshape mixes it with other axes"
                    self.fix(sum(axes, ()), reason)
                    return [self.new(s, reason) for s in shape]
                axis += (piece,)
                size //= self.size[piece]
            result.append(axis)
        return result

    def concatenate(self, axes: Sequence[Axis]) -> Axis:
        """One axis after the other."""
        whole = self.new(sum(map(self.length, map(self.pieces, axes))))
        if all(axes):
            for axis in axes:
                self._detach(axis)
            self._parts[whole[0]] = list(axes)
        else:  # a part of length 1 stays where it is, and so must the others
            self._fix_all([whole, *axes], "a concatenation mixes it with other axes")
        return whole

    def cut(self, axis: Axis, sizes: Sequence[int]) -> list[Axis]:
        """Consecutive ranges of an axis, as axes."""
        parts = [self.new(size) for size in sizes]
        whole = self.pieces(axis)
        if len(whole) == 1 and len(parts) > 1 and self.size[whole[0]] == sum(sizes):
            self.join(whole, self.concatenate(parts))
        else:
            self._fix_all([axis, *parts], "only a range of it is read")
        return parts

    def check(self, axes: Sequence[Axis]) -> None:
        """One order for all elements of an axis that this tensor does not have, or has twice."""
        axes = [self.pieces(axis) for axis in axes]
        every = sum(axes, ())
        for axis in axes:
            for place, piece in enumerate(axis):
                self.within[piece] = tuple(
                    outer
                    for outer in self.pieces(self.within[piece])
                    if outer in axis[:place] or every.count(outer) == 1
                )

    def settle(self, axis: Axis) -> None:
        """Leave only orders by which a stored tensor can be moved along one axis."""
        for part in self.parts(axis):
            self._detach(part)
            for piece in part:
                if part.count(piece) > 1 or piece in self._parts:
                    self.fix((piece,), "a concatenation or product of it mixes it with other axes")

    def _detach(self, axis: Axis) -> None:
        """One order for all elements of other axes."""
        axis = self.pieces(axis)
        for place, piece in enumerate(axis):
            self.within[piece] = tuple(o for o in self.pieces(self.within[piece]) if o in axis[:place])

    def _root(self, piece: int) -> int:
        while self._same[piece] != piece:
            self._same[piece] = piece = self._same[self._same[piece]]
        return piece

    def _fix_all(self, axes: Iterable[Axis], reason: str) -> None:
        for axis in axes:
            self.fix(axis, reason)

    def _split(self, piece: int, outer: int) -> None:
        if piece in self._parts:
            self.fix((piece,), "a reshape mixes parts of a concatenation")
        reason, within = self.reason[piece], self.within[piece]
        heads = self.new(outer, reason, within)
        inside = self.new(self.size[piece] // outer, reason, () if reason else within + heads)
        self._product[piece] = heads + inside

    def _unite(self, one: int, other: int) -> None:
        if one == other:
            return
        allowed = self.pieces(self.within[one])
        self.within[other] = tuple(outer for outer in self.pieces(self.within[other]) if outer in allowed)
        reason = self.reason[one] or self.reason[other]
        if reason:
            self._fix_all([(one,), (other,)], reason)
        first, second = self._parts.get(one), self._parts.get(other)
        if first and second:
            if [self.length(self.pieces(a)) for a in first] != [self.length(self.pieces(a)) for a in second]:
                self._fix_all([(one,), (other,)], "two concatenations of it do not fit")
            else:
                for a, b in zip(first, second, strict=True):
                    self.join(a, b)
        elif first:
            self._parts[other] = first
        self._parts.pop(one, None)
        self._same[one] = other
