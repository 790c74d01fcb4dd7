"""`BlockRecurrent`: RNN, GRU and LSTM in Frobenius form, behind the interface of the modules they replace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crystallite.core.errors import InvalidMatrix, InvalidOption
from crystallite.operators.frobenius import FrobeniusForm, Maps, frobenius_form
from crystallite.operators.recurrent_layer import GATES, BlockRecurrentLayer, Steps
from crystallite.operators.recurrent_stack import RecurrentStack, suffixes
from crystallite.operators.runtime.engine import can_run_compiled

__all__ = ["BlockRecurrent"]

# measured by benchmarks/recurrent.py
_MACS_PER_CALL = 5_000  # per time step: what a call of compiled code costs, spread over 128 steps
_EFFICIENCY = {"RNN_TANH": 1.0, "RNN_RELU": 1.0, "GRU": 1.0, "LSTM": 0.85}  # multiply-adds per second, dense = 1


class BlockRecurrent(RecurrentStack):
    """A recurrent network as strongly connected blocks: the drop-in for `nn.RNN`, `nn.GRU` and `nn.LSTM`.

    One node per hidden unit; an edge where any gate keeps it. In the Frobenius form of that graph (paper, eq.
    EQ:Frobenius) only the diagonal blocks are sequential in time. What a block hears from another is one product over
    the whole sequence of that block's states; blocks that do not hear each other run side by side.

    Input, initial states, outputs and final states are those of the module replaced, packed sequences included. With
    gradients, or on other devices and dtypes than float32 and float64 on the CPU, PyTorch's own kernels run on each
    independent part. Training stays inside the blocks: zeros between them stay zeros, zeros inside them may change.

    >>> dense = nn.GRU(2, 4)
    >>> _ = nn.init.zeros_(dense.weight_hh_l0.data.view(3, 4, 4)[:, :2, 2:])  # units 2 and 3 hear 0 and 1, not back
    >>> blocks = BlockRecurrent.from_dense(dense, smallest=1)
    >>> blocks
    BlockRecurrent(GRU(2, 4), 2 SCCs in 2 blocks of up to 2 units, depth 2, 60 of 72 multiply-adds)
    >>> x = torch.randn(5, 1, 2)
    >>> torch.allclose(blocks(x)[0], dense(x)[0], atol=1e-6)
    True
    """

    def __init__(
        self,
        mode: str,
        input_size: int,
        hidden_size: int,
        forms: Sequence[FrobeniusForm],
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`forms`: one for each layer and direction, forward before backward. Weights are zero: see `from_dense`."""
        super().__init__(mode, input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional)
        sizes = self._input_sizes("forms", forms)
        for form in forms:
            if (form.gates, form.hidden) != (GATES[mode], hidden_size):
                raise InvalidOption(
                    f"forms: expected {GATES[mode]} gates and {hidden_size} units, got {form.gates} and {form.hidden}"
                )
        self.layers = nn.ModuleList(
            BlockRecurrentLayer(mode, size, form, bias, device, dtype) for size, form in zip(sizes, forms, strict=True)
        )

    @classmethod
    def from_dense(
        cls, module: nn.RNNBase, masks: Mapping[str, Tensor] | None = None, smallest: int = 32
    ) -> BlockRecurrent:
        """The blocks of a recurrent module whose weights are kept where their mask says, or where they are not zero.

        masks: by parameter name, "weight_hh_l0", "weight_ih_l1_reverse", …; each of the shape of its weight.
        smallest: neighbouring blocks of up to so many units in all are stored and run as one, with zeros between them
            that stay zeros in training; smaller ones would cost more to start than to run. 1: no such blocks.
        """
        if not isinstance(module, nn.RNNBase) or module.mode not in GATES:
            raise InvalidOption(f"expected an nn.RNN, nn.GRU or nn.LSTM, got {type(module).__name__}")
        if module.proj_size:
            raise InvalidOption(f"proj_size must be 0, got {module.proj_size}: a projected state mixes all blocks")
        ends = suffixes(module.num_layers, module.bidirectional)
        kept = _kept(module, {**(masks or {})}, [f"weight_{k}_l{s}" for s in ends for k in ("ih", "hh")])
        gates = GATES[module.mode]
        found = []
        for s in ends:
            edges, reads = (
                kept[f"weight_{k}_l{s}"].view(gates, module.hidden_size, -1).any(0).cpu().numpy() for k in ("hh", "ih")
            )
            found.append(frobenius_form(edges, reads, gates, smallest))
        weight = next(module.parameters())
        result = cls(
            module.mode, module.input_size, module.hidden_size, [form for form, _ in found], module.num_layers,
            module.bias, module.batch_first, module.dropout, module.bidirectional, weight.device, weight.dtype,
        )  # fmt: skip
        for s, layer, (_, maps) in zip(ends, result._layers(), found, strict=True):
            result._load(layer, maps, module, kept, s)
        result.requires_grad_(any(p.requires_grad for p in module.parameters()))
        return result.train(module.training)

    @staticmethod
    def _load(layer: BlockRecurrentLayer, maps: Maps, module: nn.RNNBase, kept: dict[str, Tensor], suffix: str) -> None:
        weights = [getattr(module, f"weight_{k}_l{suffix}").detach() for k in ("ih", "hh")]
        masked = [torch.where(kept[f"weight_{k}_l{suffix}"], w, 0) for k, w in zip(("ih", "hh"), weights, strict=True)]
        biases = [getattr(module, f"bias_{k}_l{suffix}") if module.bias else None for k in ("ih", "hh")]
        layer.load_dense(maps, *masked, *biases)

    def describe(self) -> dict[str, Any]:
        """Sizes, settings and forms, without weights and tables."""
        return self.settings() | {"forms": [layer.form.describe() for layer in self._layers()]}

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> BlockRecurrent:
        """A network of these sizes, not filled."""
        forms = [FrobeniusForm.from_description(form) for form in description["forms"]]
        return cls(**cls.checked_settings(description, "forms") | {"forms": forms})

    def index_limits(self) -> dict[str, int]:
        """Nothing: each layer has index tables of its own, and knows their limits."""
        return {}

    def _layers(self) -> Iterator[BlockRecurrentLayer]:
        for layer in self.layers:
            assert isinstance(layer, BlockRecurrentLayer)
            yield layer

    # what it is

    @property
    def n_sccs(self) -> int:
        """Strongly connected components of all layers and directions."""
        return sum(int(layer.rank[-1]) + 1 for layer in self._layers())

    @property
    def n_blocks(self) -> int:
        """What runs through time on its own: an SCC, several small ones, or units that hear at most themselves."""
        return sum(len(layer.form.blocks) for layer in self._layers())

    @property
    def macs(self) -> int:
        """Multiply-accumulates for one time step of one sequence."""
        return sum(layer.form.macs for layer in self._layers())

    @property
    def is_faster(self) -> bool:
        """Whether sequences of a hundred steps are expected to run faster than in the dense module."""
        calls = sum(len(layer.form.stacks) + len(layer.form.hearing) for layer in self._layers())
        return self.macs + _MACS_PER_CALL * calls < _EFFICIENCY[self.mode] * self.dense_macs

    def __repr__(self) -> str:  # the blocks are tensors, not modules: one line says it all
        blocks = [block for layer in self._layers() for block in layer.form.blocks]
        return (
            f"{type(self).__name__}({self._dense_repr()}, {self.n_sccs} SCC{'s' * (self.n_sccs != 1)} in {len(blocks)} "
            f"block{'s' * (len(blocks) != 1)} of up to {max(b.size for b in blocks)} units, "
            f"depth {max(b.depth for b in blocks) + 1}, {self.macs} of {self.dense_macs} multiply-adds)"
        )

    def _run(self, data: Tensor, steps: Steps, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        kind = next(self.parameters()).dtype
        if not all(state.dtype == kind and can_run_compiled(state, self) for state in (data, *states)):
            return super()._run(data, steps, states)
        directions, final, output = 1 + self.bidirectional, [], data
        for i, layer in enumerate(self._layers()):
            direction, mine = i % directions, tuple(state[i] for state in states)
            if direction == 0:
                data = F.dropout(output, self.dropout, self.training) if i else data
                output = data.new_empty(len(data), directions * self.hidden_size)
            final.append(layer.run(data, steps, mine, direction == 1, output, direction * self.hidden_size))
        return output, [torch.stack(kind) for kind in zip(*final, strict=True)]


def _kept(module: nn.RNNBase, masks: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    """A Boolean mask for each weight."""
    unknown = set(masks) - set(names)
    if unknown:
        raise InvalidOption(f"masks: expected names among {', '.join(names)}, got {sorted(unknown)[0]!r}")
    kept = {}
    for name in names:
        weight = getattr(module, name).detach()
        if not bool(torch.isfinite(weight).all()):
            raise InvalidMatrix(f"{name}: expected finite numbers, got NaN or infinity")
        mask = torch.as_tensor(masks.get(name, weight))
        if mask.shape != weight.shape:
            raise InvalidMatrix(f"masks[{name!r}]: expected shape {tuple(weight.shape)}, got {tuple(mask.shape)}")
        kept[name] = mask.to(weight.device) != 0
    return kept
