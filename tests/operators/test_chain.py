"""BlockChain against the chain of dense layers it was cut from."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.operators.runtime import engine
from tests.helpers.planted.chain import dense, planted
from tests.helpers.tolerance import assert_close


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("sizes", "groups", "dead"),
    [
        ((12, 24, 24, 8), 4, 0.0),
        ((13, 25, 22, 9), 4, 0.0),
        ((12, 30, 20), 3, 0.3),
        ((10, 10), 2, 0.0),
        ((6, 8, 4), 1, 0.0),
    ],
)
def test_same_outputs(sizes, groups, dead, bias, dtype):
    torch.manual_seed(0)
    layers = planted(sizes, groups, dead=dead, bias=bias, dtype=dtype)
    activations = [nn.GELU() for _ in layers[1:]]
    whole = dense(layers, activations)
    chain = cx.BlockChain.from_dense(layers, activations)
    assert dead or (chain.n_subnetworks == groups and chain.n_shuffles == 0)
    for shape in [(sizes[0],), (1, sizes[0]), (7, sizes[0]), (2, 3, sizes[0]), (0, sizes[0]), (50, sizes[0])]:
        x = torch.randn(shape).to(dtype)
        assert_close(chain(x), whole(x))
        with torch.no_grad():  # by the compiled kernels
            assert_close(chain(x), whole(x))


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Sequential(nn.ReLU(), nn.Dropout(0.5)), nn.Identity(), nn.Tanh()])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("batch", [1, 2, 5, 40, 200])
def test_hidden_partitions_that_differ_leave_one_shuffle(activation, threads, batch, monkeypatch):
    monkeypatch.setattr(engine, "_WORTH_A_TEAM", 0.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    layers = planted((24, 36, 30, 20), 4, dead=0.1, shared=False, dtype=torch.float32)
    whole = dense(layers, [activation] * 2).eval()
    chain = cx.BlockChain.from_dense(layers, [activation] * 2).eval()
    assert chain.n_shuffles == 2
    x = torch.randn(batch, 24)
    with torch.inference_mode():
        assert_close(chain(x), whole(x))
    assert_close(chain(x), whole(x))


KNOWN = [nn.ReLU(), nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Tanh(), nn.Sigmoid(), nn.Identity()]


@pytest.mark.parametrize("activation", [*KNOWN, nn.ELU(), nn.LeakyReLU(), nn.Sequential(nn.Tanh(), nn.ReLU())], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_activations_on_the_whole_line(activation, dtype):
    """Numbers of all sizes, signs and both infinities, with one block that hands them on as they are."""
    layers = [nn.Linear(2, 2, bias=False, dtype=dtype) for _ in range(2)]
    for layer in layers:
        layer.weight.data = torch.eye(2, dtype=dtype)
    chain = cx.BlockChain.from_dense(layers, [activation])
    sizes = torch.cat([torch.zeros(1), torch.logspace(-30, 30, 400, dtype=torch.float64), torch.linspace(0, 12, 4001)])
    values = torch.cat([sizes, -sizes, torch.tensor([torch.inf, -torch.inf, torch.nan])]).to(dtype)
    x = values[:, None].repeat(1, 2)
    exact = activation(x.double())
    nan = exact.isnan()  # of PyTorch itself, for some infinities

    def error(y):
        scale = 1e-30 + torch.maximum(exact.abs(), x.double().abs().clamp(max=1))
        return ((y - exact).abs() / scale)[~nan].nan_to_num(0).max()

    with torch.no_grad():
        by_rows = torch.cat([chain(some) for some in x.split(3)])
        for y in (chain(x), by_rows):
            torch.testing.assert_close((y.isnan() & ~x.isinf()), nan & ~x.isinf())
            assert error(y) <= max(10 * torch.finfo(dtype).eps, 2 * error(activation(x)))


def test_finer_blocks_before_coarser_ones_need_no_shuffle():
    first, second = planted((24, 24), 4)[0], nn.Linear(24, 10, dtype=torch.float64)
    label = np.empty(24, int)
    for i, (rows, _) in enumerate(cx.decompose(first.weight).blocks):
        label[rows] = i // 2
    with torch.no_grad():
        second.weight *= torch.from_numpy(np.arange(10)[:, None] % 2 == label)
    chain = cx.BlockChain.from_dense([first, second], [nn.ReLU()])
    assert chain.n_shuffles == 0
    assert [layer.n_blocks for layer in chain.layers] == [4, 2]
    x = torch.randn(3, 24, dtype=torch.float64)
    assert_close(chain(x), second(torch.relu(first(x))))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("dead", [0.0, 0.3])
@pytest.mark.parametrize("bias", [True, False])
def test_undone_bit_for_bit(shared, dead, bias):
    layers = planted((13, 25, 22, 9), 3, dead=dead, shared=shared, bias=bias)
    chain = cx.BlockChain.from_dense(layers, [nn.ReLU()] * 2)
    for undone, layer in zip(chain.to_dense(), layers, strict=True):
        assert torch.equal(undone.weight, layer.weight)
        assert undone.bias is layer.bias is None or torch.equal(undone.bias, layer.bias)


def test_new_weights_are_seen():
    """What the compiled kernels hold of a chain follows its parameters."""
    layers = planted((12, 24, 8), 4, dtype=torch.float32)
    chain = cx.BlockChain.from_dense(layers, [nn.Dropout(0.5)]).eval()
    x = torch.randn(20, 12)
    with torch.inference_mode():
        before = chain(x)
    with torch.no_grad():
        chain.layers[0].weights[0].mul_(2)  # in place
        chain.layers[0].bias.zero_()
        changed = chain(x)
        assert not torch.equal(before, changed)
        chain.layers[1].weights[0] = nn.Parameter(chain.layers[1].weights[0] * 3)  # replaced
        chain.layers[1].bias.data = torch.zeros(8)
        assert_close(chain(x), dense(chain.to_dense(), [nn.Identity()])(x))
        chain.train()
        assert not torch.equal(chain(x), chain(x))  # dropout
        doubled = chain.eval().double()
        assert_close(doubled(x.double()), dense(doubled.to_dense(), [nn.Identity()])(x.double()))


def test_same_gradients():
    layers = planted((12, 24, 8), 4)
    activations = [nn.Tanh()]
    whole, chain = dense(layers, activations), cx.BlockChain.from_dense(layers, activations)
    inputs = [torch.randn(5, 12, dtype=torch.float64).requires_grad_() for _ in range(2)]
    inputs[1].data = inputs[0].data.clone()
    for network, x in zip((whole, chain), inputs, strict=True):
        network(x).square().sum().backward()
    assert_close(inputs[1].grad, inputs[0].grad)
    total = sum(p.grad.square().sum() for p in chain.parameters() if p.grad is not None)
    expected = sum((p.grad * (p != 0)).square().sum() for p in whole.parameters())
    assert torch.allclose(total, expected, rtol=1e-10)


def test_subnetworks_run_alone_and_join():
    layers = planted((15, 30, 12), 3, dead=0.2)
    activations = [nn.ReLU()]
    whole, chain = dense(layers, activations), cx.BlockChain.from_dense(layers, activations)
    x = torch.randn(6, 15, dtype=torch.float64)
    y = torch.full((6, 12), float("nan"), dtype=torch.float64)
    for network, reads, writes in chain.subnetworks():
        y[:, writes] = network(x[:, reads])
    idle, values = chain.idle_outputs()
    assert torch.equal(torch.isnan(y[0]).nonzero()[:, 0], idle.sort().values)
    y[:, idle] = values
    assert_close(y, whole(x))


def test_constant_neurons_are_kept():
    """A hidden neuron without inputs still emits σ(b), which the next layer may read."""
    first, second = nn.Linear(2, 3), nn.Linear(3, 2)
    with torch.no_grad():
        first.weight.zero_()
        first.weight[0, 0] = 1.0
        second.weight.copy_(torch.tensor([[1.0, 0, 0], [0, 1.0, 1.0]]))
        first.bias.copy_(torch.tensor([0.0, 2.0, 3.0]))
    chain = cx.BlockChain.from_dense([first, second], [nn.ReLU()])
    x = torch.randn(4, 2)
    assert_close(chain(x), second(torch.relu(first(x))))


def test_reload_and_copy():
    layers = planted((12, 24, 8), 4, dtype=torch.float32)
    chain = cx.BlockChain.from_dense(layers, [nn.ReLU()])
    other = cx.BlockChain.from_dense(planted((12, 24, 8), 4, dtype=torch.float32), [nn.ReLU()])
    other.load_state_dict(chain.state_dict())
    x = torch.randn(3, 12)
    assert torch.equal(other(x), chain(x))
    assert torch.equal(copy.deepcopy(chain)(x), chain(x))
    assert_close(torch.export.export(chain, (x,)).module()(x), chain(x))
    assert_close(torch.func.vmap(chain)(x), chain(x))


def test_bad_input():
    with pytest.raises(cx.InvalidMatrix, match="expected 3 inputs, got 4"):
        cx.BlockChain.from_dense([nn.Linear(2, 3), nn.Linear(4, 2)], [nn.ReLU()])
    with pytest.raises(cx.InvalidMatrix, match="1 activations"):
        cx.BlockChain.from_dense([nn.Linear(2, 3), nn.Linear(3, 2)], [])
    with pytest.raises(cx.InvalidMatrix, match="2 input features"):
        cx.BlockChain.from_dense([nn.Linear(2, 3)], [])(torch.ones(1, 3))
