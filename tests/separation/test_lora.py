"""LoRA adapters on layers of blocks."""

import numpy as np
import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.separation.lora import lora_for_blocks
from tests.helpers.tolerance import assert_close

peft = pytest.importorskip("peft")


class Net(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(10, 3)

    def forward(self, x):
        return self.head(torch.relu(self.layer(x)))


def plain(weight, bias):
    found = cx.decompose(weight)
    return cx.BlockLinear.from_dense(weight, bias, found), found.blocks


def shared(weight, bias):
    """Blocks that share an input."""
    weight[:, 5] = torch.where(weight.any(1), torch.randn(10), 0.0)
    parts = [
        (rows, np.unique(np.append(columns, 5)))
        for rows, columns in cx.decompose(weight * (torch.arange(8) != 5)).blocks
    ]
    return cx.BlockLinear.from_blocks(weight, bias, parts), parts


@pytest.fixture(params=[plain, shared])
def blocks(request):
    """Two blocks of different sizes, scrambled, with a dormant output and an input that nobody reads.

    The layer, where it has weights that adapters may change, and the parts of that, each of which gets its own rank.
    """
    torch.manual_seed(0)
    rows, columns = torch.tensor([0, 1, 0, 0, 1, 2, 1, 0, 0, 1]), torch.tensor([1, 0, 0, 1, 3, 0, 1, 0])
    weight = torch.randn(10, 8) * (rows[:, None] == columns)
    layer, parts = request.param(weight, torch.randn(10))
    return layer, weight != 0, parts


def adapted(layer):
    torch.manual_seed(1)
    return peft.get_peft_model(Net(layer), lora_for_blocks(peft.LoraConfig(r=2, target_modules=["layer"])))


def trained(model, x, y):
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
    losses = []
    for _ in range(60):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_an_adapter_trains_and_merges_inside_the_blocks(blocks):
    layer, mask, parts = blocks
    before = layer.weight.detach().clone()
    model, x, y = adapted(layer), torch.randn(5, 20, 8), torch.randn(5, 20, 3)
    assert {n.split(".")[-3] for n, p in model.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}
    losses = trained(model, x, y)
    assert losses[-1] < 0.9 * losses[0]
    assert torch.equal(layer.weight, before)  # blocks are frozen
    expected = model(x)
    merged = model.merge_and_unload()
    assert merged.layer is layer
    assert_close(merged(x), expected)
    change = (merged.layer.weight - before).detach()
    assert not change[~mask].any()
    assert change[mask].all()
    for rows, columns in parts:
        assert torch.linalg.matrix_rank(change[rows][:, columns], rtol=1e-4) <= 2


def test_adapters_can_be_taken_out_and_switched_off(blocks):
    layer, *_ = blocks
    model, x, y = adapted(layer), torch.randn(20, 8), torch.randn(20, 3)
    plain = model(x)  # an adapter starts as nothing
    trained(model, x, y)
    with_adapter = model(x)
    with model.disable_adapter():
        assert_close(model(x), plain)
    model.merge_adapter(safe_merge=True)
    assert_close(model(x), with_adapter)
    model.unmerge_adapter()
    assert_close(model(x), with_adapter)
    with model.disable_adapter():
        assert_close(model(x), plain)


def test_adapters_are_saved_and_loaded(blocks, tmp_path):
    layer, *_ = blocks
    model, x = adapted(layer), torch.randn(20, 8)
    trained(model, x, torch.randn(20, 3))
    expected = model(x)
    model.save_pretrained(tmp_path)
    config = lora_for_blocks(peft.LoraConfig.from_pretrained(tmp_path))
    again = peft.PeftModel.from_pretrained(model.unload(), tmp_path, config=config)
    assert_close(again(x), expected)


def test_variants_are_refused(blocks):
    with pytest.raises(cx.InvalidOption, match="plain LoRA"):
        peft.get_peft_model(
            Net(blocks[0]), lora_for_blocks(peft.LoraConfig(r=2, target_modules=["layer"], lora_bias=True))
        )
