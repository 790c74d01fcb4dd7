"""Structure while it forms: what annealing, decomposition and the functional map say over the steps of a training."""

from crystallite.monitoring.monitor import StructureMonitor

__all__ = ["StructureMonitor"]
