"""The shuffled control: what the same numbers would do in random places.

Shuffling a matrix makes its k heaviest entries a uniformly random set of k places, for every k. So the blocks of a
shuffled copy need no copy: draw places at random, in order of falling magnitude, and join them. After
O((rows + cols) log) draws everything is one block and the rest cannot change it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from crystallite.core.parallel import compiled
from crystallite.structure.kernels import find

__all__ = ["Shuffled", "shuffled"]


@dataclass(frozen=True)
class Shuffled:
    """Blocks of an entry-shuffled copy after each of its heaviest entries (0 entries first)."""

    entries: int  # of the matrix
    n_blocks: np.ndarray  # (draws + 1,) blocks among the k heaviest entries
    largest_share: np.ndarray  # (draws + 1,)
    active_share: np.ndarray  # (draws + 1,)
    effective_blocks: np.ndarray  # (draws + 1,)

    def at(self, kept: int) -> int:
        """Index of the state with `kept` entries; the last one if all is joined before."""
        return min(kept, len(self.n_blocks) - 1)


def shuffled(rows: int, cols: int, seed: int = 0, feedback: bool = False) -> Shuffled:
    """One random order of the places of a rows × cols matrix, followed until all neurons are one block.

    feedback: row i and column i are the same neuron, as in a recurrent layer.
    """
    limit = rows * cols
    rng = np.random.default_rng(seed)
    most = min(limit, 40 * (rows + cols))
    first, second = rng.integers(cols, size=most), rng.integers(rows, size=most)
    history = _random_process(first, second, rows) if feedback else _random_process(first, second + cols, rows + cols)
    return Shuffled(limit, *history)


@compiled
def _random_process(first, second, nodes):
    most = first.shape[0]
    parent = np.arange(nodes).astype(np.int32)
    size = np.ones(nodes, np.int64)
    n_blocks = np.zeros(most + 1, np.int64)
    largest = np.zeros(most + 1)
    active = np.zeros(most + 1)
    effective = np.ones(most + 1)
    blocks, giant, touched, square = 0, 0, 0, 0.0
    done = most
    for k in range(1, most + 1):
        a = find(parent, np.int32(first[k - 1]))
        b = find(parent, np.int32(second[k - 1]))
        if a != b:
            blocks += 1
            for root in (a, b):
                if size[root] > 1:
                    blocks -= 1
                    square -= float(size[root]) ** 2
                else:
                    touched += 1
            parent[b] = a
            size[a] += size[b]
            giant = max(giant, size[a])
            square += float(size[a]) ** 2
        n_blocks[k] = blocks
        largest[k] = giant / nodes
        active[k] = touched / nodes
        effective[k] = float(touched) ** 2 / square if square else 1.0  # so far only a neuron with itself
        if giant == nodes:
            done = k
            break
    return n_blocks[: done + 1], largest[: done + 1], active[: done + 1], effective[: done + 1]
