"""`Signature`: what a model takes and returns, and the checks of a request before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from crystallite.core.errors import InvalidOption
from crystallite.serving.network import Network
from crystallite.serving.refusal import Refusal

__all__ = ["DATATYPES", "Signature"]

# names in the Open Inference Protocol
DATATYPES = {
    torch.float64: "FP64", torch.float32: "FP32", torch.float16: "FP16", torch.bfloat16: "BF16", torch.int64: "INT64",
}  # fmt: skip


@dataclass(frozen=True)
class Signature:
    """One input and one output, both with a first axis that counts samples."""

    input_shape: tuple[int, ...]  # of one sample
    input_dtype: torch.dtype
    output_shape: tuple[int, ...]
    output_dtype: torch.dtype
    vocabulary: int | None = None  # integers must stay below it

    @classmethod
    def of(cls, model: nn.Module, network: Network, shape: tuple[int, ...] | None) -> Signature:
        """What the model takes, by its first layer or by the `shape` of a sample, and what it returns, by running it.

        The runs also compile the kernels, so that the first request does not wait for them.
        """
        first = next((m for m in model.modules() if any(True for _ in m.parameters(recurse=False))), model)
        inside = next((m for m in model.modules() if isinstance(getattr(m, "in_features", None), int)), None)
        vocabulary = first.num_embeddings if isinstance(first, nn.Embedding) else None
        if shape is None:
            if inside is None or not (inside is first or any(m is first for m in inside.modules())):
                raise InvalidOption(f"cannot tell a sample's shape from a {type(first).__name__}: say it, shape=(…)")
            shape = (int(inside.in_features),)  # type: ignore[arg-type]
        dtype = next(parameter.dtype for parameter in model.parameters())
        if vocabulary is not None:
            dtype = torch.int64
        if dtype not in DATATYPES:
            raise InvalidOption(f"expected a model of {', '.join(DATATYPES.values())}, got {dtype}")
        for batch in (1, 4):  # few samples and many run in different kernels
            try:
                y = network(torch.zeros(batch, *shape, dtype=dtype))
            except Exception as error:  # whatever the model's own code raises
                text = f"the model does not take samples of shape {shape} as its only input: {error}"
                raise InvalidOption(text) from None
            if not isinstance(y, Tensor) or y.ndim < 1 or len(y) != batch or y.dtype not in DATATYPES:
                raise InvalidOption(f"expected a model that returns one tensor with a row per sample, got {_what(y)}")
        return cls(tuple(shape), dtype, tuple(y.shape[1:]), y.dtype, vocabulary)

    def check(self, x: Tensor) -> None:
        """Refuse an input of another shape or datatype, or with numbers that are not finite."""
        expected = ["samples", *map(str, self.input_shape)]
        if x.dtype != self.input_dtype:
            found = DATATYPES.get(x.dtype, str(x.dtype))
            raise Refusal(400, f"input: expected datatype {DATATYPES[self.input_dtype]}, got {found}")
        if tuple(x.shape[1:]) != self.input_shape or not x.ndim or not len(x):
            raise Refusal(400, f"input: expected shape [{', '.join(expected)}], got {list(x.shape)}")
        if self.vocabulary is not None and not (int(x.min()) >= 0 and int(x.max()) < self.vocabulary):
            raise Refusal(400, f"input: expected integers from 0 to {self.vocabulary - 1}")
        if x.is_floating_point() and not bool(x.isfinite().all()):
            raise Refusal(400, "input: expected finite numbers, got NaN or infinity")


def _what(y: object) -> str:
    return f"{y.dtype} of shape {list(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
