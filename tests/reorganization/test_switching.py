"""Every block of every operator can be switched off, changes only what is its own, and comes back bit for bit."""

import copy

import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.reorganization.switching import block_switches
from tests.helpers.block_models import Gated, block_convolution, block_linear, block_recurrent, keep_, labels, mask
from tests.helpers.experts import mixture


def chain():
    torch.manual_seed(0)
    sizes = (12, 16, 8)
    net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))
    for layer, inputs, outputs in zip(net[::2], sizes[:-1], sizes[1:], strict=True):
        keep_(layer.weight, mask(labels(outputs, 2, outputs), labels(inputs, 2, inputs)))
    return net


def exact(model):
    return cx.reorganize(model.eval(), level=None, only_if_faster=False)


def gated_pair():
    dense = Gated()
    return cx.BlockFeedForward.from_dense(dense.one, nn.SiLU(), dense.two, gate=dense.three, form="pair")


MODELS = {
    "linear": (lambda: exact(nn.Sequential(block_linear(12, 9, 3, 0))), (5, 12), 3),
    "chain": (lambda: exact(chain()), (5, 12), 2),
    "subnetworks": (lambda: cx.subnetworks(exact(chain())), (5, 12), 2),
    "conv": (lambda: exact(nn.Sequential(block_convolution(nn.Conv2d, 6, 9, 3, 0))), (2, 6, 5, 5), 3),
    "gated pair": (gated_pair, (5, 16), 4),
    "recurrent": (lambda: cx.BlockRecurrent.from_dense(block_recurrent(nn.GRU, 6, 8, 2), smallest=1), (7, 2, 6), 2),
}


def output(model, x):
    with torch.no_grad():
        found = model(x)
    return found[0] if isinstance(found, tuple) else found


@pytest.mark.parametrize("name", MODELS)
def test_a_block_that_is_off_changes_its_own_outputs_only_and_comes_back(name):
    torch.manual_seed(0)
    make, shape, blocks = MODELS[name]
    model = make().eval()
    x = torch.randn(shape)
    before, whole = copy.deepcopy(model.state_dict()), output(model, x)
    switches = block_switches(model)
    assert [switch.block for switch in switches] == list(range(blocks))
    axis = 1 if name == "conv" else -1
    changed = []
    for switch in switches:
        assert switch.size > 0
        with switch.off():
            difference = (output(model, x) - whole).abs().movedim(axis, 0).flatten(1).amax(1)
        changed.append(difference > 1e-6)
    together = torch.stack(changed).sum(0)
    assert (together == 1).all()  # every output belongs to one block
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(output(model, x), whole)


def test_an_error_while_a_block_is_off_leaves_the_weights_as_they_were():
    model = exact(nn.Sequential(block_linear(12, 9, 3, 0)))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="inside"), block_switches(model)[0].off():
        raise RuntimeError("inside")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_layers_whose_partitions_cross_have_switches_of_their_own():
    torch.manual_seed(0)
    first, second = block_linear(16, 16, 2, 0), block_linear(16, 16, 2, 7)
    model = exact(nn.Sequential(first, nn.ReLU(), second))
    found = block_switches(model)
    assert len({switch.layer for switch in found}) == 2
    assert len(found) == 4


def test_experts_of_a_mixture():
    model = mixture("Mixtral").eval()
    found = block_switches(model)
    per_layer = {switch.layer for switch in found}
    assert len(found) == len(per_layer) * model.config.num_local_experts
    tokens = torch.randint(0, model.config.vocab_size, (2, 6))
    with torch.no_grad():
        whole = model(tokens).logits
        with found[0].off():
            without = model(tokens).logits
    assert not torch.equal(whole, without)


def test_a_dense_model_has_none():
    assert block_switches(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) == []
