"""From a checkpoint or a module to named matrices and what each of them means."""

from crystallite.weights.checkpoint import Checkpoint, TensorInfo, open_checkpoint
from crystallite.weights.layers import Layer, recognise

__all__ = ["Checkpoint", "Layer", "TensorInfo", "open_checkpoint", "recognise"]
