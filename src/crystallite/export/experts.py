"""Mixtures of experts in ONNX, which has no product of groups of rows with a matrix each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["translations"]


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Operators of transformers that torch.onnx does not know, and what writes them; none before it is imported."""
    operator = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    return {} if operator is None else {operator.default: _grouped_product}


def _grouped_product(rows: Any, weights: Any, ends: Any) -> Any:
    """Rows, sorted by expert, times the matrix of their expert; ends: where the rows of each expert end."""
    from onnxscript.onnx_opset import opset18

    op: Any = opset18  # its types know arrays only, while it also takes what is being traced
    bounds = op.Concat(op.Constant(value_ints=[0]), op.Cast(ends, to=7), axis=0)  # int64
    products = []
    for expert in range(weights.shape[0]):
        own = op.Range(op.Gather(bounds, expert), op.Gather(bounds, expert + 1), 1)
        products.append(op.MatMul(op.Gather(rows, own), op.Gather(weights, expert)))
    return op.Concat(*products, axis=0)
