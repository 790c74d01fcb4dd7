"""A model as an ONNX graph from named tensors to named tensors."""

from __future__ import annotations

import copy
import inspect
import io
import logging
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as trees

from crystallite.core.errors import InvalidOption
from crystallite.data.batch import Batch
from crystallite.data.outputs import tensors
from crystallite.export.experts import translations
from crystallite.export.recurrent import as_whole_layers_, recurrent_translations, sequences_of_any_length
from crystallite.models.caches import turn_caches_off_

__all__ = ["Axis", "as_function", "changed", "is_text", "named_inputs", "named_outputs", "quiet", "twin_of", "write"]

Axis = tuple[str, int]  # an input's name and one of its axes
_HALF = (torch.bfloat16, torch.float16)


def as_function(model: nn.Module) -> tuple[nn.Module, torch.dtype | None]:
    """A copy of the model that returns no caches, and what its numbers were before they became float32.

    It shares the tensors of the model, unless they are bfloat16 or float16: ONNX Runtime lacks most operators for
    these on CPUs.
    """
    half = next((tensor.dtype for tensor in _stored(model) if tensor.dtype in _HALF), None)
    twin = copy.deepcopy(model).float() if half else twin_of(model)
    turn_caches_off_(twin)
    return twin.eval(), half


def twin_of(model: nn.Module) -> nn.Module:
    """A copy of everything but the tensors."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in _stored(model)})


def _stored(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def named_inputs(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The tensors among the arguments, by the names of the parameters; those inside tuples and dicts are `name.part`.

    >>> batch = Batch(0, 1, (torch.zeros(1, 2), (torch.zeros(1, 1, 3), torch.ones(1, 1, 3))))
    >>> {name: tuple(tensor.shape) for name, tensor in named_inputs(nn.LSTM(2, 3), batch).items()}
    {'input': (1, 2), 'hx.0': (1, 1, 3), 'hx.1': (1, 1, 3)}
    """
    parameters = list(inspect.signature(model.forward).parameters.values())
    places: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            places += [f"{parameter.name}.{i}" for i in range(len(batch.positional) - len(places))]
        places.append(parameter.name)
    found = {}
    for path, value in trees.tree_flatten_with_path((batch.positional, dict(batch.named)))[0]:
        if isinstance(value, Tensor):
            keys: list[Any] = [getattr(key, "key", getattr(key, "idx", key)) for key in path]
            is_named, place, *rest = keys
            found[".".join(map(str, [place if is_named else places[place], *rest]))] = value
    return found


def named_outputs(output: Any) -> dict[str, Tensor]:
    """The tensors that a model returned, by the names of their fields.

    >>> list(named_outputs({"logits": torch.zeros(1), "hidden_states": (torch.zeros(1), torch.zeros(2))}))
    ['logits', 'hidden_states.0', 'hidden_states.1']
    >>> list(named_outputs(torch.zeros(1)))
    ['output']
    """
    found = tensors(output)
    return {re.sub(r"\[(\d+)\]", r".\1", path).removeprefix("output.") or path: value for path, value in found.items()}


def changed(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """The batch with every tensor among the arguments changed, in the order of `named_inputs`."""
    leaves, form = trees.tree_flatten((batch.positional, dict(batch.named)))
    positional, named = trees.tree_unflatten([change(v) if isinstance(v, Tensor) else v for v in leaves], form)
    return replace(batch, positional=positional, named=named)


def write(
    model: nn.Module,
    file: Path,
    batch: Batch,
    outputs: Collection[str],
    fixed: Collection[Axis] = (),
    apart: bool = False,
) -> None:
    """Write what the model does to a batch as a graph.

    Every axis stays free that neither the model nor `fixed` fixes: batch size and length of a sequence, mostly.

    apart: put the weights into a file of their own beside it, which has the name and `.data`.
    """
    inputs = {name: value.clone() for name, value in named_inputs(model, batch).items()}  # no views of others
    free = tuple(
        {axis: torch.export.Dim.AUTO for axis in range(value.ndim) if (name, axis) not in fixed}
        for name, value in inputs.items()
    )
    # one kernel of attention throughout: the others lay out their result in another way than the one it is taken for
    with quiet(), torch.no_grad(), sdpa_kernel(SDPBackend.MATH), _takes_tensors(model, batch):
        try:
            program = torch.onnx.export(
                _captured(model, tuple(inputs.values()), free), dynamo=True, verbose=False, input_names=list(inputs),
                output_names=[f"{name}_out" if name in inputs else name for name in outputs],
                custom_translation_table=translations() | recurrent_translations(), dynamic_shapes=free,
            )  # fmt: skip
            assert program is not None
            _keep_norms_apart_(program.model.graph)
            _name_axes_(program.model.graph)
            program.save(file, external_data=apart)
        except Exception as error:  # whatever is raised by tracing code of the user's
            raise InvalidOption(f"{type(model).__name__} cannot be written as ONNX: {_deepest(error)}") from error


def _captured(
    model: nn.Module, values: tuple[Tensor, ...], free: tuple[dict[int, Any], ...]
) -> torch.export.ExportedProgram:
    """What torch.onnx is to write; by itself it would take every size for free, even of channels."""
    with sequences_of_any_length():
        return as_whole_layers_(torch.export.export(model, values, dynamic_shapes=free, strict=False))


@contextmanager
def _takes_tensors(model: nn.Module, batch: Batch) -> Iterator[None]:
    """The model as a function of the tensors of a batch, in their order, that returns a tuple of tensors."""
    run = model.forward

    def forward(*values: Tensor) -> tuple[Tensor, ...]:
        given = iter(values)
        called = changed(batch, lambda _: next(given))
        return tuple(tensors(run(*called.positional, **called.named)).values())

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD  # torch.export takes each for itself only if it has a name
    names = [f"value_{i}" for i in range(len(named_inputs(model, batch)))]
    forward.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore

    own = model.__dict__.get("forward")
    model.forward = forward
    try:
        yield
    finally:
        del model.forward
        if own is not None:
            model.forward = own


def _deepest(error: BaseException) -> str:
    """What went wrong first, of all that was raised because of it."""
    while (cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        error = cause
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given':.300}"


def _keep_norms_apart_(graph: Any) -> None:
    """Write the sum before a layer norm as `Sum`, not `Add`: ONNX Runtime takes `Add` and the norm for one operator.

    That one (SkipLayerNormalization) goes through its numbers one by one on CPUs: in MiniLM it took 13 % of the time of
    8-bit inference, sums and norms on their own 2 %.
    """
    for node in graph:
        readers = {reader.op_type for reader in node.outputs[0].consumers()} if node.op_type == "Add" else set()
        if readers == {"LayerNormalization"}:
            node.op_type = "Sum"


def _name_axes_(graph: Any) -> None:
    """Call free axes what people call them, instead of s77."""
    steps = any(value.name.startswith("past_key_values.") for value in graph.inputs)
    names: dict[str, str] = {}
    for value in graph.inputs:
        for axis, size in enumerate(value.shape):
            symbol = getattr(size, "value", None)
            if isinstance(symbol, str) and symbol.isidentifier() and symbol not in names:
                name = _axis_name(value.name, axis, value.shape, steps)
                # texts are as many and as long as their masks and pasts, even where the graph does not ask for it
                shared = value.name.startswith("past_key_values.") or is_text(value.name, value.shape)
                names[symbol] = f"{value.name}_{name}" if name in names.values() and not shared else name
    for value in (*graph.inputs, *(value for node in graph for value in node.outputs)):
        for axis, size in enumerate(value.shape or ()):
            symbol = getattr(size, "value", None)
            if isinstance(symbol, str):  # a size that the model fixed is written as such
                known = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), symbol)
                value.shape[axis] = int(known) if known.isdigit() else known


def is_text(name: str, shape: Sequence[Any]) -> bool:
    """Whether an input has tokens of texts, or their mask: (texts, tokens)."""
    return name.endswith(("_ids", "_mask")) and len(shape) == 2


def _axis_name(value: str, axis: int, shape: Sequence[Any], steps: bool) -> str:
    """
    >>> _axis_name("input_ids", 1, (2, 9), False), _axis_name("attention_mask", 1, (2, 9), True)
    ('sequence_length', 'total_sequence_length')
    >>> _axis_name("past_key_values.0.key", 2, (2, 4, 9, 8), True), _axis_name("pixel_values", 3, (2, 3, 8, 8), False)
    ('past_sequence_length', 'pixel_values_axis_3')
    """
    if axis == 0:
        return "batch_size"
    if value.startswith("past_key_values."):
        return "past_sequence_length"
    if is_text(value, shape):
        part = "decoder_" if value.startswith("decoder_") else "total_" if steps and value.endswith("_mask") else ""
        return f"{part}sequence_length"
    return f"{value}_axis_{axis}"


@contextmanager
def quiet() -> Iterator[None]:
    """PyTorch's exporter and ONNX Runtime's quantisation speak of their own affairs."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
