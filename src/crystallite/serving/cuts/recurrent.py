"""`CutRecurrent`: what takes the place of a recurrent network whose weak components run elsewhere.

A component hears no other, so it runs through whole sequences alone: a piece gets what its units read at every step and
the states that they begin with, and returns their states at every step and at the end. It keeps nothing between calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from crystallite.operators.frobenius import frobenius_form
from crystallite.operators.recurrent import BlockRecurrent
from crystallite.operators.recurrent_layer import BlockRecurrentLayer, Steps
from crystallite.operators.recurrent_stack import RecurrentStack
from crystallite.operators.runtime.engine import can_run_compiled
from crystallite.operators.runtime.instructions import PANEL
from crystallite.serving.cuts.calls import call_pieces
from crystallite.serving.cuts.site import Cost, Named, Site
from crystallite.serving.interface import TakesNames
from crystallite.serving.signature import INPUT, OUTPUT, Tensors

__all__ = ["CutRecurrent", "recurrent_sites"]

_STATES = ("hidden", "cell")
_SMALLEST = 32  # units that are stored as one block, as `BlockRecurrent.from_dense` does


def recurrent_sites(network: BlockRecurrent) -> list[Site]:
    """One site for each layer and direction: its weak components, small ones that are stored as one block together."""
    sites = []
    for number, layer in enumerate(network.layers):
        assert isinstance(layer, BlockRecurrentLayer)
        backward = network.bidirectional and number % 2 == 1
        costs = tuple(_cost(layer, *found) for found in layer.form.bins(1))
        sites.append(Site(f"layers.{number}", costs, partial(_Component.of, layer, backward)))
    return sites


def _cost(layer: BlockRecurrentLayer, reads: int, first: int, stop: int) -> Cost:
    """Multiply-adds of a time step, and bytes, of the units at some positions, which hear no others."""
    form, units = layer.form, stop - first
    inside = [block for block in form.blocks if first <= block.first < stop]
    columns, sources = form.inputs[reads].columns if reads >= 0 else 0, sum(block.sources for block in inside)
    outside = form.gates * (units * columns + sum(block.size * block.sources for block in inside))
    heard = sum(form.gates * block.size * block.feedback for block in inside)
    stored = sum(-(-form.gates * block.size // PANEL) * PANEL * block.feedback for block in inside)
    biases = form.gates * units * sum(bias is not None for bias in (layer.bias_ih, layer.bias_hh))
    numbers, indices = outside + stored + biases, 3 * units + columns + sources
    size = numbers * next(layer.parameters()).element_size() + indices * layer.order.element_size()
    return Cost(outside + heard, size)


class CutRecurrent(RecurrentStack):
    """A recurrent network without its weights, behind the same interface: states come and go with each call."""

    def __init__(self, network: BlockRecurrent, pieces: Sequence[Named]) -> None:
        """pieces: for each layer and direction."""
        super().__init__(**network.settings())
        pairs = zip(network.layers, pieces, strict=True)
        self.layers = nn.ModuleList(_CutLayer(layer, named) for layer, named in pairs)  # type: ignore[arg-type]

    def _weight_dtype(self) -> torch.dtype:
        return next(self.buffers()).dtype


class _CutLayer(nn.Module):
    """One layer and direction: data and states dealt out to pieces of units, what they return put together."""

    weight: Tensor
    position: Tensor  # of each unit among those of all pieces

    def __init__(self, layer: BlockRecurrentLayer, named: Named) -> None:
        super().__init__()
        self.register_buffer("weight", next(layer.parameters()).detach().new_empty(0), persistent=False)
        self.pieces, units = tuple(named), []
        for number, bins in enumerate(named.values()):
            columns, own = _tables(layer, bins)
            units.append(own)
            self.register_buffer(f"columns_{number}", columns, persistent=False)
            self.register_buffer(f"units_{number}", own, persistent=False)
        self.register_buffer("position", torch.argsort(torch.cat(units)), persistent=False)

    def forward(
        self, data: Tensor, steps: Steps, states: tuple[Tensor, ...], backward: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Output (rows, hidden) and final states (batch, hidden); the pieces know whether they run backward."""
        counts, requests = torch.from_numpy(steps.counts), []
        for number, piece in enumerate(self.pieces):
            read, own = (self.get_buffer(f"{name}_{number}") for name in ("columns", "units"))
            own_states = (state.index_select(1, own) for state in states)
            given = {
                INPUT: data.index_select(1, read),
                "counts": counts,
                **dict(zip(_STATES, own_states, strict=False)),
            }
            requests.append((piece, given))
        made = call_pieces(requests)
        names = (OUTPUT, *_STATES[: len(states)])
        output, *final = (torch.cat([m[name] for m in made], 1).index_select(1, self.position) for name in names)
        return output, tuple(final)


class _Component(TakesNames):
    """Some weak components of one layer and direction, as a layer of their own."""

    def __init__(self, layer: BlockRecurrentLayer, backward: bool) -> None:
        super().__init__()
        self.layer, self.backward = layer, backward

    @classmethod
    @torch.no_grad()
    def of(cls, layer: BlockRecurrentLayer, backward: bool, bins: Sequence[int]) -> _Component:
        """The components of some bins of a layer's form; the weights of others are not read."""
        columns, units = _tables(layer, bins)
        gates, hidden = layer.form.gates, len(units)
        found = [(layer.form.bins(1)[number], layer.part_weights(*layer.form.bins(1)[number])) for number in bins]
        like = next(layer.parameters())
        w_ih, w_hh = like.new_zeros(gates, hidden, len(columns)), like.new_zeros(gates, hidden, hidden)
        biases = [like.new_zeros(gates, hidden) for _ in found[0][1][1][2:]]
        begin = 0
        for (_, first, stop), (own_columns, weights) in found:
            size = stop - first
            mine = slice(begin, begin + size)
            w_ih[:, mine, torch.searchsorted(columns, own_columns)] = weights[0].view(gates, size, -1)
            w_hh[:, mine, mine] = weights[1].view(gates, size, size)
            for bias, own in zip(biases, weights[2:], strict=True):
                bias[:, mine] = own.view(gates, size)
            begin += size
        edges, reads = ((w != 0).any(0).cpu().numpy() for w in (w_hh, w_ih))
        form, maps = frobenius_form(edges, reads, gates, _SMALLEST)
        made = BlockRecurrentLayer(layer.mode, len(columns), form, bool(biases), like.device, like.dtype)
        both = (bias.flatten() for bias in biases) if biases else (None, None)
        made.load_dense(maps, w_ih.flatten(0, 1), w_hh.flatten(0, 1), *both)
        return cls(made, backward)

    def forward(self, given: Tensors) -> Tensors:
        data, counts = given[INPUT], given["counts"]
        states = tuple(given[name] for name in _STATES if name in given)
        steps = Steps(len(counts), int(counts[0]), counts.numpy() if (counts != counts[0]).any() else None)
        if all(can_run_compiled(given, self) for given in (data, *states)):
            output = data.new_empty(len(data), self.layer.form.hidden)
            final = self.layer.run(data, steps, states, self.backward, output, 0)
        else:
            output, final = self.layer(data, steps, states, self.backward)
        return {OUTPUT: output, **dict(zip(_STATES, final, strict=False))}


def _tables(layer: BlockRecurrentLayer, bins: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The inputs that the components of some bins read, ascending, and their units."""
    found = [layer.form.bins(1)[number] for number in bins]
    reads = [layer.columns_of(reads) if reads >= 0 else layer.order.new_zeros(1) for reads, _, _ in found]
    units = [layer.order[first:stop] for _, first, stop in found]
    return torch.cat(reads).unique(), torch.cat(units)
