"""A decoder in a folder, compressed layer by layer into another: it need not fit into memory."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from crystallite.compression.decoders.layer_fit import FittedLayer
from crystallite.compression.decoders.ray_engine import spread_over_ray
from crystallite.compression.decoders.run import CHUNK, DecoderOptions, OutOfReach, as_tokens, fit_decoder
from crystallite.compression.decoders.shares import PROBED
from crystallite.compression.decoders.stack import Stack, why_no_stack
from crystallite.compression.decoders.token_tables import Tables, put_tables_
from crystallite.compression.decoders.workspace import Workspace
from crystallite.compression.whole_cost import budgets_of
from crystallite.core.errors import InvalidOption
from crystallite.core.files import new_folder, write_file, writing
from crystallite.core.suggest import check_choice, suggest_keywords
from crystallite.data.calibration import Calibration
from crystallite.models.layered_folder import LayeredFolder, describe_layer, named, read_described, write_layered
from crystallite.models.record import Record
from crystallite.models.summary import Summary

__all__ = ["FORMS", "compress_folder", "memory_needed"]

FORMS = ("any", "dense", "uniform")
ENGINES = ("local", "ray")
_PROGRAM = 600_000_000  # bytes that Python and PyTorch take
_LAYERS = 3  # at once: the dense one, the smaller one, and what is written of it
_SQUARES = 3  # matrices of neurons × neurons in float64, while a layer is fitted
_WEIGHTS = 5  # of the reader of these neurons, in float64, at the same time
_ACTIVATIONS = 16  # of a chunk, each as wide as the widest layer, beside one matrix of neurons × neurons
_STATES = 4  # of the positions that are probed
_LOGITS = 256  # rows in float32


@dataclass(frozen=True)
class _Disk:
    """Layers of a folder, and files with those that are done."""

    source: LayeredFolder
    results: tuple[Path, ...]  # a folder of such files for each budget

    def read(self, number: int) -> nn.Module:
        return self.source.layer(number)

    def smaller(self, result: int, number: int) -> nn.Module:
        layers: Any = self.source.model.get_submodule(self.source.name)
        modules, prefix = self.description(result, number)["modules"], f"{self.source.name}.{number}."
        return read_described(copy.deepcopy(layers[number]), modules, self.shard(result, number), prefix)

    def shard(self, result: int, number: int) -> Path:
        return self.results[result] / f"layer-{number:05}.safetensors"

    def write(self, result: int, number: int, layer: nn.Module, fitted: FittedLayer) -> None:
        prefix, shard = f"{self.source.name}.{number}.", self.shard(result, number)
        with writing(shard):
            shard.parent.mkdir(exist_ok=True)
            save_file(named(layer, prefix), shard, {"format": "pt"})
        layers: Any = self.source.model.get_submodule(self.source.name)
        description = {
            "sizes": fitted.sizes, "errors": fitted.errors, "modules": describe_layer(layers[number], layer),
        }  # fmt: skip
        file = self._description_file(result, number)
        write_file(file, json.dumps(description).encode())  # last: from here on the layer is done

    def _description_file(self, result: int, number: int) -> Path:
        return self.shard(result, number).with_suffix(".json")

    def description(self, result: int, number: int) -> dict[str, Any]:
        return dict(json.loads(self._description_file(result, number).read_text()))

    def written(self, result: int, number: int) -> FittedLayer | None:
        if not self._description_file(result, number).is_file():
            return None
        found = self.description(result, number)
        return FittedLayer({name: tuple(size) for name, size in found["sizes"].items()}, found["errors"])

    def write_tables(self, tables: Tables, factors: Mapping[str, Tensor]) -> None:
        file = self._tables_file
        with writing(file):
            save_file(dict(factors), file)
        write_file(file.with_suffix(".json"), json.dumps(vars(tables)).encode())  # last: from here on they are known

    def tables(self) -> tuple[Tables, Mapping[str, Tensor]] | None:
        file = self._tables_file
        said = file.with_suffix(".json")
        return (Tables(**json.loads(said.read_text())), load_file(file)) if said.is_file() else None

    @property
    def _tables_file(self) -> Path:
        return self.results[0].parent / "tables.safetensors"


@suggest_keywords
def compress_folder(
    folder: str | os.PathLike[str],
    calibration: Any,
    out: str | os.PathLike[str],
    *,
    budget: float | Sequence[float],
    objective: str = "macs",
    form: str = "any",
    embeddings: float | None = None,
    memory: str | int | None = None,
    ridge: float = 0.01,
    seed: int = 0,
    targets: str | Sequence[str] = ("*",),
    ignore: str | Sequence[str] = (),
    engine: str = "local",
    progress: bool = False,
) -> Any:
    """A smaller decoder written to a new folder, layer by layer: the model need not fit into memory.

    The same as `compress` of the model, `save`d; but only one layer, its statistics and a chunk of activations are in
    memory at a time. Hidden states of the calibration data, and every layer that is done, lie in a folder beside `out`
    (its name and ".partial"): a run that was killed goes on from there to the same result when it is called again, and
    the folder is removed at the end.

    Args:
        folder: a transformers folder with a dense causal language model, in one file or in shards; or a GGUF file,
            whose numbers become float32.
        calibration: batches of token ids, as `texts` gives them from plain text; see `compress`.
        out: the new folder; with several budgets, one that holds a folder for each, named as the budget is: "0.8".
        budget, objective, form, embeddings, ridge, seed, targets, ignore: as for `compress`.
        memory: what the run may take, in bytes or as "3GB"; refused before work begins where that is too little.
        engine: "local", or "ray": every node of a Ray cluster keeps a share of the calibration data and runs the layers
            on it; the result is the same to rounding. A share that is lost with its node or process is computed again.
            All nodes must see `folder` and `out` under the same paths.
        progress: a bar on standard error.

    Returns:
        A `Summary` of what each layer became; with several budgets, a list of them.

    Raises:
        InvalidOption: the folder `out` exists, the model is no decoder whose layers can be read one by one, a budget
            that cannot be reached, or too little memory.
        CheckpointError: a folder that cannot be read.
    """
    target = Path(out)
    if target.exists():
        raise InvalidOption(f"{target}: exists already; choose another name or remove it")
    check_choice("objective", objective, ("macs", "parameters"))
    check_choice("form", form, FORMS)
    check_choice("engine", engine, ENGINES)
    budgets = budgets_of(budget)
    source = LayeredFolder.open(Path(folder))
    stack = Stack(source.model, source.name)
    widest = max(p[0].numel() for layer in stack.layers for p in layer.parameters() if p.ndim > 1)
    data = Calibration.read(calibration, widest)
    chosen, left_out = ((p,) if isinstance(p, str) else tuple(p) for p in (targets, ignore))
    options = DecoderOptions(budgets, objective, form, ridge, seed, chosen, left_out, embeddings)
    if memory is not None:
        _check_memory(stack, embeddings, _bytes(memory))
    if why := why_no_stack(source.model, as_tokens(data.fitted[0])):
        raise InvalidOption(f"{folder}: {why}; open the model, and use compress")
    work = target.with_name(f"{target.name}.partial")
    records = _run(source, data, target, options, work, isinstance(budget, Sequence), engine, progress)
    summaries = [Summary.of(record) for record in records]
    return summaries if isinstance(budget, Sequence) else summaries[0]


def _run(
    source: LayeredFolder, data: Calibration, out: Path, options: DecoderOptions, work: Path, several: bool,
    engine: str, progress: bool,
) -> list[Record]:  # fmt: skip
    tensors = [b.named["input_ids"] for b in map(as_tokens, data.all)]
    state, plain = Workspace(work / "state"), vars(options)
    tokens = [[*t.shape, hashlib.sha256(t.cpu().contiguous().numpy().tobytes()).hexdigest()] for t in tensors]
    state.check_identity({"model": source.identity, "tokens": tokens, **plain})
    names = [f"{budget:g}" for budget in options.budgets]
    places = tuple(work / name for name in names)
    stack, layers = Stack(source.model, source.name), _Disk(source, places)
    where = tuple(path.absolute() for path in (source.folder, *places))
    run = hashlib.sha256(str(work.absolute()).encode()).hexdigest()[:16]
    try:
        with spread_over_ray(partial(_opened, *where), run) if engine == "ray" else nullcontext() as spread:
            found = fit_decoder(stack, layers, data, options, state, progress, spread)
    except OutOfReach:
        shutil.rmtree(work)
        raise
    metadata = {"model": str(source.folder), **{k: v for k, v in plain.items() if k != "budgets"}}

    def write(result: int, folder: Path) -> None:
        record, shared = found[result]
        numbers = range(len(stack.layers))
        modules = [layers.description(result, n)["modules"] for n in numbers]
        shards = {n: layers.shard(result, n) for n in numbers}
        said = metadata | {"budget": options.budgets[result]}
        tables = layers.tables()
        write_layered(
            source, folder, shards, modules, record, shared, said,
            None if tables is None else lambda model: put_tables_(model, *tables),
        )  # fmt: skip

    if several:
        with new_folder(out) as folder:
            for result, name in enumerate(names):
                write(result, folder / name)
    else:
        write(0, out)
    shutil.rmtree(work)
    return [record for record, _ in found]


def _opened(folder: Path, *results: Path) -> tuple[Stack, _Disk]:
    """The same as the run itself has, for whoever keeps a share of its data."""
    source = LayeredFolder.open(folder)
    return Stack(source.model, source.name), _Disk(source, results)


def _bytes(text: str | int) -> int:
    """A number of bytes, as "3GB" or "512MiB".

    >>> _bytes("1.5 GB"), _bytes(7)
    (1500000000, 7)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B?\s*", str(text), re.IGNORECASE)
    if found is None:
        raise InvalidOption(f"memory: expected bytes, or a text such as 3GB, got {text!r:.80}")
    step = 1024 if found[3] else 1000
    return int(float(found[1]) * step ** " kmgt".index(found[2].lower() or " "))


def memory_needed(stack: Stack, embeddings: float | None = None) -> dict[str, int]:
    """Bytes that a run takes at most, by what takes them; measured by `benchmarks/decoder_scale.py`."""
    model: Any = stack.model
    layer, prefix = stack.layers[0], f"{stack.name}."
    outside = [p for n, p in model.named_parameters() if not n.startswith(prefix)]
    item = outside[0].element_size()
    one, rest = sum(p.numel() for p in layer.parameters()) * item, sum(p.numel() for p in outside) * item
    widest = max(p.shape[1] for p in layer.parameters() if p.ndim == 2)
    vocabulary, hidden = model.get_output_embeddings().weight.shape
    square, read = 8 * widest**2, f"statistics of {widest} neurons"
    most = max(
        {read: _SQUARES * square + _WEIGHTS * 8 * widest * hidden},
        {read: square, "activations": item * (_ACTIVATIONS * CHUNK * widest + _STATES * PROBED * hidden)},
        key=lambda parts: sum(parts.values()),
    )
    smaller = {} if embeddings is None else {"smaller embeddings and head": int(2 * embeddings * rest)}
    parts = {"the program": _PROGRAM, "embeddings and head": rest, **smaller, "layers": _LAYERS * one}
    return {**parts, **most, "logits": _LOGITS * 4 * vocabulary}


def _check_memory(stack: Stack, embeddings: float | None, limit: int) -> None:
    """Refuse what will not fit, before work begins."""
    parts = memory_needed(stack, embeddings)
    needed = sum(parts.values())
    if needed > limit:
        listed = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items())
        raise InvalidOption(f"memory: expected at least {needed / 1e9:.2f} GB ({listed}), got {limit / 1e9:.2f} GB")
