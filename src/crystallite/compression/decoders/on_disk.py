"""A decoder in a folder, compressed layer by layer into another: it need not fit into memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from crystallite.compression.decoders.layer_fit import FittedLayer
from crystallite.compression.decoders.run import DecoderFit, as_tokens, in_chunks, record_of
from crystallite.compression.decoders.stack import Stack
from crystallite.compression.decoders.workspace import Workspace
from crystallite.core.errors import InvalidOption
from crystallite.core.files import write_file, writing
from crystallite.core.suggest import matching
from crystallite.data.calibration import Calibration
from crystallite.models.layered_folder import LayeredFolder, describe_layer, named, write_layered
from crystallite.models.layers import find_units

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
    folder: Path, data: Calibration, out: Path, *, budget: float, objective: str, form: str, ridge: float, seed: int,
    targets: str | Sequence[str], ignore: str | Sequence[str], work: Path, progress: bool,
) -> None:  # fmt: skip
    """Write a folder with a smaller model; a run that was killed goes on from what it has left in `work`."""
    source = LayeredFolder.open(folder)
    stack = Stack(source.model, source.name)
    fitted, held_out = (in_chunks([as_tokens(b) for b in some]) for some in (data.fitted, data.held_out))
    units = find_units(source.model, ["*"], [])
    asked = {*matching([unit.name for unit in units], targets, ignore)}
    kept = {
        n: [name for name, _ in layer.named_modules() if name and f"{stack.layer_name(n)}.{name}" not in asked]
        for n, layer in enumerate(stack.layers)
    }
    tensors = [b.named["input_ids"] for b in (*fitted, *held_out)]
    options = {
        "budget": budget, "objective": objective, "form": form, "ridge": ridge, "seed": seed,
        "targets": list(targets), "ignore": list(ignore),
    }  # fmt: skip
    state = Workspace(work / "state")
    state.check_identity({"model": source.identity, "tokens": [[*t.shape, int(t.sum())] for t in tensors], **options})
    layers = _Disk(source, work)
    fit = DecoderFit(stack, layers, (*fitted, *held_out), len(held_out), form, ridge, seed, state, kept, progress)
    numbers = sum(p.numel() for p in source.model.parameters())
    total = numbers if objective == "parameters" else sum(unit.macs for unit in units)
    probes = fit.probe()
    try:
        plan = fit.plan(probes, total, budget * total)
    except InvalidOption as error:
        raise InvalidOption(f'budget {budget:g} cannot be reached with form="{form}": {error}') from None
    done = dict(fit.fit(probes, plan))
    record = record_of(fit, units, done, budget, objective, asked.__contains__)
    sizes: list[tuple[int, int]] = []
    if form == "uniform":
        groups = {key: group.size for parts in fit.found_parts for key, group in parts.groups.items()}
        sizes = [(groups[key], size) for key, size in plan.sizes[0].items()]
    modules = [layers.told(n)["modules"] for n in range(fit.count)]
    shards = {n: layers.shard(n) for n in range(fit.count)}
    write_layered(source, out, shards, modules, record, sizes, {"model": str(folder), **options})
    shutil.rmtree(work)
