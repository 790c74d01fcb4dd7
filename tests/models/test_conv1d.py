"""Layers of GPT-2 as linear layers, and turned back."""

import copy

import pytest
import torch

from crystallite.models.conv1d import turn_back_, turn_conv1d_
from tests.helpers.block_models import assert_same_state
from tests.helpers.networks import build

pytest.importorskip("transformers")
LAYERS = tuple(f"transformer.h.0.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"))


def test_before_after_and_turned_back():
    model, example = build("gpt2")
    model.transformer.h[0].mlp.c_fc.weight.requires_grad_(False)
    turned, names = turn_conv1d_(copy.deepcopy(model))
    assert names == LAYERS
    assert all(type(turned.get_submodule(name)) is torch.nn.Linear for name in names)
    assert not turned.transformer.h[0].mlp.c_fc.weight.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(turned(**example).logits, model(**example).logits)
    again = turn_back_(turned, names)
    assert_same_state(again, model)
    assert [type(m) for m in again.modules()] == [type(m) for m in model.modules()]
    assert not again.transformer.h[0].mlp.c_fc.weight.requires_grad


def test_tied_layers_stay_as_they_are():
    model, _ = build("gpt2")
    twin = copy.deepcopy(model.transformer.h[0].attn.c_proj)
    twin.weight = model.transformer.h[0].attn.c_proj.weight
    model.twin = twin
    assert turn_conv1d_(model)[1] == tuple(name for name in LAYERS if not name.endswith("attn.c_proj"))
