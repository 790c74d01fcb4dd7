"""Take trained neural networks apart along the structure that training left in them."""

from crystallite.analysis import Analysis, MatrixAnalysis, analyze
from crystallite.annealing import nulls
from crystallite.annealing.anneal import Annealing, anneal
from crystallite.artifact import load, load_block, save
from crystallite.errors import CheckpointError, CrystalliteError, InvalidMap, InvalidMatrix, InvalidOption
from crystallite.maps import Embedding, Permutation, Projection
from crystallite.operators.chain import BlockChain
from crystallite.operators.conv import BlockConv
from crystallite.operators.coupling import BorderedLinear, CoupledLinear
from crystallite.operators.feedforward import BlockFeedForward
from crystallite.operators.linear import BlockLinear
from crystallite.operators.recurrent import BlockRecurrent
from crystallite.reorganization.rewrite import reorganize
from crystallite.reorganization.summary import summary
from crystallite.structure.bipartite import BipartiteStructure
from crystallite.structure.decompose import decompose
from crystallite.structure.directed import DirectedStructure
from crystallite.structure.hubs import BorderedStructure, hubs
from crystallite.structure.levels import DirectedProfile, LevelProfile, level_profile
from crystallite.tables import Table

__all__ = [
    "Analysis",
    "Annealing",
    "BipartiteStructure",
    "BlockChain",
    "BlockConv",
    "BlockFeedForward",
    "BlockLinear",
    "BlockRecurrent",
    "BorderedLinear",
    "BorderedStructure",
    "CheckpointError",
    "CoupledLinear",
    "CrystalliteError",
    "DirectedProfile",
    "DirectedStructure",
    "Embedding",
    "InvalidMap",
    "InvalidMatrix",
    "InvalidOption",
    "LevelProfile",
    "MatrixAnalysis",
    "Permutation",
    "Projection",
    "Table",
    "analyze",
    "anneal",
    "decompose",
    "hubs",
    "level_profile",
    "load",
    "load_block",
    "nulls",
    "reorganize",
    "save",
    "summary",
]
