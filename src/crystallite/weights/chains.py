"""Layers that names and shapes show to follow each other, so that the neurons between them are shared."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from crystallite.weights.layers import Layer

__all__ = ["LayerChain", "known_chains"]

# Feed-forward pairs by the ends of their names: what writes the hidden neurons, and what reads them.
_PAIRS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("ffn_gate", "ffn_up"), "ffn_down"),
    (("w1", "w3"), "w2"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
    (("intermediate.dense",), "output.dense"),
    (("c_fc",), "c_proj"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("fc_in",), "fc_out"),
)
_NUMBERED = re.compile(r"(?P<stem>(?:.*\.)?[A-Za-z_]*)(?P<number>\d+)")


@dataclass(frozen=True)
class LayerChain:
    """Layers with the groups of neurons that each writes and reads, numbered from 0 in the order they are met."""

    name: str
    layers: tuple[Layer, ...]
    writes: tuple[int, ...]
    reads: tuple[int, ...]  # of feedback, what it writes

    def __repr__(self) -> str:
        return f"LayerChain({self.name}: {' → '.join(layer.name for layer in self.layers)})"


def known_chains(layers: Sequence[Layer]) -> list[LayerChain]:
    """Chains among layers whose order names leave no doubt about; a layer is in one of them at most.

    Feed-forward pairs, plain or gated, by the names that they have in transformers and GGUF; numbered layers of one
    parent (`0`, `2`, `4` of an nn.Sequential, `fc1`, `fc2`) whose sizes fit, unless all have the same shape, as a list
    of layers side by side has; input and feedback weights of a recurrent layer.

    >>> def linear(name, rows, cols):
    ...     return Layer(name, "linear", (f"{name}.weight",), rows=rows, cols=cols)
    >>> known_chains([linear("net.0", 8, 4), linear("net.2", 8, 8), linear("net.4", 2, 8), linear("head", 2, 2)])
    [LayerChain(net: net.0 → net.2 → net.4)]
    >>> known_chains([linear("heads.0", 4, 4), linear("heads.1", 4, 4)])
    []
    """
    plain = {layer.name: layer for layer in layers if layer.kind == "linear" and layer.place is None}
    found = [*_pairs(plain), *_recurrent({layer.name: layer for layer in layers if layer.kind == "recurrent"})]
    taken = {layer.name for chain in found for layer in chain.layers}
    found += _numbered({name: layer for name, layer in plain.items() if name not in taken})
    order = {layer.name: place for place, layer in enumerate(layers)}
    return sorted(found, key=lambda chain: order[chain.layers[0].name])


def _pairs(layers: dict[str, Layer]) -> list[LayerChain]:
    found = []
    for name, first in layers.items():
        for firsts, second in _PAIRS:
            if not re.fullmatch(rf"(.*\.)?{re.escape(firsts[0])}", name):
                continue
            parent = name[: len(name) - len(firsts[0])]
            writers = [layers.get(parent + end) for end in firsts]
            reader = layers.get(parent + second)
            if reader is None or any(w is None or w.rows != reader.cols or w.cols != first.cols for w in writers):
                continue
            members = (*(w for w in writers if w is not None), reader)
            writes, reads = (*(0 for _ in writers), 2), (*(1 for _ in writers), 0)
            found.append(LayerChain(parent.rstrip(".") or "feed-forward", members, writes, reads))
            break
    return found


def _numbered(layers: dict[str, Layer]) -> list[LayerChain]:
    by_stem: dict[str, list[tuple[int, Layer]]] = {}
    for name, layer in layers.items():
        if match := _NUMBERED.fullmatch(name):
            by_stem.setdefault(match["stem"], []).append((int(match["number"]), layer))
    found = []
    for stem, numbered in by_stem.items():
        numbered.sort(key=lambda pair: pair[0])
        members = [layer for _, layer in numbered]
        fits = all(after.cols == before.rows for before, after in pairwise(members))
        if len(members) < 2 or not fits or len({(layer.rows, layer.cols) for layer in members}) == 1:
            continue
        writes = (0, *range(2, len(members) + 1))
        apart = stem.rpartition(".")[2]  # "lin" of lin1 and lin2, which is no module
        name = f"{members[0].name}…{numbered[-1][0]}" if apart else stem.rstrip(".") or "network"
        found.append(LayerChain(name, tuple(members), writes, (1, *writes[:-1])))
    return found


def _recurrent(layers: dict[str, Layer]) -> list[LayerChain]:
    found = []
    for name, feedback in layers.items():
        head, _, tail = name.rpartition("_hh")
        reads = layers.get(f"{head}_ih{tail}")
        if feedback.feedback and head and reads is not None and reads.rows == reads.gates * feedback.rows:
            found.append(LayerChain(f"{head}{tail}".removesuffix("_"), (reads, feedback), (0, 0), (1, 0)))
    return found
