"""Take trained neural networks apart along the structure that training left in them."""

from importlib import import_module
from sys import byteorder, modules
from types import ModuleType
from typing import TYPE_CHECKING, Any

from crystallite.models.transformers_hook import register_reader

if TYPE_CHECKING:
    from crystallite import baselines
    from crystallite.analysis import Analysis, ChainAnalysis, MatrixAnalysis, Modularity, analyze, modularity
    from crystallite.annealing import nulls
    from crystallite.annealing.anneal import Annealing, anneal
    from crystallite.compression.compress import compress
    from crystallite.compression.decoders.on_disk import compress_folder
    from crystallite.core.errors import (
        CheckpointError,
        CrystalliteError,
        CrystalliteWarning,
        InvalidMap,
        InvalidMatrix,
        InvalidOption,
        WriteError,
    )
    from crystallite.core.maps import Embedding, Permutation, Projection
    from crystallite.core.tables import Table
    from crystallite.data.general_text import general_text
    from crystallite.data.images import Images, images
    from crystallite.data.own_text import own_text
    from crystallite.data.text import Texts, texts
    from crystallite.discovery import Modules, discover
    from crystallite.export.gguf import ExportedGguf
    from crystallite.export.onnx import Exported
    from crystallite.export.run import export
    from crystallite.models.artifact import load, save
    from crystallite.models.block_loading import LoadedBlock, load_block
    from crystallite.models.manifest import attach_verdict, read_manifest, source_sha256
    from crystallite.models.record import CompressedOptions, ExactOptions, LayerChange, Record, UpgradedOptions, record
    from crystallite.models.summary import summary
    from crystallite.monitoring import StructureMonitor
    from crystallite.operators.attention import ExpandedAttention
    from crystallite.operators.chain import BlockChain
    from crystallite.operators.conv import BlockConv
    from crystallite.operators.feed_forward import BlockFeedForward
    from crystallite.operators.linear import BlockLinear
    from crystallite.operators.low_rank import LowRankConv, LowRankLinear
    from crystallite.operators.low_rank_recurrent import LowRankRecurrent
    from crystallite.operators.low_rank_table import LowRankEmbedding, LowRankHead
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
    from crystallite.structure.directed_levels import DirectedProfile
    from crystallite.structure.hubs import BorderedStructure, hubs
    from crystallite.structure.levels import LevelProfile, level_profile
    from crystallite.validation import BlockRoles, Sweep, Verdict, block_roles, sweep, validate

__all__ = [
    "Analysis",
    "Annealing",
    "BipartiteStructure",
    "BlockChain",
    "BlockConv",
    "BlockFeedForward",
    "BlockLinear",
    "BlockRecurrent",
    "BlockRoles",
    "BorderedStructure",
    "ChainAnalysis",
    "CheckpointError",
    "CompressedOptions",
    "CrystalliteError",
    "CrystalliteWarning",
    "DirectedProfile",
    "DirectedStructure",
    "Embedding",
    "ExactOptions",
    "ExpandedAttention",
    "Exported",
    "ExportedGguf",
    "Images",
    "InvalidMap",
    "InvalidMatrix",
    "InvalidOption",
    "LayerChange",
    "LevelProfile",
    "LoadedBlock",
    "LowRankConv",
    "LowRankEmbedding",
    "LowRankHead",
    "LowRankLinear",
    "LowRankRecurrent",
    "MatrixAnalysis",
    "Modularity",
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
    "Texts",
    "UpgradedOptions",
    "Verdict",
    "WriteError",
    "analyze",
    "anneal",
    "attach_verdict",
    "baselines",
    "block_roles",
    "compress",
    "compress_folder",
    "decompose",
    "discover",
    "export",
    "general_text",
    "hubs",
    "images",
    "level_profile",
    "load",
    "load_block",
    "modularity",
    "nulls",
    "own_text",
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
    "texts",
    "upgrade",
    "validate",
]

__version__ = "0.1.0"


def _refuse_big_endian() -> None:
    """Files and bit patterns are read where they lie, lowest byte first."""
    if byteorder == "big":
        raise ImportError("crystallite runs on little-endian machines only; this one is big-endian (s390x, some ppc64)")


_refuse_big_endian()

# Where each name comes from: modules are imported when a name of theirs is first used, so that `import crystallite` and
# `crystallite --help` do not wait for torch, numba and scipy. The imports above say the same to type checkers.
_HOME = {
    name: f"crystallite.{module}"
    for module, names in {
        "analysis": "Analysis ChainAnalysis MatrixAnalysis Modularity analyze modularity",
        "annealing.anneal": "Annealing anneal",
        "compression.compress": "compress",
        "compression.decoders.on_disk": "compress_folder",
        "core.errors": "CheckpointError CrystalliteError CrystalliteWarning InvalidMap InvalidMatrix InvalidOption "
        "WriteError",
        "core.maps": "Embedding Permutation Projection",
        "core.tables": "Table",
        "data.general_text": "general_text",
        "data.images": "Images images",
        "data.own_text": "own_text",
        "data.text": "Texts texts",
        "discovery": "Modules discover",
        "export.gguf": "ExportedGguf",
        "export.onnx": "Exported",
        "export.run": "export",
        "models.artifact": "load save",
        "models.block_loading": "LoadedBlock load_block",
        "models.manifest": "attach_verdict read_manifest source_sha256",
        "models.record": "CompressedOptions ExactOptions LayerChange Record UpgradedOptions record",
        "models.summary": "summary",
        "monitoring": "StructureMonitor",
        "operators.attention": "ExpandedAttention",
        "operators.chain": "BlockChain",
        "operators.conv": "BlockConv",
        "operators.feed_forward": "BlockFeedForward",
        "operators.linear": "BlockLinear",
        "operators.low_rank": "LowRankConv LowRankLinear",
        "operators.low_rank_recurrent": "LowRankRecurrent",
        "operators.low_rank_table": "LowRankEmbedding LowRankHead",
        "operators.recurrent": "BlockRecurrent",
        "reorganization.restore": "restore",
        "reorganization.rewrite": "reorganize",
        "reorganization.subnetworks": "Subnetworks subnetworks",
        "report": "Report report",
        "separation": "upgrade",
        "serving": "Service",
        "structure.bipartite": "BipartiteStructure",
        "structure.decompose": "decompose",
        "structure.directed": "DirectedStructure",
        "structure.hubs": "BorderedStructure hubs",
        "structure.directed_levels": "DirectedProfile",
        "structure.levels": "LevelProfile level_profile",
        "validation": "BlockRoles Sweep Verdict block_roles sweep validate",
    }.items()
    for name in names.split()
}
_MODULES = {"baselines": "crystallite.baselines", "nulls": "crystallite.annealing.nulls"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'crystallite' has no attribute {name!r}", name=name, obj=modules[__name__])
    value = import_module(_MODULES[name]) if name in _MODULES else getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


class _Package(ModuleType):
    """`crystallite.report` and `crystallite.export` stay functions when the folders of these names are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _HOME or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


modules[__name__].__class__ = _Package
register_reader()  # `from_pretrained` of transformers understands reorganized models
