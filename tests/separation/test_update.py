"""Slicing a global update is training the sub-operators."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import crystallite as cx
from crystallite.separation import mask_gradients, redistribute, to_blocks, to_dense, transfer_optimizer, updated
from tests.helpers.block_models import block_linear, labels, mask

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01),
}


def network(dtype=torch.float32):
    """Two layers of four shuffled blocks that share their hidden neurons, and their reorganized form."""
    torch.manual_seed(0)
    first, second = block_linear(20, 24, 4, 1, dtype=dtype), block_linear(24, 12, 4, 2, dtype=dtype)
    with torch.no_grad():
        second.weight.copy_(torch.randn(12, 24) * mask(labels(12, 4, 2), labels(24, 4, 1)))
    dense = nn.Sequential(first, nn.Tanh(), second)
    return dense, cx.reorganize(dense, level=None, only_if_faster=False)


def named(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name in found:
        assert torch.equal(found[name], expected[name]), name


@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 9))
@settings(max_examples=40)
def test_redistribute_is_the_papers_formula(seed, rows, cols):
    rng = np.random.default_rng(seed)
    structure = cx.decompose(rng.random((rows, cols)) < 0.25)
    update = rng.normal(size=(rows, cols))
    permuted = structure.P @ update @ structure.Q.T
    row = col = 0
    for (own_rows, own_cols), part in zip(structure.blocks, redistribute(update, structure), strict=True):
        gamma = cx.Embedding(np.arange(row, row + len(own_rows)), rows)
        pi = cx.Projection(np.arange(col, col + len(own_cols)), cols)
        np.testing.assert_array_equal(part, gamma.inverse() @ permuted @ pi.T)
        row, col = row + len(own_rows), col + len(own_cols)


def test_redistribute_for_feedback_networks():
    w = torch.zeros(5, 5)
    w[0, 3] = w[3, 0] = w[1, 4] = 1.0  # two components, 4 → 1; node 2 is isolated
    update = torch.arange(25.0).view(5, 5)
    parts = redistribute(update, cx.decompose(w, kind="directed"))
    assert [p.tolist() for p in parts] == [[[0, 3], [15, 18]], [[24, 21], [9, 6]]]


def test_redistribute_follows_p_where_it_differs_from_the_order_of_nodes():
    w = np.zeros((3, 3))
    w[0, 2] = w[2, 2] = 1.0
    structure = cx.decompose(w, kind="directed")
    assert structure.P.source.tolist() == [2, 0, 1]
    parts = redistribute(np.arange(1, 10).reshape(3, 3), structure)
    assert [p.tolist() for p in parts] == [[[9, 7], [3, 1]]]


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.sampled_from([np.asarray, torch.from_numpy]))
@settings(max_examples=80, deadline=None)
def test_sliced_feedback_updates_are_the_trained_sub_operators(seed, nodes, kind):
    """γ_i⁻¹(P ΔW Pᵀ)π_iᵀ with permutation matrices; and gradient steps on the parts of PWPᵀ itself."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=(nodes, nodes)) * (rng.random((nodes, nodes)) < 1.2 / nodes)
    structure = cx.decompose(w, kind="directed")
    p = np.eye(nodes)[structure.P.source]  # as a matrix
    inputs, target = rng.normal(size=(2, nodes, 7))
    operators, start = [], 0
    for _ in structure.components:
        size = int((structure.component == structure.component[structure.P.source[start]]).sum())
        operators.append((p @ w @ p.T)[start : start + size, start : start + size])
        start += size
    trained, whole = [kind(o.copy()) for o in operators], w.copy()
    for _ in range(3):
        delta = 0.1 * (whole @ inputs - target) @ inputs.T
        delta[w == 0] = 0  # only what the structure holds is trained
        whole = whole - delta
        trained = updated(trained, kind(delta), structure)
    for part, own, r in zip(trained, operators, range(len(operators)), strict=True):
        first = sum(len(o) for o in operators[:r])
        x, y = ((p @ side)[first : first + len(own)] for side in (inputs, target))
        local = own.copy()
        for _ in range(3):
            local = local - 0.1 * ((local @ x - y) @ x.T) * (own != 0)
        np.testing.assert_allclose(np.asarray(part), local, rtol=1e-9, atol=1e-12)
        np.testing.assert_array_equal(part, (p @ whole @ p.T)[first : first + len(own), first : first + len(own)])


def test_updated_equals_the_global_step_bit_for_bit():
    dense, _ = network()
    w = dense[0].weight.detach()
    structure = cx.decompose(w)
    blocks = redistribute(w, structure)
    for step in range(20):
        delta = 0.1 * torch.randn(w.shape, generator=torch.Generator().manual_seed(step))
        blocks, w = updated(blocks, delta, structure), w - delta
    for part, expected in zip(blocks, redistribute(w, structure), strict=True):
        assert torch.equal(part, expected)


def test_wrong_shapes_are_refused():
    structure = cx.decompose(np.eye(3))
    with pytest.raises(cx.InvalidMatrix, match=r"update: expected shape \(3, 3\)"):
        redistribute(np.zeros((3, 4)), structure)
    with pytest.raises(cx.InvalidMatrix, match="operators"):
        updated([np.zeros((1, 1))], np.zeros((3, 3)), structure)
    with pytest.raises(cx.InvalidOption, match="no such parameter"):
        mask_gradients(nn.Linear(2, 2), {"wait": torch.ones(2, 2, dtype=torch.bool)})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sliced_gradients_train_blocks_bit_for_bit(name):
    dense, small = network()
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in (dense, small)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        gradients = {n: torch.randn(p.shape, generator=generator) for n, p in dense.named_parameters()}
        for n, p in dense.named_parameters():
            p.grad = gradients[n] * (p.detach() != 0) if p.ndim > 1 else gradients[n]
        cut = to_blocks(gradients, small)
        for n, p in small.named_parameters():
            p.grad = cut[n]
        for optimizer in optimizers:
            optimizer.step()
    assert_same(named(small), to_blocks(named(dense), small))
    assert_same(to_dense(named(small), small), named(dense))


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw"])
def test_own_backward_trains_blocks_like_the_masked_model(name):
    dense, small = network(torch.float64)
    zeros = {n: p == 0 for n, p in dense.named_parameters() if p.ndim > 1}
    mask_gradients(dense)
    models = (dense, small)
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in models]
    generator = torch.Generator().manual_seed(1)
    for _ in range(100):
        x = torch.randn(16, 20, generator=generator, dtype=torch.float64)
        y = torch.randn(16, 12, generator=generator, dtype=torch.float64)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
    trained = to_dense(named(small), small)
    for n, p in dense.named_parameters():
        assert (trained[n] - p).abs().max() <= 1e-12 * p.abs().max()
        if n in zeros:
            assert not p[zeros[n]].any()
    if name.startswith("adam"):
        assert not optimizers[0].state[dense[0].weight]["exp_avg"][zeros["0.weight"]].any()  # moments stay clean


def run(model, optimizer, seed, steps=7):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(16, 20, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_moves_into_blocks_and_back(name):
    dense, _ = network(torch.float64)
    mask_gradients(dense)
    optimizer = OPTIMIZERS[name](dense.parameters())
    run(dense, optimizer, 0)
    small = cx.reorganize(dense, level=None, only_if_faster=False)
    inside = transfer_optimizer(optimizer, dense, small)
    assert type(inside) is type(optimizer)
    run(small, inside, 1)
    again = cx.restore(small)
    outside = transfer_optimizer(inside, small, again)
    mask_gradients(again)
    run(again, outside, 2)
    run(dense, optimizer, 1)
    run(dense, optimizer, 2)  # never left the dense model
    for n, p in dense.named_parameters():
        assert (again.get_parameter(n) - p).abs().max() <= 1e-12 * p.abs().max()


def test_transfer_keeps_groups_and_their_options():
    dense, small = network()
    groups = [{"params": [dense[0].weight], "lr": 0.5}, {"params": [dense[0].bias, *dense[2].parameters()]}]
    moved = transfer_optimizer(torch.optim.SGD(groups, lr=0.1), dense, small)
    rates = {id(p): group["lr"] for group in moved.param_groups for p in group["params"]}
    assert sorted(rates[id(p)] for p in small.parameters()) == [0.1, 0.1, 0.1, 0.5]
    with pytest.raises(cx.InvalidOption, match="reorganized form"):
        transfer_optimizer(torch.optim.SGD(dense.parameters(), lr=0.1), dense, copy.deepcopy(dense))
    with pytest.raises(cx.InvalidOption, match="not the source model's"):
        transfer_optimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), dense, small)


def test_accumulated_gradients_are_those_of_the_whole_batch():
    _, small = network(torch.float64)
    x = torch.randn(32, 20, dtype=torch.float64)
    small(x).square().sum().backward()
    whole = {n: p.grad.clone() for n, p in small.named_parameters()}
    small.zero_grad()
    for part in x.split(8):
        small(part).square().sum().backward()
    for n, p in small.named_parameters():
        assert (p.grad - whole[n]).abs().max() <= 1e-12 * whole[n].abs().max()


def test_blocks_train_under_autocast():
    dense, small = network()
    x = torch.randn(64, 20)
    losses = {}
    for kind, model in (("dense", dense), ("blocks", small)):
        mask_gradients(model)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for _ in range(30):
            with torch.autocast("cpu", torch.bfloat16):
                y = model(x)
                loss = (y.float() - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[kind] = float(loss.detach())
        assert y.dtype == torch.bfloat16
        assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in model.parameters())
    assert losses["blocks"] == pytest.approx(losses["dense"], rel=0.1)
