"""A decoder in a folder, compressed layer by layer into another: it need not fit into memory."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from crystallite.compression.decoders.layer_fit import FittedLayer
from crystallite.compression.decoders.run import DecoderOptions, as_tokens, fit_decoder
from crystallite.compression.decoders.stack import Stack
from crystallite.compression.decoders.workspace import Workspace
from crystallite.core.files import write_file, writing
from crystallite.data.calibration import Calibration
from crystallite.models.layered_folder import LayeredFolder, describe_layer, named, write_layered
from crystallite.models.record import Record

__all__ = ["compress_folder"]


@dataclass(frozen=True)
class _Disk:
    """Layers of a folder, and files with those that are done."""

    source: LayeredFolder
    work: Path

    def read(self, number: int) -> nn.Module:
        return self.source.layer(number)

    def shard(self, number: int) -> Path:
        return self.work / f"layer-{number:05}.safetensors"

    def write(self, number: int, layer: nn.Module, fitted: FittedLayer) -> None:
        prefix, shard = f"{self.source.name}.{number}.", self.shard(number)
        with writing(shard):
            save_file(named(layer, prefix), shard, {"format": "pt"})
        layers: Any = self.source.model.get_submodule(self.source.name)
        told = {
            "sizes": fitted.sizes, "errors": fitted.errors, "modules": describe_layer(layers[number], layer),
        }  # fmt: skip
        write_file(self._told(number), json.dumps(told).encode())  # last: from here on the layer is done

    def _told(self, number: int) -> Path:
        return self.work / f"layer-{number:05}.json"

    def told(self, number: int) -> dict[str, Any]:
        return dict(json.loads(self._told(number).read_text()))

    def written(self, number: int) -> FittedLayer | None:
        if not self._told(number).is_file():
            return None
        told = self.told(number)
        return FittedLayer({name: tuple(size) for name, size in told["sizes"].items()}, told["errors"])


def compress_folder(
    folder: Path, data: Calibration, out: Path, options: DecoderOptions, work: Path, progress: bool
) -> Record:
    """Write a folder with a smaller model; a run that was killed goes on from what it has left in `work`."""
    source = LayeredFolder.open(folder)
    tensors = [b.named["input_ids"] for b in map(as_tokens, data.all)]
    state, plain = Workspace(work / "state"), vars(options)
    tokens = [[*t.shape, int((t.double() * torch.arange(1, t.numel() + 1).view(t.shape)).sum())] for t in tensors]
    state.check_identity({"model": source.identity, "tokens": tokens, **plain})
    stack, layers = Stack(source.model, source.name), _Disk(source, work)
    record, shared = fit_decoder(stack, layers, data, options, state, progress)
    numbers = range(len(stack.layers))
    modules = [layers.told(n)["modules"] for n in numbers]
    shards = {n: layers.shard(n) for n in numbers}
    write_layered(source, out, shards, modules, record, shared, {"model": str(folder), **plain})
    shutil.rmtree(work)
    return record
