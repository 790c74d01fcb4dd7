"""A model that separates end to end, as networks that run apart."""

import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.reorganization.subnetworks import subnetworks
from tests.helpers.block_models import Gated, block_linear
from tests.helpers.planted.chain import planted
from tests.helpers.tolerance import assert_close


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dead", [0.0, 0.3])
@pytest.mark.parametrize("bias", [True, False])
def test_parts_and_the_joining_step_are_the_model(dead, bias):
    first, second, third = planted((12, 24, 24, 16), 3, dead=dead, bias=bias)
    model = nn.Sequential(nn.Flatten(), first, nn.Tanh(), second, nn.ReLU(), third, nn.Softmax(-1)).eval()
    small = cx.reorganize(model, level=None, only_if_faster=False)
    networks, x = subnetworks(small), torch.randn(5, 3, 4, dtype=torch.float64)
    assert len(networks.parts) == 3
    assert_close(networks(x), model(x))
    flat = x.flatten(1)
    alone = [part(flat[:, reads]) for part, reads in zip(networks.parts, networks.inputs, strict=True)]
    assert_close(networks.join(alone), model(x))
    written = torch.cat(networks.outputs)
    assert len(written.unique()) == len(written) <= 16
    for i, reads in enumerate(networks.inputs):  # what a part does not read does not reach its outputs
        other = flat.clone()
        other[:, torch.isin(torch.arange(12), reads, invert=True)] += 1
        logits = small[:-1]
        for y in (logits(flat.view(5, 3, 4)), logits(other.view(5, 3, 4))):
            assert_close(alone[i], y[:, networks.outputs[i]])


@pytest.mark.parametrize("model", [block_linear(12, 8, 4, 1), nn.Sequential(block_linear(12, 8, 4, 1), nn.Softmax(-1))])
def test_one_layer(model):
    networks, x = subnetworks(cx.reorganize(model, level=None, only_if_faster=False)), torch.randn(2, 3, 12)
    assert len(networks.parts) == 4
    assert_close(networks(x), model(x))


def test_copies_stand_alone():
    model = nn.Sequential(*planted((8, 8, 8), 2, dtype=torch.float32))
    small = cx.reorganize(model, level=None, only_if_faster=False)
    networks, x = subnetworks(small), torch.randn(2, 8)
    expected = small(x)
    with torch.no_grad():
        for parameter in networks.parameters():
            parameter.zero_()
    assert torch.equal(small(x), expected)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(4, 4)), "one block operator"),
        (nn.Sequential(block_linear(8, 8, 2, 1), nn.LayerNorm(8)), "2 modules of Sequential hold weights"),
        (nn.Sequential(block_linear(16, 16, 4, 1), nn.ReLU(), block_linear(16, 16, 4, 2)), "does not separate"),
        (Gated(), "modules of Gated hold weights"),
    ],
)
def test_models_that_do_not_separate(model, message):
    with pytest.raises(cx.InvalidOption, match=message):
        subnetworks(cx.reorganize(model, level=None, only_if_faster=False))
