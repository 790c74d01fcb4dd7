"""Attention however it is stored: shared heads, fused layers, turned weights, rotary positions."""

import pytest
import torch
import transformers

import crystallite as cx
from crystallite.compression.pruning import find_prunable
from crystallite.data.batch import Batch
from crystallite.graph.neuron_groups import trace_batch
from crystallite.models.layers import find_units
from tests.helpers.compressible import relative_error

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 99}
FEW = SIZES | {"intermediate_size": 48, "num_key_value_heads": 2}
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def built(name, **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**options, **TOKENS)
    model = getattr(transformers, f"{name}ForCausalLM", None) or getattr(transformers, f"{name}LMHeadModel", None)
    model = (model or getattr(transformers, f"{name}Model"))(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)  # attention that attends to something
    return model


def ids(count=2, length=7):
    return torch.randint(3, 99, (count, length), generator=torch.Generator().manual_seed(1))


# model → (heads of keys, queries for each, numbers), the layers of queries, keys, values and outputs, and what queries
# and keys are compared in: numbers, or as many pairs of them and the rest
KNOWN = {
    "grouped": (("Llama", FEW), (2, 2, 8), "q_proj k_proj v_proj o_proj", 4),
    "one head of keys": (("Falcon", SIZES), (1, 4, 8), "query_key_value dense", 4),
    "fused by heads": (("Falcon", SIZES | {"new_decoder_architecture": True, "num_kv_heads": 2}), (2, 2, 8),
                       "query_key_value dense", 4),
    "fused, cut": (("Phi3", FEW), (2, 2, 8), "qkv_proj o_proj", 4),
    "fused, turned weight": (("GPT2", {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 99}), (4, 1, 8),
                             "c_attn c_proj", 8),
    "fused inside heads": (("Bloom", {"hidden_size": 32, "n_layer": 1, "n_head": 4, "vocab_size": 99}), (4, 1, 8),
                           "query_key_value dense", 8),
    "some numbers turned": (("GPTNeoX", SIZES | {"intermediate_size": 48, "rotary_pct": 0.5}), (4, 1, 8),
                            "query_key_value dense", 6),
    "neighbours turned": (("GPTJ", {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 99, "rotary_dim": 4}),
                          (4, 1, 8), "q_proj k_proj v_proj out_proj", 6),
    "no positions in heads": (("Bert", SIZES | {"intermediate_size": 48}), (4, 1, 8), "query key value dense", 8),
    "capped scores": (("Gemma2", FEW | {"head_dim": 8}), (2, 2, 8), "q_proj k_proj v_proj o_proj", 4),
}  # fmt: skip


@pytest.mark.parametrize("case", KNOWN)
def test_heads_are_found_however_they_are_stored(case):
    (name, options), (heads, queries, numbers), layers, classes = KNOWN[case]
    model, batch = built(name, **options), Batch(0, 2, named={"input_ids": ids()})
    (attention,) = trace_batch(model, batch).attentions
    assert [layer.rpartition(".")[2] for layer in attention.layers] == layers.split()
    assert attention.values.places.shape == attention.keys.places.shape == (heads, 1, numbers)
    assert attention.outputs.places.shape == attention.queries.places.shape == (heads, queries, numbers)
    found = find_prunable(model, [unit.name for unit in find_units(model, ["*"], [])], batch)
    assert not found.reasons
    values, scores = (group for group in found.groups if group.inside_heads)
    assert (values.size, values.width, values.heads) == (heads * numbers, queries, heads)
    assert (scores.size, scores.readers) == (heads * classes, ())
    assert len(found.groups) == 3  # and the feed-forward pair


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("Qwen3", FEW | {"head_dim": 8}, "a norm over each head lies between the layers and the scores"),
        ("DebertaV2", SIZES | {"intermediate_size": 48, "relative_attention": True, "position_buckets": 8,
                               "pos_att_type": ["c2p", "p2c"]}, "its scores are a sum of 3 products"),
    ],
)  # fmt: skip
def test_heads_that_must_stay_say_why(name, options, reason):
    model, batch = built(name, **options), Batch(0, 2, named={"input_ids": ids()})
    found = find_prunable(model, [unit.name for unit in find_units(model, ["*"], [])], batch)
    assert list(found.reasons.values()) == [reason]
    assert sum(group.inside_heads for group in found.groups) == 1  # values go all the same


def test_planted_pairs_and_directions_go_at_no_loss():
    """Half of the rotary pairs of each head compare nothing, and of each head two directions are read."""
    model = built("Llama", **FEW | {"num_hidden_layers": 2})
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.q_proj.weight.view(4, 2, 4, 32)[:, :, ::2] = 0  # pairs are (i, i + 4) of 8
            for head in attention.o_proj.weight.view(32, 2, 2, 8).unbind(1):  # two queries read one head of values
                seen = torch.randn(2, 8)
                head.copy_(torch.einsum("oqd,dn->oqn", torch.randn(32, 2, 2), seen) / 4)
    layers = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    kept = {"q_proj": 0.5, "k_proj": 0.5, "v_proj": 0.25, "o_proj": 0.25}
    sizes = {n: model.get_submodule(n).weight.numel() for n in layers}
    budget = sum(size * kept.get(n.rpartition(".")[2], 1) for n, size in sizes.items()) / sum(sizes.values())
    data = [{"input_ids": part} for part in ids(96, 12).split(24)]
    small = cx.compress(model, data, budget=budget + 1e-6)
    became = {c.name.rpartition(".")[2]: c.became for c in cx.summary(small).changes if ".1." in c.name}
    assert became["q_proj"].startswith("16 of 32 outputs")
    assert became["k_proj"].startswith("8 of 16 outputs")
    assert became["v_proj"].startswith("4 of 16 outputs")
    fresh = {"input_ids": ids(8, 12)}
    with torch.no_grad():
        assert relative_error(small(**fresh).logits, model(**fresh).logits) < 1e-4
