"""The data-free analysis of a whole checkpoint: one row per matrix, and a verdict."""

from crystallite.analysis.matrix import MatrixAnalysis
from crystallite.analysis.run import Analysis, analyze

__all__ = ["Analysis", "MatrixAnalysis", "analyze"]
