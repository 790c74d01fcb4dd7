"""A model as ONNX Runtime runs it, called like the model itself."""

from __future__ import annotations

import inspect
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as trees

from crystallite.data.batch import Batch
from crystallite.export.run import export
from crystallite.export.tracing import as_function

__all__ = ["InOnnxRuntime"]


class InOnnxRuntime(nn.Module):
    """An ONNX Runtime session with the interface of the model it was exported from.

    It uses as many threads as PyTorch does when it is made. int8: dynamic quantisation, as `cx.export` does it, however
    far the outputs then deviate.
    """

    def __init__(self, model: nn.Module, batch: Batch, int8: bool = False) -> None:
        """batch: inputs to trace the model with."""
        super().__init__()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            export(model, path, [(batch.arguments, None)], int8=int8, max_deviation=float("inf"))
            import onnxruntime  # export says it where it is missing

            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = torch.get_num_threads()
            options.inter_op_num_threads = 1
            # waiting threads would hold the cores that PyTorch's need in the next turn; it is as fast without
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
            self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.names = [each.name for each in self.session.get_inputs()]
        self.signature = inspect.signature(model.forward)
        without_caches, _ = as_function(model)
        leaves, self.structure = trees.tree_flatten(batch.without_target().run(without_caches))
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def forward(self, *positional: Any, **named: Any) -> Any:
        given = self.signature.bind(*positional, **named).arguments
        found = iter(self.session.run(None, {name: given[name].numpy() for name in self.names}))
        leaves = [torch.from_numpy(next(found)) if leaf is None else leaf for leaf in self.leaves]
        return trees.tree_unflatten(leaves, self.structure)
