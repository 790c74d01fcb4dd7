"""Take trained neural networks apart along the structure that training left in them."""

from crystallite.errors import CheckpointError, CrystalliteError, InvalidMap, InvalidMatrix, InvalidOption
from crystallite.maps import Embedding, Permutation, Projection
from crystallite.structure.bipartite import BipartiteStructure
from crystallite.structure.decompose import decompose
from crystallite.structure.directed import DirectedStructure
from crystallite.tables import Table

__all__ = [
    "BipartiteStructure",
    "CheckpointError",
    "CrystalliteError",
    "DirectedStructure",
    "Embedding",
    "InvalidMap",
    "InvalidMatrix",
    "InvalidOption",
    "Permutation",
    "Projection",
    "Table",
    "decompose",
]
