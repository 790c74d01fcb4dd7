"""Take trained neural networks apart along the structure that training left in them."""

from crystallite.analysis import Analysis, MatrixAnalysis, analyze
from crystallite.annealing import nulls
from crystallite.annealing.anneal import Annealing, anneal
from crystallite.compression.compress import compress
from crystallite.core.errors import CheckpointError, CrystalliteError, InvalidMap, InvalidMatrix, InvalidOption
from crystallite.core.maps import Embedding, Permutation, Projection
from crystallite.core.tables import Table
from crystallite.discovery import Modules, discover
from crystallite.export.onnx import Exported, export
from crystallite.models.artifact import (
    LoadedBlock,
    attach_verdict,
    load,
    load_block,
    read_manifest,
    save,
    source_sha256,
)
from crystallite.models.summary import summary
from crystallite.models.transformers_folder import register_reader as _register_reader
from crystallite.monitoring import StructureMonitor
from crystallite.operators.chain import BlockChain
from crystallite.operators.conv import BlockConv
from crystallite.operators.coupled import BorderedLinear, CoupledLinear
from crystallite.operators.feed_forward import BlockFeedForward
from crystallite.operators.linear import BlockLinear
from crystallite.operators.low_rank_recurrent import LowRankRecurrent
from crystallite.operators.recurrent import BlockRecurrent
from crystallite.reorganization.restore import restore
from crystallite.reorganization.rewrite import reorganize
from crystallite.reorganization.subnetworks import Subnetworks, subnetworks
from crystallite.report import Report, report
from crystallite.separation import Upgrading, upgrade
from crystallite.serving import Service
from crystallite.structure.bipartite import BipartiteStructure
from crystallite.structure.decompose import decompose
from crystallite.structure.directed import DirectedStructure
from crystallite.structure.directed_levels import DirectedProfile
from crystallite.structure.hubs import BorderedStructure, hubs
from crystallite.structure.levels import LevelProfile, level_profile
from crystallite.validation import Sweep, Verdict, sweep, validate

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
    "Exported",
    "InvalidMap",
    "InvalidMatrix",
    "InvalidOption",
    "LevelProfile",
    "LoadedBlock",
    "LowRankRecurrent",
    "MatrixAnalysis",
    "Modules",
    "Permutation",
    "Projection",
    "Report",
    "Service",
    "StructureMonitor",
    "Subnetworks",
    "Sweep",
    "Table",
    "Upgrading",
    "Verdict",
    "analyze",
    "anneal",
    "attach_verdict",
    "compress",
    "decompose",
    "discover",
    "export",
    "hubs",
    "level_profile",
    "load",
    "load_block",
    "nulls",
    "read_manifest",
    "reorganize",
    "report",
    "restore",
    "save",
    "source_sha256",
    "subnetworks",
    "summary",
    "sweep",
    "upgrade",
    "validate",
]

_register_reader()  # `from_pretrained` of transformers understands reorganized models
