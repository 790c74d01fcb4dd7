"""Whole models of the transformers library, with planted blocks."""

import pytest
import torch

import crystallite as cx
from crystallite.reorganization.restore import restore
from tests.helpers.block_models import assert_same_state, block_linear, keep_, labels, mask
from tests.helpers.tolerance import assert_close

transformers = pytest.importorskip("transformers")


def check(model, expected):
    """Blocks where expected, the same logits, and undone; what became of each layer."""
    tokens = torch.randint(0, 50, (2, 7))
    small = cx.reorganize(model.eval(), level=None, only_if_faster=False)
    assert {name: type(small.get_submodule(name)) for name in expected} == expected
    with torch.no_grad():
        assert_close(small(tokens).logits, model(tokens).logits)
    assert len(small.reorganization.folds) > 0
    again = restore(small)
    assert_same_state(again, model)
    assert getattr(again.config, "quantization_config", None) is None
    return {change.name: change for change in cx.summary(small).changes}


def test_gpt2():
    """Conv1D layers, query, key and value in one of them, and a head tied to the embedding."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=32, n_layer=1, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    block = model.transformer.h[0]
    with torch.no_grad():
        block.attn.c_attn.weight.copy_(torch.cat([block_linear(32, 32, 4, seed).weight for seed in range(3)]).T)
        block.mlp.c_fc.weight.copy_(block_linear(32, 128, 4, 5).weight.T)
        block.mlp.c_proj.weight.copy_(block_linear(128, 32, 4, 6).weight.T)
    names = [f"transformer.h.0.{name}" for name in ("attn.c_attn", "mlp.c_fc", "mlp.c_proj")]
    changes = check(model, dict.fromkeys(names, cx.BlockLinear))
    assert [changes[name].macs_after for name in names] == [3 * 256, 1024, 1024]
    assert "tied" in changes["lm_head"].became


def test_llama():
    """A gated pair and grouped-query attention."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    block = model.model.layers[0]
    outer, inner = labels(32, 4, 1), labels(64, 4, 2)
    for layer in (block.mlp.gate_proj, block.mlp.up_proj):
        keep_(layer.weight, mask(inner, outer))
    keep_(block.mlp.down_proj.weight, mask(outer, inner))
    for seed, name in enumerate(("q_proj", "k_proj", "v_proj", "o_proj")):
        weight = block.self_attn.get_submodule(name).weight
        keep_(weight, mask(labels(len(weight), 4, seed + 3), labels(weight.shape[1], 4, seed + 7)))
    prefix = "model.layers.0"
    names = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.o_proj"]
    changes = check(model, {f"{prefix}.{name}": cx.BlockLinear for name in names})
    assert changes[f"{prefix}.mlp.gate_proj"].macs_after == 32 * 64 // 4
