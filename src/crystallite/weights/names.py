"""What a tensor is, from its name and shape: the conventions of PyTorch, Hugging Face, GGUF, Keras and timm.

Rules are tried from the most telling to the least; the first that applies decides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property

from crystallite.weights.stored import Role, TensorInfo

__all__ = ["Tensors", "is_fused_qkv", "layer_name", "role_from_name"]

_WEIGHT_LEAVES = ("weight", "kernel")
_LONGEST_CONVENTION = 100  # characters of a part of a name; looking for conventions takes the square of them
_EMBEDDING = re.compile(
    r"wte|wpe|shared|tok_embeddings|relative_attention_bias|embed_(tokens|positions|in)|lookup_table"
    r"|(\w+_)?(embeddings?|embed|embd|emb)(_table|_tokens)?"
)
_FUSED_QKV = re.compile(r"c_attn|query_key_value|(w|to_|attn_)?qkv(_proj)?|qkv_proj", re.IGNORECASE)
_NORM = re.compile(r"\w*norms?(_?\w*)?|(\w+_)?(ln|bn)(_?\w+)?", re.IGNORECASE)
_MATRIX_NORM = re.compile(r"\w*norms?_?\d*", re.IGNORECASE)  # one row per head; a matrix called norm_proj is none
_BIAS = re.compile(r"(\w+_)?bias(_\w+)?|beta")
_SHORT_BIAS = re.compile(r"(\w+_)?b(_[ih]h)?")
_EXPERTS = re.compile(r"experts?\b|_exps\b")
_BUFFER = re.compile(
    r"running_(mean|var)|num_batches_tracked|inv_freq|(cos|sin)_cached|freqs_cis|masked_bias|(\w+_)?mask"
    r"|relative_position_index|relative_coords_table"
)
_SCALE = re.compile(r"(\w+_)?(scales?|zeros?|qzeros|scale_inv|zero_point|absmax|quant_map|nested_\w+|g_idx|weight_g)")
_RECURRENT = re.compile(r"(?P<head>.*?(?:weight|w))_(?P<which>ih|hh)(?P<tail>(?:_l\d+)?(?:_reverse)?)")
_POSITION_IDS = re.compile(r"(\w+_)?(position|token_type)_ids")
_GPT2_LINEAR = ("c_attn", "c_fc", "c_proj", "q_attn")  # transformers' Conv1D, stored (in, out) in these families:
_GPT2_FAMILIES = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp")
_TORCH_GATES = {1: ("h",), 3: ("r", "z", "n"), 4: ("i", "f", "g", "o")}
_KERAS_GATES = {1: ("h",), 3: ("z", "r", "h"), 4: ("i", "f", "c", "o")}


class Tensors(dict[str, TensorInfo]):
    """The tensors of a checkpoint by name: neighbours decide what a name leaves open."""

    @cached_property
    def gpt2_in_out(self) -> bool:
        """Whether layers with GPT-2's names are stored (in, out): the first that has a bias and is not square tells."""
        siblings = (_bias_says_in_out(info, self) for name, info in self.items() if _owner(name) in _GPT2_LINEAR)
        return next((says for says in siblings if says is not None), False)


def role_from_name(info: TensorInfo, tensors: Tensors, model_type: str = "") -> Role:
    """The tensor's role; `tensors` are its neighbours, which decide gates and orientation.

    >>> role_from_name(TensorInfo("h.0.ln_1.weight", (8,), "float32", 32), Tensors()).reason
    'norm'
    """
    skipped = _skipped(info, tensors)
    if skipped:
        return Role("skipped", skipped)
    recurrent = _recurrent(info, tensors)
    if recurrent is not None:
        return recurrent
    owner, ndim = _owner(info.name), len(info.shape)
    if _EMBEDDING.fullmatch(owner) and (ndim == 2 or (ndim == 3 and info.shape[0] == 1)):
        return Role("embedding")
    kernel_first = _leaf(info.name) == "kernel"  # Keras and Flax
    if ndim == 2:
        turned = kernel_first or _is_in_out(info, tensors, model_type)
        return Role("attention" if is_fused_qkv(info.name) else "linear", layout="in-out" if turned else "out-in")
    if ndim == 3 and _EXPERTS.search(info.name):  # one matrix each
        return Role("linear", layout="in-out" if _experts_in_out(info, tensors) else "out-in")
    return Role("conv", layout="kernel-in-out" if kernel_first else "out-in")


def is_fused_qkv(name: str) -> bool:
    """Whether the name is one of those given to query, key and value kept in one matrix.

    >>> is_fused_qkv("h.0.attn.c_attn.weight"), is_fused_qkv("layers.0.self_attn.q_proj.weight")
    (True, False)
    """
    return _leaf(name) == "in_proj_weight" or _FUSED_QKV.fullmatch(_owner(name)) is not None


def layer_name(name: str) -> str:
    """The layer a tensor belongs to: its name without the part that only says "weight".

    >>> layer_name("encoder.layer.0.intermediate.dense.weight"), layer_name("attn.in_proj_weight")
    ('encoder.layer.0.intermediate.dense', 'attn.in_proj')
    """
    short = re.sub(r"([./]|(?<=in_proj)_)(weight|kernel|embeddings)(:\d+)?$", "", name)
    return short or name


def _skipped(info: TensorInfo, tensors: Tensors) -> str:
    """Why the tensor is no matrix of weights, or nothing."""
    leaf, owner, ndim = _leaf(info.name), _owner(info.name), len(info.shape)
    if _POSITION_IDS.fullmatch(leaf):
        return "position ids"
    if _BUFFER.fullmatch(leaf) or (leaf == "bias" and ndim > 2):  # GPT-2 keeps its causal mask as attn.bias
        return "buffer"
    if info.dtype.startswith(("int", "uint", "bool")):
        return "integer"
    if info.dtype.startswith(("complex", "str", "bytes", "float4")):
        return info.dtype
    if 0 in info.shape:
        return "empty"
    if ndim == 0:
        return "scalar"
    if _BIAS.fullmatch(leaf) or (ndim == 1 and _SHORT_BIAS.fullmatch(leaf)):
        return "bias"
    has_statistics = f"{info.name.rpartition('.')[0]}.running_mean" in tensors
    if (ndim == 2 and _MATRIX_NORM.fullmatch(owner)) or (
        ndim == 1 and (_NORM.fullmatch(owner) or has_statistics or leaf in ("gamma", "moving_mean"))
    ):
        return "norm"
    if _SCALE.fullmatch(leaf):
        return "scale"
    is_token = ndim > 2 and sum(d > 1 for d in info.shape) <= 1 and leaf not in _WEIGHT_LEAVES  # (1, 1, d)
    if ndim == 1 or is_token:
        return "1-D"
    return f"{ndim}-D" if ndim > 5 else ""


def _recurrent(info: TensorInfo, tensors: Tensors) -> Role | None:
    if len(info.shape) != 2:
        return None
    if match := _RECURRENT.fullmatch(info.name):
        feedback = tensors.get(f"{match['head']}_hh{match['tail']}")
        if feedback is None or len(feedback.shape) != 2:
            return None
        projection = tensors.get(f"{match['head']}_hr{match['tail']}")
        hidden = projection.shape[-1] if projection is not None else feedback.shape[1]
        gates = _gates(feedback.shape[0], hidden, _TORCH_GATES)
        square = hidden == feedback.shape[1]
        return Role("recurrent", gates=gates, feedback=match["which"] == "hh" and square) if gates else None
    leaf = _leaf(info.name)
    if leaf not in ("kernel", "recurrent_kernel"):
        return None
    head, _, tail = info.name.rpartition(leaf)
    keras_feedback = tensors.get(f"{head}recurrent_kernel{tail}")
    if keras_feedback is None or len(keras_feedback.shape) != 2:
        return None
    gates = _gates(keras_feedback.shape[1], keras_feedback.shape[0], _KERAS_GATES)
    is_feedback = leaf == "recurrent_kernel"
    return Role("recurrent", layout="in-out", gates=gates, feedback=is_feedback) if gates else None


def _gates(stacked: int, hidden: int, known: Mapping[int, tuple[str, ...]]) -> tuple[str, ...]:
    count, rest = divmod(stacked, max(1, hidden))
    return () if rest else known.get(count, tuple(f"gate{i}" for i in range(count)))


def _is_in_out(info: TensorInfo, tensors: Tensors, model_type: str) -> bool:
    """Whether a matrix is stored (in, out): its bias, or in the GPT-2 naming its siblings, tell."""
    by_bias = _bias_says_in_out(info, tensors)
    if by_bias is not None:
        return by_bias
    if _owner(info.name) not in _GPT2_LINEAR:
        return False
    if model_type:
        return model_type in _GPT2_FAMILIES
    return tensors.gpt2_in_out  # square: as the others are


def _experts_in_out(info: TensorInfo, tensors: Tensors) -> bool:
    """Whether experts are stored (experts, in, out): gate and up in one stack are twice as many as the other reads."""
    prefix = info.name.rpartition(".")[0]
    stacks = [tensors.get(f"{prefix}.{leaf}") for leaf in ("gate_up_proj", "down_proj")]
    shapes = [stack.shape for stack in stacks if stack is not None and len(stack.shape) == 3]
    if len(shapes) < 2:
        return False
    (_, inputs, both), (_, hidden, outputs) = shapes
    return both == 2 * hidden and inputs == outputs


def _bias_says_in_out(info: TensorInfo, tensors: Tensors) -> bool | None:
    bias = tensors.get(re.sub(r"(weight|w)$", lambda m: "bias" if m[0] == "weight" else "b", info.name))
    if bias is None or len(bias.shape) != 1 or len(info.shape) != 2 or info.shape[0] == info.shape[1]:
        return None
    if bias.shape[0] not in info.shape:
        return None
    return bias.shape[0] == info.shape[1]


def _parts(name: str) -> list[str]:
    return re.split(r"[./]", re.sub(r":\d+$", "", name))


def _leaf(name: str) -> str:
    leaf = _parts(name)[-1]
    return leaf if len(leaf) <= _LONGEST_CONVENTION else ""


def _owner(name: str) -> str:
    """The last part of the name that says more than "weight"."""
    parts = [part if len(part) <= _LONGEST_CONVENTION else "" for part in _parts(name)[-2:]]
    if parts[-1] in _WEIGHT_LEAVES and len(parts) > 1:
        parts.pop()
    return parts[-1].removesuffix("_weight")
