"""`export`: a model as a file that another runtime reads; which one, the name of the file says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from crystallite.core.errors import InvalidOption
from crystallite.core.suggest import check_choice, suggest_keywords
from crystallite.export import gguf, onnx

__all__ = ["export"]


@suggest_keywords
def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    data: Any = None,
    *,
    type: str | None = None,
    past: bool = False,
    int8: bool = False,
    max_deviation: float | None = None,
    tokenizer: Any = None,
) -> onnx.Exported | gguf.ExportedGguf:
    """Write a model as ONNX or GGUF, all of it or nothing.

    A file of that name is replaced once the new one is written and checked, so that the cell of a notebook can run
    again; the command `crystallite export` refuses, and so does `save`, whose folder may hold a verdict.

    ONNX is run beside the model on some data before it is written. Inputs have the names of the model's arguments,
    outputs those of the fields it returns. Batch size and length of sequences stay free, which is tried out; height and
    width of pictures do if the batches differ in them. An axis that turns out not to be free is fixed, and a note says
    so. Rows of padding are not compared. Models in bfloat16 or float16 become float32, and a note says so. Fitted
    layers are smaller dense products, so ONNX Runtime runs and quantises them like any other. Weights of more than 2 GB
    stand in a file of their own, with `.data` after the name.

    GGUF is the file of llama.cpp and what is built on it. Causal language models of the Llama family are written: as
    their own architecture where all layers have the same size, so that everything reads them that reads the original;
    as `deci` where layers differ in their numbers of heads or neurons. Layers of low rank or blocks have no place.

    Args:
        model: the model; it is left as it was.
        path: a file that ends in .onnx or .gguf.
        data: for ONNX: batches as for `validate`; the first is what the model is traced with. Targets are not used.
        type: how weights are stored. GGUF: f32, f16 (the default), bf16, q8_0, q5_1, q5_0, q4_1 or q4_0, as llama.cpp
            calls them. ONNX: f32 (the default), or q8_0, q4_1 or q4_0: blocks of 32 weights of 8 or 4 bits, of which
            q4_1 have a zero of their own as well as a scale. Embeddings and heads keep 8 bits in any of these.
        past: for decoders of transformers as ONNX: write one step of generation. It takes `past_key_values.N.key` and
            `.value` besides `input_ids`, `attention_mask` (past and new tokens) and, where the model has them,
            `position_ids`; it returns `present.N.key` and `.value` besides the logits. The first step has a past of
            length 0. Without it, the graph has no cache: it takes whole texts.
        int8: for ONNX: weights of linear layers as 8-bit integers, one scale per output; activations are quantised as
            they come. That suits encoders. Decoders lose much of their quality (SmolLM2-135M: perplexity 40 → 66),
            compressed or not, and a note says so: `type` rounds their weights alone.
        max_deviation: refused where ONNX Runtime is further away than this with int8 or rounded weights; left out, 0.1
            with 8 bits and 0.3 with 4. Floating point may differ by rounding only.
        tokenizer: for GGUF, which holds the vocabulary: a folder with tokenizer.json, a tokenizer of transformers, or a
            GGUF file of the same model. Left out, the folder that the model was opened from.

    Returns:
        What was written, and how near it is to the model: in its outputs on the data (ONNX), or in its weights (GGUF).

    Raises:
        InvalidOption: the model cannot be written so, or the file would deviate by more than is allowed; nothing
            is written then.
        CrystalliteError: a package is missing.
    """
    target = Path(path)
    if target.suffix == ".gguf":
        others = {"data": data is not None, "past": past, "int8": int8, "max_deviation": max_deviation is not None}
        if wrong := [name for name, is_given in others.items() if is_given]:
            raise InvalidOption(
                f"{target}: {wrong[0]}= is for ONNX; a GGUF file is made of the model and its tokenizer"
            )
        check_choice("type", type := type or "f16", gguf.TYPES)
        return gguf.export_gguf(model, target, type, tokenizer)
    if target.suffix != ".onnx":
        raise InvalidOption(f"{target}: expected a name that ends in .onnx or .gguf")
    if tokenizer is not None:
        raise InvalidOption(f"{target}: tokenizer= is for GGUF; ONNX takes tokens")
    if data is None:
        raise InvalidOption(f"{target}: data= is missing: batches to trace the model with, and to check the file on")
    check_choice("type", type := type or "f32", onnx.TYPES)
    if int8 and type != "f32":
        raise InvalidOption(f"int8=True and type={type} do not go together; pass one of them")
    return onnx.export_onnx(model, target, data, past=past, int8=int8, type=type, max_deviation=max_deviation)
