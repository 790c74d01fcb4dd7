"""`find_neuron_groups`: which neurons, channels and heads belong together, who writes them and who reads them."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.core.errors import InvalidOption
from crystallite.data.batch import Batch
from crystallite.graph.attention import Attention, HeadNumbers
from crystallite.graph.trace import Axis, Spaces, trace
from crystallite.models.layers import is_transformers_conv1d

__all__ = [
    "CONVOLUTIONS",
    "NeuronGroup",
    "find_neuron_groups",
    "head_group",
    "members",
    "neuron_groups",
    "pairings",
    "rotate_heads_",
    "score_group",
    "trace_batch",
    "value_group",
    "without",
]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORM = nn.modules.batchnorm._BatchNorm


@dataclass(frozen=True)
class NeuronGroup:
    """Neurons that layers hand to layers and nothing else knows of: hidden neurons, channels, or parts of attention.

    Of an attention, a group is either all its heads as wholes (`heads` = `size`, each of several numbers), or numbers
    inside its heads (`heads` < `size`): those that values hand on to the layer behind attention, which each head can
    rotate among themselves, or those in which queries and keys are compared, which no layer reads. There a neuron is
    what can go alone: a number, or the two numbers that a rotary position turns into each other.
    """

    size: int
    writers: tuple[str, ...]  # in the order in which they run; several where one is a gate, or a residual stream grows
    readers: tuple[str, ...]
    heads: int = 0  # 0: no attention lies between the layers
    width: int = 1  # inputs of each reader for a neuron: places of a kernel or image, queries that share; 0: they vary
    passed: tuple[str, ...] = ()  # modules between the layers that have numbers of their own for each neuron
    embedded: bool = False  # the model's code counts on all of them, so that layers keep their sizes outwards
    # (parameter or buffer, axis) → for each index along the axis the neuron it belongs to, −1: none of these
    carried: Mapping[tuple[str, int], Tensor] = field(default_factory=dict, repr=False, compare=False)
    # the same for outputs of writers and inputs of readers, their weights seen as (outputs, inputs)
    rows: Mapping[str, Tensor] = field(default_factory=dict, repr=False, compare=False)
    columns: Mapping[str, Tensor] = field(default_factory=dict, repr=False, compare=False)
    attention: Attention | None = field(default=None, repr=False, compare=False)  # whose numbers are compared

    @classmethod
    def between(cls, model: nn.Module, writers: Sequence[str], reader: str, head_size: int = 0) -> NeuronGroup:
        """The neurons that some linear layers write and one reads, where nothing else knows of them.

        head_size: outputs of a writer for each attention head, which are a neuron of the group together; 0: no heads.

        >>> net = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 3))
        >>> NeuronGroup.between(net, ["0"], "2").size, NeuronGroup.between(net, ["0"], "2", head_size=3).size
        (6, 2)
        """
        each, carried = head_size or 1, dict[tuple[str, int], Tensor]()
        for writer in writers:
            for name, parameter in model.get_submodule(writer).named_parameters(recurse=False):
                carried[f"{writer}.{name}", 0] = torch.arange(len(parameter)) // each
        inputs = model.get_submodule(reader).get_parameter("weight").shape[1]
        outputs = {len(labels) for labels in carried.values()}
        if outputs != {inputs} or inputs % each:
            heads = f", in heads of {head_size}" if head_size else ""
            raise InvalidOption(
                f"{reader}: expected one input for each output of {', '.join(writers)}{heads}, "
                f"got {inputs} inputs and {sorted(outputs)} outputs"
            )
        carried[f"{reader}.weight", 1] = torch.arange(inputs) // each
        size, read = inputs // each, {reader: carried[f"{reader}.weight", 1]}
        rows = {writer: carried[f"{writer}.weight", 0] for writer in writers}
        whole = size if head_size else 0
        return cls(size, tuple(writers), (reader,), whole, each, carried=carried, rows=rows, columns=read)

    @property
    def layers(self) -> tuple[str, ...]:
        """Writers and readers."""
        return tuple(dict.fromkeys((*self.writers, *self.readers)))

    @property
    def inside_heads(self) -> bool:
        """Whether the neurons are the numbers of attention heads."""
        return 0 < self.heads < self.size

    @property
    def reader(self) -> str:
        """The one layer that reads the neurons."""
        (reader,) = self.readers
        return reader

    @property
    def is_even(self) -> bool:
        """Whether all neurons have as many outputs of each writer, and inputs of each reader, and these are apart."""
        apart = len(self.layers) == len(self.writers) + len(self.readers)
        written = all(members(labels, self.size) is not None for labels in self.rows.values())
        return apart and written and self.width > 0 and len(self.rows) == len(self.writers)

    def outputs(self, writer: str) -> int:
        """Outputs of a writer for each neuron."""
        return int((self.rows[writer] == 0).sum())

    @property
    def compared(self) -> tuple[HeadNumbers, HeadNumbers]:
        """The queries and the keys that are compared in the neurons."""
        found = self.attention
        if found is None or found.queries is None or found.keys is None:
            raise InvalidOption(f"{', '.join(self.layers)}: expected queries and keys, got neurons that a layer reads")
        return found.queries, found.keys

    @property
    def places(self) -> Tensor:
        """(neurons, width): the inputs of the reader that each neuron is."""
        found = members(self.columns[self.reader], self.size)
        if found is None:
            raise InvalidOption(f"{self.reader}: expected as many inputs for every neuron")
        return found

    def lost(self, writer: str, left: Tensor) -> Tensor:
        """The outputs of a writer that are neurons which are not among those left, in order."""
        labels = self.rows[writer]
        return ((labels >= 0) & ~torch.isin(labels, left.cpu())).nonzero()[:, 0]

    def read(self, neurons: Tensor) -> Tensor:
        """The inputs of the reader that are some neurons, or none of them at all, in order."""
        labels = self.columns[self.reader]
        return (torch.isin(labels, neurons.cpu()) | (labels < 0)).nonzero()[:, 0]


def members(labels: Tensor, size: int) -> Tensor | None:
    """(neurons, each): the places of every neuron, None where some have more than others.

    >>> members(torch.tensor([1, 0, -1, 0, 1]), 2).tolist()
    [[1, 3], [0, 4]]
    """
    counts = torch.bincount(labels[labels >= 0], minlength=size)
    if len(counts) != size or counts.min() != counts.max() or not counts.max():
        return None
    return labels.argsort(stable=True)[int((labels < 0).sum()) :].view(size, -1)


def neuron_groups(model: nn.Module, spaces: Spaces) -> dict[Axis, NeuronGroup]:
    """The groups of a traced model, each under the axis that consists of its neurons alone, in the order of the model.

    They are neurons whose order is free, in tensors of layers and of what they pass only. Whether they can be removed
    is for the trials (`trials.py`) to say. Numbers inside heads are not among them (`value_group`, `score_group`).
    """
    found = dict[Axis, NeuronGroup]()
    for number, space in enumerate(spaces.spaces):
        group = None if space.fixed or space.within else _group(model, spaces, number)
        if group is not None:
            found[((number,),)] = group
    return found


def _group(model: nn.Module, spaces: Spaces, number: int) -> NeuronGroup | None:
    size = spaces.neurons(number)
    places = {place: axis for place, axis in spaces.places.items() if any(number in part for part in axis)}
    writers, readers = (
        tuple(layer.name for layer in spaces.layers if any(number in part for part in getattr(layer, side)))
        for side in ("rows", "columns")
    )
    owners = {name.rpartition(".")[0]: model.get_submodule(name.rpartition(".")[0]) for name, _ in places}
    passed = tuple(sorted(name for name, module in owners.items() if _keeps_apart(module)))
    writers, readers = (tuple(name for name in side if name not in passed) for side in (writers, readers))
    if not writers or not readers or owners.keys() - {*writers, *readers, *passed}:
        return None
    if not all(_is_layer(owners.get(name)) for name in (*writers, *readers)):
        return None
    carried = {place: spaces.labels(axis, number) for place, axis in places.items()}
    rows = {name: labels for name in writers if (labels := _along(model, name, carried, outputs=True)) is not None}
    columns = {name: labels for name in readers if (labels := _along(model, name, carried, outputs=False)) is not None}
    in_heads = any(len(labels) > size and bool((labels >= 0).all()) for labels in rows.values())
    in_heads = in_heads and any(name in attention.layers for attention in spaces.attentions for name in writers)
    found = [None if name not in columns else members(columns[name], size) for name in readers]
    widths = {0 if places is None else places.shape[1] for places in found}
    width = widths.pop() if len(widths) == 1 else 0
    heads = size if in_heads else 0
    return NeuronGroup(size, writers, readers, heads, width, passed, False, carried, rows, columns)


def _keeps_apart(module: nn.Module) -> bool:
    """Whether a module has numbers of its own for each channel and mixes none: batch norms, depthwise convolutions."""
    if isinstance(module, CONVOLUTIONS):
        return module.groups == module.in_channels == module.out_channels > 1
    return isinstance(module, _BATCH_NORM)


def _is_layer(module: nn.Module | None) -> bool:
    return isinstance(module, (nn.Linear, *CONVOLUTIONS)) or (module is not None and is_transformers_conv1d(module))


def _along(model: nn.Module, name: str, carried: Mapping[tuple[str, int], Tensor], outputs: bool) -> Tensor | None:
    """The neurons along the outputs or inputs of a layer's weight as (outputs, inputs); None: along no whole axis."""
    module = model.get_submodule(name)
    weight = module.get_parameter("weight")
    labels = carried.get((f"{name}.weight", int(outputs == is_transformers_conv1d(module))))
    if labels is None or not isinstance(module, CONVOLUTIONS) or outputs:
        return labels
    if module.groups > 1:  # the second axis of its kernel serves all groups
        return None
    return labels.repeat_interleave(weight[0, 0].numel())


def head_group(model: nn.Module, attention: Attention) -> NeuronGroup | None:
    """The heads of an attention as wholes, with their queries and keys, None where they are not known.

    Heads of queries that share keys and values are one. Whether heads go alone is for a trial to say
    (`trials.acts_alone`): a norm over all queries, or values shared otherwise than keys, would join them.
    """
    queries, keys, values, outputs = attention.queries, attention.keys, attention.values, attention.outputs
    if queries is None or keys is None or values is None or outputs is None:
        return None
    heads, writers = len(keys.places), dict.fromkeys(part.layer for part in (queries, keys, values))
    if len(values.places) != heads or outputs.layer in writers:
        return None
    rows, carried = dict[str, Tensor](), dict[tuple[str, int], Tensor]()
    for name, outward, parts in (
        *((name, True, [part for part in (queries, keys, values) if part.layer == name]) for name in writers),
        (outputs.layer, False, [outputs]),
    ):
        pairs = [(part.places, torch.arange(heads).view(-1, 1, 1).expand(part.places.shape)) for part in parts]
        labels = _labelled(model, name, outward, pairs)
        if labels is None or bool((labels < 0).any()):
            return None
        rows[name] = labels
        carried |= _stored(model, name, labels, outward)
    columns = {outputs.layer: rows.pop(outputs.layer)}
    width = outputs.places[0].numel()
    return NeuronGroup(heads, tuple(writers), (outputs.layer,), heads, width, (), True, carried, rows, columns)


def value_group(model: nn.Module, attention: Attention) -> NeuronGroup | None:
    """The numbers that the heads of an attention hand on, None where they are not known."""
    values, outputs = attention.values, attention.outputs
    if values is None or outputs is None or values.layer == outputs.layer:
        return None
    heads, queries, numbers = outputs.places.shape
    neurons = torch.arange(heads * numbers).view(heads, 1, numbers)
    rows = _labelled(model, values.layer, True, [(values.places, neurons)])
    columns = _labelled(model, outputs.layer, False, [(outputs.places, neurons.expand(outputs.places.shape))])
    if rows is None or columns is None:
        return None
    return NeuronGroup(
        heads * numbers, (values.layer,), (outputs.layer,), heads, queries, (), True,
        _stored(model, values.layer, rows, True) | _stored(model, outputs.layer, columns, False),
        {values.layer: rows}, {outputs.layer: columns},
    )  # fmt: skip


def score_group(model: nn.Module, attention: Attention, classes: Tensor) -> NeuronGroup | None:
    """What queries and keys of an attention are compared in, if numbers of a head go together as `classes` says.

    classes: (numbers of a head,), see `pairings`. Whether they do, is for a trial to say (`trials.compares_alone`).
    """
    queries, keys = attention.queries, attention.keys
    if queries is None or keys is None or len(classes) != queries.places.shape[2]:
        return None
    (heads, shared, numbers), each = queries.places.shape, int(classes.max()) + 1
    neurons = (torch.arange(heads)[:, None] * each + classes).view(heads, 1, numbers)
    wanted = {queries.layer: [(queries.places, neurons.expand(-1, shared, -1))]}
    wanted.setdefault(keys.layer, []).append((keys.places, neurons))
    rows, carried = dict[str, Tensor](), dict[tuple[str, int], Tensor]()
    for name, pairs in wanted.items():
        labels = _labelled(model, name, True, pairs)
        if labels is None:
            return None
        rows[name] = labels
        carried |= _stored(model, name, labels, True)
    return NeuronGroup(heads * each, tuple(rows), (), heads, 0, (), True, carried, rows, {}, attention)


def pairings(numbers: int) -> list[Tensor]:
    """How numbers of a head may go together: for each number its class, those that suppose least and most usual first.

    Alone; or turned by a rotary position, all of them or the first ones only, with the number half of the turned ones
    on, or with the next one.

    >>> [classes.tolist() for classes in pairings(4)][:3]
    [[0, 1, 2, 3], [0, 1, 0, 1], [0, 0, 1, 2]]
    """
    even = list(range(2, numbers + 1, 2))
    quarters = [count for count in even if 4 * count % numbers == 0]
    found = [torch.arange(numbers)]
    for count in [*reversed(quarters), *(count for count in even if count not in quarters)]:
        rest = count // 2 + torch.arange(numbers - count)
        found.append(torch.cat([torch.arange(count // 2).repeat(2), rest]))
    for count in quarters:  # whoever turns more of them with the next one fits too
        rest = count // 2 + torch.arange(numbers - count)
        found.append(torch.cat([torch.arange(count // 2).repeat_interleave(2), rest]))
    return list({tuple(classes.tolist()): classes for classes in found}.values())


def _labelled(model: nn.Module, name: str, outputs: bool, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor | None:
    """The neurons along a side of a linear layer, from places and the neurons that are there."""
    module = model.get_submodule(name)
    if not isinstance(module, nn.Linear) and not is_transformers_conv1d(module):
        return None
    weight = module.get_parameter("weight")
    labels = torch.full((weight.shape[int(outputs != isinstance(module, nn.Linear))],), -1)
    for places, neurons in pairs:
        labels[places.flatten()] = neurons.flatten()
    return labels


def _stored(model: nn.Module, name: str, labels: Tensor, outputs: bool) -> dict[tuple[str, int], Tensor]:
    """Where a linear layer stores the neurons along one of its sides."""
    module = model.get_submodule(name)
    found = {(f"{name}.weight", int(outputs == is_transformers_conv1d(module))): labels}
    if outputs and module._parameters.get("bias") is not None:
        found[f"{name}.bias", 0] = labels
    return found


def find_neuron_groups(model: nn.Module, names: Collection[str], batch: Batch) -> list[NeuronGroup]:
    """The neurons between some layers of a model in evaluation mode, in the order of the model.

    Raises `Untraceable` where the model's graph cannot be had.

    >>> net = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)).eval()
    >>> (group,) = find_neuron_groups(net, {"0", "4"}, Batch(0, 2, (torch.zeros(2, 1, 4, 4),)))
    >>> group
    NeuronGroup(size=6, writers=('0',), readers=('4',), heads=0, width=4, passed=('1',), embedded=False)
    >>> sorted({name for name, _ in group.carried})
    ['0.bias', '0.weight', '1.bias', '1.running_mean', '1.running_var', '1.weight', '4.weight']
    """
    found = neuron_groups(model, trace_batch(model, batch)).values()
    return [group for group in found if {*group.layers} <= {*names}]


def trace_batch(model: nn.Module, batch: Batch) -> Spaces:
    """The spaces of a model in evaluation mode, followed on a batch."""
    example: Any = dict(batch.named) if batch.named else batch.positional
    return trace(model, example, ("evaluation",))


@torch.no_grad()
def without(model: nn.Module, kept: Sequence[tuple[NeuronGroup, Tensor]]) -> nn.Module:
    """A copy of the model with only these neurons of each group.

    Groups may overlap, as the heads of grouped queries do: what is not kept in one of them goes.

    >>> net = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 3))
    >>> without(net, [(NeuronGroup.between(net, ["0"], "2"), torch.tensor([0, 4]))])[2]
    Linear(in_features=2, out_features=3, bias=True)
    """
    stay = dict[tuple[str, int], Tensor]()
    for group, neurons in kept:
        for place, labels in group.carried.items():
            mine = torch.isin(labels, neurons.cpu()) | (labels < 0)
            stay[place] = mine & stay[place] if place in stay else mine
    small = copy.deepcopy(model)
    for (name, axis), mask in stay.items():
        path, _, last = name.rpartition(".")
        owner: Any = small.get_submodule(path)
        old = getattr(owner, last)
        new = old.index_select(axis, mask.nonzero()[:, 0].to(old.device))
        setattr(owner, last, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new)
        if isinstance(owner, nn.Linear):
            owner.out_features, owner.in_features = owner.weight.shape
        elif is_transformers_conv1d(owner):
            owner.nx, owner.nf = owner.weight.shape
        elif isinstance(owner, CONVOLUTIONS) and _keeps_apart(owner):
            owner.out_channels = owner.in_channels = owner.groups = len(owner.weight)
        elif isinstance(owner, CONVOLUTIONS):
            owner.out_channels, owner.in_channels = owner.weight.shape[:2]
        elif isinstance(owner, _BATCH_NORM) and owner.weight is not None:
            owner.num_features = len(owner.weight)
    return small


@torch.no_grad()
def rotate_heads_(model: nn.Module, group: NeuronGroup, forward: Tensor, back: Tensor) -> None:
    """Let the writer hand on other numbers of each head, and the reader take them back: (heads, width, width) each.

    Of numbers in which queries and keys are compared, the queries go forward, and the keys back.
    """
    if group.attention is not None:
        queries, keys = group.compared
        _rotate_rows_(model, queries.layer, queries.places, forward)
        _rotate_rows_(model, keys.layer, keys.places, back.mT)
        return
    heads, (writer,) = group.heads, group.writers
    rows = group.rows[writer].argsort(stable=True)[-group.size :]  # each neuron is one of them
    _rotate_rows_(model, writer, rows.view(heads, 1, -1), forward)
    read = _matrix(model.get_submodule(group.reader))
    places = group.places.view(heads, -1, group.width).mT.to(read.device)  # (heads, queries, numbers)
    turned = torch.einsum("ohqw,hwv->ohqv", read.double()[:, places], back.to(read.device))
    read[:, places] = turned.to(read.dtype)


def _rotate_rows_(model: nn.Module, name: str, places: Tensor, rotation: Tensor) -> None:
    """Give a layer other numbers of each head; places: (heads, queries, numbers)."""
    module = model.get_submodule(name)
    for written in (_matrix(module), module._parameters.get("bias")):
        if written is not None:
            rotated = torch.einsum("hwv,hqv...->hqw...", rotation.to(written.device), written.double()[places])
            written[places] = rotated.to(written.dtype)


def _matrix(layer: nn.Module) -> Tensor:
    """The weight as (outputs, inputs), in place: transformers' `Conv1D` stores it the other way round."""
    weight = layer.get_parameter("weight")
    return weight if isinstance(layer, nn.Linear) else weight.T
