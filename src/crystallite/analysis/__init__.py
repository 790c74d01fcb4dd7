"""The data-free analysis of a whole checkpoint: one row per matrix and chain, and a verdict."""

from crystallite.analysis.degrees import ChainAnalysis
from crystallite.analysis.matrix import MatrixAnalysis
from crystallite.analysis.modularity import Modularity, modularity
from crystallite.analysis.run import Analysis, analyze

__all__ = ["Analysis", "ChainAnalysis", "MatrixAnalysis", "Modularity", "analyze", "modularity"]
