"""Planted tasks are found, single tasks are not split."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from crystallite.core.errors import InvalidMatrix, InvalidOption
from crystallite.discovery import discover
from crystallite.partitioning.coclustering import agreement
from tests.helpers.tasks import block_network, draw, mlp, steps, trained


@pytest.fixture(scope="module")
def two_tasks():
    return trained(2, seed=0)


@pytest.mark.parametrize("k", [2, 3, 4])
def test_planted_tasks_are_found(k):
    model, x, task = trained(k, seed=k)
    found = discover(model, x)
    assert found.k == k
    live = found.inputs >= 0
    assert agreement(found.inputs[live], task[live]) >= 0.99
    assert found.outputs.tolist() == np.repeat(np.arange(k), 10).tolist()
    assert found.stability > 0.95
    assert found.inside_share > 1.5 / k


@pytest.mark.parametrize("seed", range(6))
def test_a_single_task_is_not_split(seed):
    model, x, _ = trained(1, seed, count=150)
    found = discover(model, x, samples=500)
    assert found.k == 1
    assert found.stability > 0.9
    assert set(found.inputs) <= {0, -1}


@pytest.mark.parametrize("seed", range(6))
def test_untrained_networks_are_not_split(seed):
    torch.manual_seed(seed)
    for inputs, outputs in ((8, 3), (64, 10), (5, 40)):
        assert discover(mlp(inputs, outputs), torch.randn(300, inputs)).k == 1


def test_several_questions_about_one_input_are_not_split():
    torch.manual_seed(0)
    model, order = mlp(64, 3), torch.randperm(64)
    for _ in steps(model, 1, order, 200, target=lambda y: torch.cat([y % 2, y % 3, y // 5], 1)):
        pass
    assert discover(model, draw(1, order, 500)[0]).k == 1


def test_tasks_that_share_some_inputs_are_found():
    torch.manual_seed(0)
    model, images = mlp(96, 20), draw(2, torch.arange(128), 40_000)
    x = images[0][:, :96].clone()
    x[:, 32:64] += images[0][:, 64:96]
    x[:, 64:] = images[0][:, 96:]
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for batch in torch.arange(40_000).split(128):
        loss = nn.functional.cross_entropy(
            model(x[batch]).unflatten(1, (2, 10)).flatten(0, 1), images[1][batch].ravel()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = discover(model, x)
    own = np.r_[0:32, 64:96]  # pixels of one task only
    own = own[found.inputs[own] >= 0]
    assert found.k == 2
    assert agreement(found.inputs[own], (own >= 64).astype(int)) >= 0.95


@given(st.lists(st.tuples(*[st.integers(2, 6)] * 3), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_separate_networks_are_told_apart_whatever_their_sizes(sizes, seed):
    rng = np.random.default_rng(seed)
    model, parts = block_network(sizes, rng)
    found = discover(model, torch.tensor(rng.normal(size=(200, len(parts[0]))), dtype=torch.float32))
    assert found.k >= len(sizes)
    if found.k == len(sizes):  # a part may fall apart further
        assert agreement(found.inputs, parts[0]) == agreement(found.outputs, parts[2]) == 1
        assert agreement(found.hidden["0"], parts[1]) == 1
    assert found.inside_share > 0.8


def test_relabelling_neurons_relabels_modules(two_tasks):
    model, x, _ = two_tasks
    found = discover(model, x[:300])
    order = torch.randperm(x.shape[1])
    moved = nn.Sequential(*model)
    moved[0] = nn.Linear(x.shape[1], 64)
    moved[0].weight.data, moved[0].bias.data = model[0].weight.data[:, order], model[0].bias.data
    again = discover(moved, x[:300, order])
    assert again.k == found.k
    np.testing.assert_array_equal(again.inputs, found.inputs[order.numpy()])


def test_constant_and_unused_inputs_are_dormant():
    rng = np.random.default_rng(0)
    model, parts = block_network([(4, 4, 4), (4, 4, 4)], rng)
    model[0].weight.data[:, 0] = 0
    x = torch.randn(200, 8)
    x[:, 5] = 3.0
    model[2].weight.data[2] = 0
    found = discover(model, x)
    assert found.inputs[[0, 5]].tolist() == [-1, -1]
    assert found.outputs[2] == -1
    live = found.inputs >= 0
    assert found.k == 2
    assert agreement(found.inputs[live], parts[0][live]) == 1


def test_a_constant_model_has_no_module():
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.weight)
    found = discover(model, torch.randn(20, 3))
    assert found.k == 0
    assert found.inputs.tolist() == [-1, -1, -1]
    assert "no output depends" in repr(found)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: x,
        lambda x: x.numpy(),
        lambda x: [(x[:150], torch.zeros(150)), (x[150:], torch.zeros(150))],
        lambda x: (x, torch.zeros(300, dtype=torch.long)),
        lambda x: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, torch.zeros(300)), batch_size=64),
        lambda x: iter([{"input": x, "labels": torch.zeros(300)}]),
        lambda x: [({"input": x}, torch.zeros(300))],
    ],
)
def test_data_comes_in_many_forms(two_tasks, wrap):
    model, x, _ = two_tasks
    expected = discover(model, x[:300])
    found = discover(model, wrap(x[:300]), samples=300)
    assert found.samples == 300
    np.testing.assert_allclose(found.energy, expected.energy, rtol=1e-5, atol=1e-12)
    np.testing.assert_array_equal(found.inputs, expected.inputs)


def test_images_are_flattened_and_the_model_stays_as_it_was():
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(4 * 36, 5)
    )
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x, state = torch.randn(40, 1, 8, 8), torch.get_rng_state()
    found = discover(model, x)
    assert found.energy.shape == (5, 64)
    assert [module.training for module in model] == [True, False, True, True, True, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_positions_of_a_sequence_add_up():
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    found = discover(model, torch.randn(4000, 3, 6))
    squares = model.weight.detach().numpy() ** 2
    np.testing.assert_allclose(found.energy, np.tile(squares, 3), rtol=0.15)  # each position has the same effect


def test_results_print_and_serialise(two_tasks):
    model, x, _ = two_tasks
    found = discover(model, x[:300])
    assert "2 functional modules" in repr(found)
    assert "<table>" in found._repr_html_()
    plain = json.loads(json.dumps(found.to_json()))
    assert plain["k"] == 2
    assert plain["inputs"] == found.inputs.tolist()
    assert set(plain["hidden"]) == {"0", "2"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.zeros(5, 64, dtype=torch.long), "floating-point tensor"),
        ({"input_ids": torch.zeros(5, 8, dtype=torch.long)}, "inputs_embeds"),
        ([], "at least one sample"),
        (torch.zeros(0, 64), "at least one sample"),
        ("digits", "got str"),
        ([torch.zeros(5, 64), torch.zeros(5, 1, 2, 64)], "the same 64 inputs"),
    ],
)
def test_unusable_data_is_refused(data, message):
    with pytest.raises(InvalidOption, match=message):
        discover(mlp(64, 10), data)


def test_what_is_not_finite_is_refused():
    model = nn.Linear(3, 2)
    model.weight.data[1, 2] = np.nan
    with pytest.raises(InvalidMatrix, match="by input 2 are not finite"):
        discover(model, torch.randn(20, 3))


def test_too_many_sums_are_refused_before_they_are_allocated():
    class Wide(nn.Module):
        def forward(self, x):
            return x.mean(1, keepdim=True).expand(-1, 1 << 17)

    with pytest.raises(InvalidOption, match="do not fit into 1024 MiB"):
        discover(Wide(), torch.randn(2, 1 << 14))
