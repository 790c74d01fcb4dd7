"""A decoder as GGUF, the file of llama.cpp: in floating point, or with blocks of 8, 5 or 4 bits."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from crystallite.core.errors import CrystalliteError, InvalidOption
from crystallite.core.files import new_file
from crystallite.export.decoder import Decoder, StoredTensor, read_decoder
from crystallite.export.vocabulary import EXPECTED, add_vocabulary_
from crystallite.models.preparing import prepared

__all__ = ["TYPES", "ExportedGguf", "export_gguf"]

TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")  # those that the gguf package can write
_FINE = "q8_0"  # for tables of tokens in files of fewer bits: llama.cpp's own quantisation keeps these finer, too
_SHOWN = 3  # names of tensors in a note


@dataclass(frozen=True)
class ExportedGguf:
    """What was written, and how far its weights are from the model's."""

    path: str
    bytes: int
    type: str
    architecture: str  # llama.cpp's name for it
    parameters: int
    rounding: float  # ‖w′ − w‖ / ‖w‖ over all weights
    notes: tuple[str, ...] = ()  # what else the user should know

    def __str__(self) -> str:
        said = (
            f"{self.path}: {self.bytes:,} bytes of GGUF, {self.type}, architecture {self.architecture}; "
            f"{self.parameters:,} weights, rounded by {self.rounding:.2g} of their size"
        )
        return "\n".join([said, *(f"note: {note}" for note in self.notes)])


def export_gguf(
    model: nn.Module, path: str | os.PathLike[str], type: str = "f16", tokenizer: Any = None
) -> ExportedGguf:
    """What `export` does for a name that ends in .gguf; one tensor at a time is converted."""
    target = Path(path)
    library = _library()
    model, _ = prepared(model)
    decoder = read_decoder(model)
    block, _ = library.GGML_QUANT_SIZES[library.GGMLQuantizationType[type.upper()]]
    notes = list(decoder.notes)
    if block > 1 or not all(each.width for each in decoder.layers):
        narrow, decoder = decoder, decoder.filled_up(block)
        if more := sum(each.width for each in decoder.layers) - sum(each.width for each in narrow.layers):
            notes.append(f"{more} neurons of zeros fill feed-forward parts up to multiples of {block}")
    writer = library.GGUFWriter(None, decoder.architecture)
    _describe_(writer, library, decoder, type, target.stem)
    add_vocabulary_(writer, _tokenizer(model, tokenizer), decoder.vocabulary_size)
    kinds = {each.name: _kind(library, each, type) for each in decoder.tensors}
    coarse = [each.name for each in decoder.tensors if _misses_blocks(each, block)]
    if coarse:
        names = ", ".join(coarse[:_SHOWN]) + (f" and {len(coarse) - _SHOWN} more" if len(coarse) > _SHOWN else "")
        notes.append(f"in f16, as their rows are no multiples of {block}: {names}")
    for each in decoder.tensors:
        length, size = library.GGML_QUANT_SIZES[kinds[each.name]]
        count = math.prod(each.shape) // length * size
        writer.add_tensor_info(each.name, each.shape, np.dtype(np.float32), count, kinds[each.name])
    with new_file(target) as unfinished:
        try:
            writer.write_header_to_file(unfinished)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            rounding = _write_tensors(writer, library, decoder, kinds)
        finally:
            writer.close()
    parameters = sum(each.tensor.numel() for each in decoder.tensors)
    length = target.stat().st_size
    return ExportedGguf(str(target), length, type, decoder.architecture, parameters, rounding, tuple(notes))


def _library() -> Any:
    try:
        import gguf
        import tokenizers  # noqa: F401  what vocabularies are read with
    except ImportError:
        raise CrystalliteError("GGUF files need gguf and transformers: pip install 'crystallite[gguf,hf]'") from None
    return gguf


def _tokenizer(model: Any, given: Any) -> Any:
    """Where the vocabulary is: as the user says, or in the folder that the model was opened from."""
    if given is not None:
        return given
    folder = str(getattr(model.config, "name_or_path", "") or "")
    if not folder or not Path(folder).is_dir():
        raise InvalidOption(f"a GGUF file holds the vocabulary, and this model was opened from no folder; {EXPECTED}")
    return folder


def _describe_(writer: Any, library: Any, decoder: Decoder, type: str, name: str) -> None:
    """Everything but vocabulary and tensors."""
    per_layer = decoder.architecture == "deci"

    def told(sizes: list[int]) -> int | list[int]:
        return sizes if per_layer else sizes[0]

    writer.add_type(library.GGUFType.MODEL)
    writer.add_name(name)
    kinds = {"f32": "ALL_F32"}
    writer.add_file_type(library.LlamaFileType[kinds.get(type, f"MOSTLY_{type.upper()}")])
    writer.add_quantization_version(library.GGML_QUANT_VERSION)
    writer.add_vocab_size(decoder.vocabulary_size)
    writer.add_context_length(decoder.context)
    writer.add_embedding_length(decoder.hidden_size)
    writer.add_block_count(len(decoder.layers))
    writer.add_feed_forward_length(told([each.width for each in decoder.layers]))
    writer.add_head_count(told([each.heads for each in decoder.layers]))
    writer.add_head_count_kv(told([each.key_value_heads for each in decoder.layers]))
    writer.add_key_length(decoder.head_size)
    writer.add_value_length(decoder.head_size)
    writer.add_layer_norm_rms_eps(decoder.epsilon)
    writer.add_rope_dimension_count(decoder.head_size)
    writer.add_rope_freq_base(decoder.rope_base)
    if decoder.rope_factor is not None:
        writer.add_rope_scaling_type(library.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(decoder.rope_factor)


def _kind(library: Any, tensor: StoredTensor, type: str) -> Any:
    """The type of a tensor in the file: norms and biases are read in float32, whatever the rest is."""
    if len(tensor.shape) < 2:
        return library.GGMLQuantizationType.F32
    block, _ = library.GGML_QUANT_SIZES[library.GGMLQuantizationType[type.upper()]]
    if _misses_blocks(tensor, block):
        type = "f16"
    elif block > 1 and tensor.name in ("token_embd.weight", "output.weight"):
        type = _FINE
    return library.GGMLQuantizationType[type.upper()]


def _misses_blocks(tensor: StoredTensor, block: int) -> bool:
    return len(tensor.shape) > 1 and tensor.shape[-1] % block != 0


def _write_tensors(writer: Any, library: Any, decoder: Decoder, kinds: dict[str, Any]) -> float:
    """Write every tensor; how far all of them are from the model's, relative to their size."""
    from gguf.quants import dequantize, quantize

    apart = size = 0.0
    for each in decoder.tensors:
        numbers = each.numbers().numpy()
        with np.errstate(over="ignore"):  # which is told below
            stored = quantize(numbers, kinds[each.name])
        writer.write_tensor_data(stored)
        difference = dequantize(stored, kinds[each.name]).reshape(numbers.shape) - numbers
        squares = float((difference.astype("float64") ** 2).sum())
        if not math.isfinite(squares):
            raise InvalidOption(f'{each.name}: numbers too large for {kinds[each.name].name.lower()}; pass type="f32"')
        apart += squares
        size += float((numbers.astype("float64") ** 2).sum())
    return math.sqrt(apart / size) if size else 0.0
