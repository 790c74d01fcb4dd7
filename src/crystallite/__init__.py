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
from crystallite.models.artifact import LoadedBlock, load, load_block, save
from crystallite.models.manifest import attach_verdict, read_manifest, source_sha256
from crystallite.models.record import CompressedOptions, ExactOptions, LayerChange, Record, UpgradedOptions, record
from crystallite.models.summary import summary
from crystallite.models.transformers_hook import register_reader as _register_reader
from crystallite.monitoring import StructureMonitor
from crystallite.operators.chain import BlockChain
from crystallite.operators.conv import BlockConv
from crystallite.operators.feed_forward import BlockFeedForward
from crystallite.operators.linear import BlockLinear
from crystallite.operators.low_rank_recurrent import LowRankRecurrent
from crystallite.operators.recurrent import BlockRecurrent
from crystallite.reorganization.restore import restore
from crystallite.reorganization.rewrite import reorganize
from crystallite.reorganization.subnetworks import Subnetworks, subnetworks
from crystallite.report import Report, report
from crystallite.separation import upgrade
from crystallite.serving import Service
from crystallite.structure.bipartite import BipartiteStructure
from crystallite.structure.decompose import decompose
from crystallite.structure.directed import DirectedStructure
from crystallite.structure.hubs import BorderedStructure, hubs
from crystallite.structure.levels import DirectedProfile, LevelProfile, level_profile
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
    "BorderedStructure",
    "CheckpointError",
    "CompressedOptions",
    "CrystalliteError",
    "DirectedProfile",
    "DirectedStructure",
    "Embedding",
    "ExactOptions",
    "Exported",
    "InvalidMap",
    "InvalidMatrix",
    "InvalidOption",
    "LayerChange",
    "LevelProfile",
    "LoadedBlock",
    "LowRankRecurrent",
    "MatrixAnalysis",
    "Modules",
    "Permutation",
    "Projection",
    "Record",
    "Report",
    "Service",
    "StructureMonitor",
    "Subnetworks",
    "Sweep",
    "Table",
    "UpgradedOptions",
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
    "record",
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
