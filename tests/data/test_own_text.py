"""Text that a model writes itself."""

import pytest
import torch
from torch import nn

import crystallite as cx

transformers = pytest.importorskip("transformers")


def test_what_a_model_writes_follows_its_predictions_and_repeats():
    config = transformers.LlamaConfig(
        vocab_size=12, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, bos_token_id=0,
        eos_token_id=1, pad_token_id=None, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[5:7] = 40 * torch.randn(2, 16)  # 5 and 6 are likely wherever one of them is above zero
    before = torch.random.get_rng_state()
    found = torch.cat([batch["input_ids"] for batch in cx.own_text(model, 100, length=32)])
    assert torch.equal(before, torch.random.get_rng_state())
    assert found.shape == (4, 32)
    assert not bool(((found == 0) | (found == 1)).any())  # marks are no text
    assert float(((found == 5) | (found == 6))[:, 1:].float().mean()) > 0.3  # by chance: 0.2
    again = torch.cat([batch["input_ids"] for batch in cx.own_text(model, 100, length=32)])
    assert torch.equal(found, again)
    assert not torch.equal(found, torch.cat([b["input_ids"] for b in cx.own_text(model, 100, length=32, seed=1)]))


def test_only_language_models_write():
    with pytest.raises(cx.InvalidOption, match="own_text: expected a causal language model"):
        cx.own_text(nn.Linear(2, 2), 10)


def test_compress_takes_it_in_turn_with_the_calibration():
    config = transformers.GPT2Config(vocab_size=50, n_embd=32, n_inner=96, n_layer=2, n_head=2, n_positions=32)
    config.bos_token_id = config.eos_token_id = 0
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()  # knows 32 positions, and none beyond
    x = torch.randint(3, 50, (24, 32))
    small = cx.compress(model, x, budget=0.8, own_text=512)
    assert cx.summary(small).macs[1] <= 0.8 * cx.summary(small).macs[0]
    with pytest.raises(cx.InvalidOption, match="own_text"):
        cx.compress(nn.Linear(4, 4), torch.randn(64, 4), budget=0.5, own_text=512)
