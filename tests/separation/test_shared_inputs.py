"""Inputs that several modules read: found, copied to every block that reads them, and carried through every verb."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.models.manifest import source_sha256
from crystallite.partitioning.partition import Partition, joint_components
from crystallite.separation import find_chains, redistribute, updated, upgrade
from crystallite.serving.piece import open_piece
from crystallite.serving.plan import arrange
from crystallite.structure.decompose import expand_columns
from tests.helpers.artifacts import APART
from tests.helpers.tolerance import assert_close

OWN, BOTH, HIDDEN, OUTPUTS = 12, 8, 32, 10  # of each of two modules, inputs of both; hidden neurons and outputs of each
INPUTS = 2 * OWN + BOTH


class Own(nn.Module):
    """The same layers behind code of the model's own: they are replaced one by one."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def planted(scramble=True, seed=0):
    """Two networks that share inputs, as one; the module of each input, −1 for those of both."""
    torch.manual_seed(seed)
    hidden, outputs = torch.arange(2 * HIDDEN) // HIDDEN, torch.arange(2 * OUTPUTS) // OUTPUTS
    model = nn.Sequential(nn.Linear(INPUTS, 2 * HIDDEN), nn.Tanh(), nn.Linear(2 * HIDDEN, 2 * OUTPUTS))
    order = torch.randperm(INPUTS) if scramble else torch.arange(INPUTS)
    truth = torch.tensor([0] * OWN + [-1] * BOTH + [1] * OWN)[order]
    with torch.no_grad():
        inside = (hidden[:, None] == truth) | (truth < 0), outputs[:, None] == hidden
        for layer, mask in zip((model[0], model[2]), inside, strict=True):  # beyond what initialisation draws
            layer.weight.copy_(torch.randn(mask.shape).sign() * (0.3 + 0.3 * torch.rand(mask.shape)) * mask)
    return model.eval(), truth.numpy()


def samples(count=600, seed=7):
    return torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def split():
    """The planted network, what was found in it, and the network split along that."""
    model, _ = planted()
    found = cx.discover(model, samples())
    return model, found, upgrade(model, modules=found, data=[samples()], epochs=20, learning_rate=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_planted_shared_inputs_are_found(seed):
    model, truth = planted(seed=seed)
    found = cx.discover(model, samples())
    assert found.k == 2
    assert np.array_equal(found.shared.any(0), truth < 0)
    assert not (found.shared & (found.inputs == np.arange(2)[:, None])).any()  # of another module, not of its own
    assert " shared" in repr(found)
    assert sorted(i for own in found.to_json()["shared"] for i in own) == np.flatnonzero(truth < 0).tolist()


@pytest.mark.parametrize("leak", [0.0, 0.02, 0.06])
def test_what_leaks_everywhere_is_not_shared(leak):
    """Separate networks with small weights between them, as initialisation leaves them."""
    torch.manual_seed(1)
    model, _ = planted(scramble=False)
    with torch.no_grad():
        model[0].weight[HIDDEN:, OWN : OWN + BOTH] = 0  # they belong to the first alone
        model[0].weight += leak * torch.randn(2 * HIDDEN, INPUTS)
        model[2].weight += leak * torch.randn(2 * OUTPUTS, 2 * HIDDEN)
    found = cx.discover(model, samples())
    assert found.k == 2
    assert found.shared.shape == (2, INPUTS)
    assert not found.shared.any()


def test_one_module_shares_nothing():
    found = cx.discover(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(200, 6))
    assert found.k == 1
    assert not found.shared.any()


def test_the_split_is_exact_on_the_expanded_weight(split):
    """Nothing is annealed away, and `decompose` finds two blocks where each copy of an input has its own column."""
    _, found, small = split
    options, dense = cx.record(small).options, cx.restore(small)
    weight, labels = dense[0].weight.detach(), options.labels[0]
    for name in ("0", "2"):
        layer = dense.get_submodule(name)
        kept = cx.anneal(layer.weight, options.nulls[f"{name}.weight"], level=options.level, rule="neyman").mask
        assert torch.equal(kept, layer.weight != 0)
    wide = expand_columns(weight, np.array(labels["hidden 1"]))
    assert cx.decompose(weight).n_blocks == 1  # the inputs that both read join them
    assert cx.decompose(wide).n_blocks == 2
    assert torch.equal(wide.view(2 * HIDDEN, 2, INPUTS).sum(1), weight)  # the dense weight is the sum over copies
    assert [set(own) for own in options.copies[0]["in"]] == [set(np.flatnonzero(own)) for own in found.shared]
    copied = [wide[:, b * INPUTS + i] for b, own in enumerate(options.copies[0]["in"]) for i in own]
    assert all(column.any() for column in copied)


def test_it_computes_what_its_dense_form_does_compiled_and_not(split):
    _, _, small = split
    dense, x = cx.restore(small), samples(seed=8)
    expected = dense(x).detach()
    assert_close(small(x).detach(), expected)
    with torch.no_grad():
        for count in (1, 2, 600):
            assert_close(small(x[:count]), expected[:count])


def test_gradients_are_those_of_the_dense_form(split):
    """Inside blocks: what its dense form has elsewhere is no weight of the split network."""
    small, x = copy.deepcopy(split[2]), samples(seed=8)
    dense = cx.restore(small)
    small(x).square().sum().backward()
    dense(x).square().sum().backward()
    with torch.no_grad():
        gradients = [parameter.grad for parameter in small.parameters()]
        for parameter in small.parameters():
            parameter.fill_(1)
        inside = [layer.weight for layer in small[0].to_dense()]
        for parameter, gradient in zip(small.parameters(), gradients, strict=True):
            parameter.copy_(gradient)
        for layer, own, mask in zip((dense[0], dense[2]), small[0].to_dense(), inside, strict=True):
            assert mask.sum() > (layer.weight != 0).sum() / 2
            assert_close(own.weight, layer.weight.grad * mask)
            assert_close(own.bias, layer.bias.grad)


def row_labels(small):
    return np.array(cx.record(small).options.labels[0]["hidden 1"])


def test_the_cost_counts_copies(split):
    _, _, small = split
    change = cx.record(small).changes[0]
    rows = np.bincount(row_labels(small))
    reads = [int((cx.restore(small)[0].weight[row_labels(small) == b] != 0).any(0).sum()) for b in range(2)]
    assert sum(reads) == INPUTS + BOTH
    assert change.macs_after == int(np.dot(rows, reads)) == cx.summary(small).changes[0].macs_after
    assert change.operators[0].copies == BOTH
    assert f"{BOTH} copied inputs" in repr(cx.summary(small))


def test_saved_loaded_validated_reported_and_served(split, tmp_path):
    model, _, small = split
    folder, x = cx.save(small, tmp_path / "small", source=model), samples(seed=9)
    again = cx.load(folder)
    with torch.no_grad():
        assert torch.equal(again(x), small(x))
    assert repr(cx.summary(again)) == repr(cx.summary(small))
    assert cx.record(again).options.copies == cx.record(small).options.copies
    verdict = cx.validate(model, folder, [x], max_relative_deviation=20.0)
    assert verdict.passed
    assert verdict.macs[1] == len(x) * cx.summary(small).macs[1]
    dense = cx.restore(small)
    for block in range(2):
        part = cx.load_block(folder, "0.layers.0", block)
        assert torch.equal(part.weight, dense[0].weight[part.rows][:, part.columns])
        assert len(part.columns) == OWN + BOTH
    page = tmp_path / "report.html"
    cx.report(folder, page)
    assert page.stat().st_size > 1000
    with cx.Service.load(folder) as service, torch.no_grad():
        assert_close(service.infer(x[:7]), small(x[:7]))


def test_cut_for_serving_each_piece_gets_its_own_copy(split, tmp_path):
    _, _, small = split
    found, cut = arrange(small, 1, APART)
    assert len(found.pieces) == 2
    folder = cx.save(small, tmp_path / "small")
    for piece in found.pieces:
        assert source_sha256(open_piece(folder, piece)) == source_sha256(cut.modules[piece.name])
    networks = cx.subnetworks(small)
    first, second = (set(reads.tolist()) for reads in networks.inputs)
    assert len(first) == len(second) == OWN + BOTH
    assert len(first & second) == BOTH
    x = samples(seed=9)
    with torch.no_grad():
        assert_close(cut({"input": x})["output"], small(x))
        assert_close(networks(x), small(x))


def test_exported(split, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    _, _, small = split
    x = samples(seed=9)
    cx.export(small, tmp_path / "small.onnx", x[:2])
    session = runtime.InferenceSession(str(tmp_path / "small.onnx"), providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert_close(torch.from_numpy(y), small(x).detach())


def test_the_update_rule_holds_on_the_expanded_weight(split):
    _, _, small = split
    weight, labels = cx.restore(small)[0].weight.detach(), row_labels(small)
    wide, update = expand_columns(weight, labels), torch.randn(2 * HIDDEN, INPUTS)
    structure = cx.decompose(wide)
    parts = updated(redistribute(wide, structure), expand_columns(update, labels), structure)
    after = (weight - update) * (weight != 0)
    expected = redistribute(expand_columns(after, labels), structure)
    for part, other in zip(parts, expected, strict=True):
        inside = other != 0
        assert torch.equal(part[inside], other[inside])


def test_layers_replaced_one_by_one(tmp_path):
    model, truth = planted()
    own = Own(model[0], model[2]).eval()
    found = cx.discover(own, samples())
    small = upgrade(own, modules=found, data=[samples()], epochs=20, learning_rate=1e-3)
    assert isinstance(small.first, cx.BlockLinear)
    assert small.first.n_blocks == 2
    assert small.first.copies == (truth < 0).sum()
    x, dense = samples(seed=9), cx.restore(small)
    with torch.no_grad():
        assert_close(small(x), dense(x))
        cx.save(small, tmp_path / "small")
        assert torch.equal(cx.load(tmp_path / "small", into=own)(x), small(x))


def test_copies_of_a_partition():
    model, _ = planted(scramble=False)
    chains, half = find_chains(model), OWN + BOTH // 2
    labels = {g: np.arange(size) * 2 // size for g, size in chains[0].sizes.items()}
    copies = np.zeros((2, INPUTS), bool)
    copies[0, half : OWN + BOTH] = copies[1, OWN:half] = True
    partition = Partition(2, chains, (labels,), ({"in": copies},))
    assert torch.equal(partition.mask("0"), model[0].weight != 0)
    assert [columns.tolist() for _, columns in partition.members("0")] == [
        [*range(OWN + BOTH)],
        [*range(OWN, INPUTS)],
    ]
    assert partition.row_labels("2") is None
    dense = {name: model.get_submodule(name).weight.detach() for name in partition.layers}
    wide = {name: partition.expand(name, weight) for name, weight in dense.items()}
    components = np.concatenate(list(joint_components(partition.expanded.chains[0], wide).values()))
    assert components.max() + 1 == 2
    assert joint_components(chains[0], dense)["in"].max() == 0
    with pytest.raises(cx.InvalidOption, match="copies of inputs that no layer of the chain writes"):
        Partition(2, chains, (labels,), ({"hidden 1": np.zeros((2, 2 * HIDDEN), bool)},))
    with pytest.raises(cx.InvalidOption, match="booleans as copies"):
        Partition(2, chains, (labels,), ({"in": copies.astype(int)},))


def test_an_interrupted_run_of_other_copies_is_another_run(split, tmp_path):
    model, found, _ = split
    options = {"data": [samples()], "epochs": 2, "learning_rate": 1e-3, "checkpoint": tmp_path / "run"}
    upgrade(model, modules=found, **options)
    with pytest.raises(cx.CrystalliteError, match="checkpoint"):
        upgrade(model, modules=replace(found, shared=np.zeros_like(found.shared)), **options)


def test_layers_that_cannot_gather_copies_are_refused():
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    chains = find_chains(net, example=torch.randn(2, 4, 8, 8))
    labels = {group: np.arange(size) % 2 for group, size in chains[0].sizes.items()}
    partition = Partition(2, chains, (labels,), ({"in": np.array([[False, True, False, False], [False] * 4])},))
    with pytest.raises(cx.InvalidOption, match="0: expected a linear layer where blocks read copies"):
        upgrade(net, partition=partition, data=[torch.randn(2, 4, 8, 8)])
