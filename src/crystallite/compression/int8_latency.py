"""What a layer costs in time once it is exported with 8-bit weights: measured in ONNX Runtime."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crystallite.compression.latency import RUNS, Latency
from crystallite.compression.operator_specs import OperatorSpec
from crystallite.compression.session import Session
from crystallite.core.errors import CrystalliteError
from crystallite.graph.neuron_groups import NeuronGroup
from crystallite.operators.conv import Convolution
from crystallite.statistics.layer_io import matrix_of

__all__ = ["Int8Latency"]


class Int8Latency(Latency):
    """The same for layers that `cx.export(…, int8=True)` writes as products of 8-bit integers.

    A low rank is two of them, and activations are quantised before each, so fewer neurons are cheaper than a low rank
    of as many multiply-adds. Layers around attention heads are written whole. What is not quantised, convolutions and
    blocks, is timed in PyTorch.
    """

    def __init__(self, session: Session, groups: Sequence[NeuronGroup] = ()) -> None:
        try:
            import onnx
            import onnxruntime
        except ImportError:
            raise CrystalliteError(
                "objective=\"int8\" measures in ONNX Runtime: pip install 'crystallite[onnx]'"
            ) from None
        self._onnx, self._runtime = onnx, onnxruntime
        super().__init__(session, groups)

    @property
    def rest(self) -> float:
        """Nothing: what the rest of the model takes in ONNX Runtime is not measured, so the budget is of the layers."""
        return 0.0

    def _measured(self, module: Any, x: Tensor, spec: OperatorSpec, outputs: int, inputs: int, embedded: bool) -> float:
        if spec.blocks or isinstance(module, Convolution):
            return super()._measured(module, x, spec, outputs, inputs, embedded)
        outputs, inputs = matrix_of(module).shape if embedded else (outputs, inputs)
        sizes = [inputs, spec.rank, outputs] if spec.rank else [inputs, outputs]
        fed = {"x0": x[..., :inputs].float().flatten(0, -2).numpy()}
        session, best = self._session(sizes), math.inf
        for _ in range(1 + RUNS):
            start = time.perf_counter()
            session.run(None, fed)
            best = min(best, time.perf_counter() - start)
        return best

    def _session(self, sizes: list[int]) -> Any:
        """Products one after the other, of matrices of these sizes."""
        helper, float32 = self._onnx.helper, self._onnx.TensorProto.FLOAT
        nodes, constants = [], []
        for i, (read, written) in enumerate(pairwise(sizes)):
            values = {f"w{i}": np.ones((read, written), np.int8), f"s{i}": np.ones(written, np.float32)}
            constants += [self._onnx.numpy_helper.from_array(value, name) for name, value in values.items()]
            names = [f"x{i}", f"w{i}", f"s{i}"]
            nodes.append(helper.make_node("DynamicQuantizeMatMul", names, [f"x{i + 1}"], domain="com.microsoft"))
        ends = [helper.make_tensor_value_info(f"x{i}", float32, ["n", sizes[i]]) for i in (0, len(sizes) - 1)]
        graph = helper.make_graph(nodes, "layer", ends[:1], ends[1:], constants)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        options = self._runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        model = helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
        return self._runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
