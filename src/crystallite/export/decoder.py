"""A decoder of the Llama family as llama.cpp stores it: its sizes layer by layer, and its tensors by their names there.

Layers of one size are llama.cpp's own architecture of the class. Where they differ in their numbers of heads or
neurons, as compression leaves them, the architecture is `deci`, which reads these numbers layer by layer and computes
what `llama` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.core.errors import InvalidOption

__all__ = ["Decoder", "LayerSizes", "StoredTensor", "read_decoder"]

_PROJECTIONS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_NO_PLACE = (
    'llama.cpp has no place for it; compress with form="dense" (each layer may have its own width) or form="uniform" '
    "(all have one)"
)


@dataclass(frozen=True)
class _Stock:
    """llama.cpp's architecture for a class of transformers."""

    name: str
    turns_neighbours: bool = False  # rotary positions turn numbers 2i and 2i + 1 of a head, not i and i + half
    biases: frozenset[str] = frozenset()
    head_norms: bool = False
    any_heads: bool = True  # queries of all heads need not be as many numbers as a token has


_LLAMA = _Stock("llama", True, frozenset(_PROJECTIONS.values()))
_DECI = replace(_LLAMA, name="deci")
_STOCK = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _Stock("qwen2", biases=frozenset({"attn_q", "attn_k", "attn_v"}), any_heads=False),
    "Qwen3ForCausalLM": _Stock("qwen3", head_norms=True),
}


@dataclass(frozen=True)
class LayerSizes:
    """What may differ from layer to layer."""

    heads: int
    key_value_heads: int
    width: int  # neurons of the feed-forward part


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the model, and how it lies in the file."""

    name: str
    tensor: Tensor
    shape: tuple[int, ...]  # in the file, where zeros may follow
    turned_heads: int = 0  # heads whose rows are put into the order in which llama.cpp turns them

    def numbers(self) -> Tensor:
        """In float32, as they are written."""
        found = self.tensor.detach().float()
        if self.turned_heads:
            halves = found.reshape(self.turned_heads, 2, -1, *found.shape[1:])
            found = halves.transpose(1, 2).reshape(found.shape)
        for axis, size in enumerate(self.shape):
            if missing := size - found.shape[axis]:
                rest = [*found.shape[:axis], missing, *found.shape[axis + 1 :]]
                found = torch.cat([found, found.new_zeros(rest)], axis)
        return found.contiguous()


@dataclass(frozen=True)
class Decoder:
    """All that a GGUF file says of a model, but for its vocabulary."""

    architecture: str
    layers: tuple[LayerSizes, ...]
    head_size: int
    hidden_size: int
    vocabulary_size: int
    context: int
    epsilon: float
    rope_base: float
    rope_factor: float | None  # by which positions are divided
    tensors: tuple[StoredTensor, ...]
    notes: tuple[str, ...] = ()

    def filled_up(self, multiple: int) -> Decoder:
        """The same with neurons of zeros, so that every feed-forward part has a multiple of so many, and not none.

        They add nothing to what a layer returns. Rows of the layer that reads them can be cut into blocks; and where a
        layer had no neurons, llama.cpp would pass over its attention, too.
        """
        layers = [replace(each, width=max(-(-each.width // multiple), 1) * multiple) for each in self.layers]
        tensors = []
        for each in self.tensors:
            _, number, part, *_ = [*each.name.split("."), "", ""]
            if part.startswith("ffn_") and part != "ffn_norm":
                width, shape = layers[int(number)].width, list(each.shape)
                reads = part == "ffn_down"
                if not (reads and len(shape) == 1):  # what is added after it has no neurons
                    shape[-1 if reads else 0] = width
                each = replace(each, shape=tuple(shape))
            tensors.append(each)
        return replace(self, layers=tuple(layers), tensors=tuple(tensors))


def read_decoder(model: nn.Module) -> Decoder:
    """What a causal language model of transformers is to llama.cpp; refuses, by name, what it cannot be.

    >>> read_decoder(nn.Linear(2, 2))
    Traceback (most recent call last):
    crystallite.core.errors.InvalidOption: Linear: GGUF files are written of LlamaForCausalLM, MistralForCausalLM,
    Qwen2ForCausalLM, Qwen3ForCausalLM of transformers; export others as ONNX
    """
    stock = _STOCK.get(type(model).__name__)
    if stock is None or not type(model).__module__.startswith("transformers."):
        raise InvalidOption(
            f"{type(model).__name__}: GGUF files are written of {', '.join(_STOCK)} of transformers; export others as "
            "ONNX"
        )
    config: Any = model.config
    if config.hidden_act != "silu":
        raise InvalidOption(f"{type(model).__name__}: expected hidden_act silu, got {config.hidden_act!r:.80}")
    reader = _Reader(model, stock)
    sizes = [reader.layer_sizes(number) for number in range(reader.count)]
    kind = reader.architecture(sizes)
    tensors = list(reader.tensors(kind, sizes))
    base, factor, frequencies = _rotary(config, reader.head_size, kind)
    if frequencies is not None:
        tensors.append(StoredTensor("rope_freqs.weight", frequencies, tuple(frequencies.shape)))
    context, notes = config.max_position_embeddings, []
    window = getattr(config, "sliding_window", None)
    if window is not None and window < context:
        context = window
        notes.append(
            f"the context is {window} tokens: further back, layers of this model do not see, in llama.cpp all do"
        )
    return Decoder(
        kind.name, tuple(sizes), reader.head_size, reader.hidden_size, reader.embedding.shape[0], context,
        config.rms_norm_eps, base, factor, tuple(tensors), tuple(notes),
    )  # fmt: skip


class _Reader:
    """The parts of a model, each looked at before it is used."""

    def __init__(self, model: nn.Module, stock: _Stock) -> None:
        self.model, self.stock = model, stock
        self.count = len(self._part("model.layers", nn.ModuleList))
        self.embedding: Tensor = self._part("model.embed_tokens", nn.Embedding).weight
        self.hidden_size = self.embedding.shape[1]
        self.head_size = int(self._part("model.layers.0.self_attn").head_dim)

    def layer_sizes(self, number: int) -> LayerSizes:
        """The numbers of heads and neurons of a layer, whose parts must fit together."""
        place = f"model.layers.{number}"
        parts = {name: self._part(f"{place}.{part}", nn.Linear) for part, name in _PROJECTIONS.items()}
        attention = self._part(f"{place}.self_attn")
        size = self.head_size
        query, key, value = (parts[f"attn_{part}"].out_features for part in "qkv")
        if attention.head_dim != size or query % size or key % size or value != key or not key:
            raise InvalidOption(
                f"{place}.self_attn: expected heads of {size} queries, keys and values, as the first layer has them, "
                f"got {query}, {key} and {value} numbers in heads of {attention.head_dim}; {_NO_PLACE}"
            )
        heads, shared = query // size, key // size
        if heads != shared * attention.num_key_value_groups:
            raise InvalidOption(
                f"{place}.self_attn: {heads} heads of queries on {shared} of keys, of which each is for "
                f"{attention.num_key_value_groups}"
            )
        if not math.isclose(attention.scaling, size**-0.5):
            raise InvalidOption(f"{place}.self_attn: expected products scaled by 1/√{size}, got {attention.scaling:g}")
        width, hidden = parts["ffn_gate"].out_features, self.hidden_size
        shapes = {
            **{f"attn_{part}": (n, hidden) for part, n in (("q", query), ("k", key), ("v", key))},
            "attn_output": (hidden, query), "ffn_gate": (width, hidden), "ffn_up": (width, hidden),
            "ffn_down": (hidden, width),
        }  # fmt: skip
        for part, name in _PROJECTIONS.items():
            if (found := tuple(parts[name].weight.shape)) != shapes[name]:
                raise InvalidOption(f"{place}.{part}: expected a weight of {shapes[name]}, got {found}")
        return LayerSizes(heads, shared, width)

    def architecture(self, sizes: list[LayerSizes]) -> _Stock:
        """The model's own where it holds everything, else deci; refused where neither does."""
        uniform = len(set(sizes)) == 1 and sizes[0].width > 0
        fits = self.stock.any_heads or sizes[0].heads * self.head_size == self.hidden_size
        if uniform and fits and self._biases() <= self.stock.biases:
            return self.stock
        if self.stock.head_norms:
            differs = next((i for i, each in enumerate(sizes) if each != sizes[0]), 0)
            raise InvalidOption(
                f"model.layers.{differs}: {sizes[differs]} beside {sizes[0]}; llama.cpp knows layers of different "
                f"sizes, or biases, in none that norms queries and keys as {type(self.model).__name__} does; compress "
                'with form="uniform"'
            )
        return _DECI

    def tensors(self, kind: _Stock, sizes: list[LayerSizes]) -> Iterator[StoredTensor]:
        """Every tensor in the order of the file; a model with others is refused."""
        used = set[str]()

        def taken(source: str, name: str, turned_heads: int = 0) -> StoredTensor:
            used.add(source)
            value: Tensor = state[source]
            if not bool(torch.isfinite(value).all()):
                raise InvalidOption(f"{source}: expected finite numbers, got NaN or infinity")
            return StoredTensor(name, value, tuple(value.shape), turned_heads)

        state = self.model.state_dict(keep_vars=True)
        yield taken("model.embed_tokens.weight", "token_embd.weight")
        norms = _NORMS | (_HEAD_NORMS if self.stock.head_norms else {})
        for number, size in enumerate(sizes):
            place = f"model.layers.{number}"
            turned = {"attn_q": size.heads, "attn_k": size.key_value_heads} if kind.turns_neighbours else {}
            for part, name in norms.items():
                self._part(f"{place}.{part}")
                yield taken(f"{place}.{part}.weight", f"blk.{number}.{name}.weight")
            for part, name in _PROJECTIONS.items():
                for which in ("weight", "bias"):
                    if which == "weight" or f"{place}.{part}.bias" in state:
                        heads = turned.get(name, 0)
                        yield taken(f"{place}.{part}.{which}", f"blk.{number}.{name}.{which}", heads)
        yield taken("model.norm.weight", "output_norm.weight")
        head = self._part("lm_head", nn.Linear)
        used.add("lm_head.weight")
        if head.weight is not self.embedding:
            yield taken("lm_head.weight", "output.weight")
        if others := sorted(state.keys() - used):
            raise InvalidOption(f"{others[0]}: {_NO_PLACE}")

    def _biases(self) -> set[str]:
        layers = range(self.count)
        places = {(n, name): f"model.layers.{n}.{part}" for n in layers for part, name in _PROJECTIONS.items()}
        return {name for (_, name), place in places.items() if self._part(place).bias is not None}

    def _part(self, name: str, kind: type[nn.Module] | None = None) -> Any:
        """The module of this name; one of another kind has no place."""
        found: Any = self.model
        place = ""
        for step in name.split("."):
            inside = found._modules.get(step) if isinstance(found, nn.Module) else None
            if inside is None:
                raise InvalidOption(f"{place or 'the model'}: a {type(found).__name__} without {step}; {_NO_PLACE}")
            found, place = inside, f"{place}.{step}".removeprefix(".")
        if kind is not None and type(found) is not kind:
            raise InvalidOption(f"{name}: a {type(found).__name__}; {_NO_PLACE}")
        return found


def _rotary(config: Any, size: int, kind: _Stock) -> tuple[float, float | None, Tensor | None]:
    """The base of rotary positions, what positions are divided by, and what each frequency is divided by."""
    given = dict(getattr(config, "rope_parameters", None) or {})
    base, rule = float(given.get("rope_theta", 10_000.0)), given.get("rope_type", "default")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise InvalidOption("rope_parameters: expected positions that turn whole heads, got partial_rotary_factor")
    if rule == "default":
        return base, None, None
    if rule == "linear":
        return base, float(given["factor"]), None
    if rule == "llama3" and kind.turns_neighbours:
        return base, None, _stretched(base, size, given)
    raise InvalidOption(f"rope_parameters: expected rope_type default, linear, or llama3 of Llamas, got {rule!r:.80}")


def _stretched(base: float, size: int, given: dict[str, Any]) -> Tensor:
    """(size / 2,) By how much Llama 3 slows frequencies down whose waves are as long as a context before it was longer.

    >>> rule = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    >>> [round(each, 2) for each in _stretched(100.0, 8, rule).tolist()]
    [1.0, 1.29, 7.67, 8.0]
    """
    factor, low, high = (float(given[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    frequencies = base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    waves = float(given["original_max_position_embeddings"]) * frequencies / (2 * math.pi)  # in that context
    share = ((waves - low) / (high - low)).clamp(0, 1)  # of the frequency that stays as it was
    return (1 / (share + (1 - share) / factor)).float()
