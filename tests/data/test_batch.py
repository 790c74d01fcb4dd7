"""Batches: cut, run, and read in the same way by every verb."""

import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.data.batch import Batch, batches, evaluating
from crystallite.data.calibration import Calibration
from crystallite.data.positions import count_positions, real_rows

X, Y = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 4


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    with torch.no_grad():  # as if trained: weights beyond what initialisation draws
        for layer in (model[0], model[2]):
            layer.weight.mul_(4)
    return model


def discovered(model, data):
    return cx.discover(model, data).energy.tolist()


def validated(model, data):
    verdict = cx.validate(model, model, data, max_relative_deviation=0.5)
    return verdict.comparison.samples


def compressed(model, data):
    small = cx.compress(model, data, budget=0.9)
    return [p.tolist() for p in small.parameters()]


def upgraded(model, data):
    small = cx.upgrade(model, blocks=2, data=data, loss=nn.functional.cross_entropy, epochs=2)
    return [p.tolist() for p in small.parameters()]


def exported(model, data, path):
    return cx.export(model, path, data).samples


@pytest.mark.parametrize("verb", [discovered, validated, compressed, upgraded])
def test_a_tuple_is_one_batch_of_inputs_and_target(verb):
    assert verb(network(), (X, Y)) == verb(network(), [(X, Y)])


def test_a_tuple_is_one_batch_for_export(tmp_path):
    pytest.importorskip("onnxruntime")
    assert exported(network(), (X, Y), tmp_path / "a.onnx") == exported(network(), [(X, Y)], tmp_path / "b.onnx") == 64


@pytest.mark.parametrize("verb", [validated, compressed, discovered])
def test_a_list_is_a_list_of_batches(verb):
    assert [batch.size for batch in batches([X, X[:9]])] == [64, 9]
    if verb is validated:
        assert verb(network(), [X, X[:9]]) == 73
    else:
        assert verb(network(), [X, X[:9]]) == verb(network(), [(X, Y), (X[:9], Y[:9])])  # targets make no difference


def test_a_tuple_of_more_parts_is_refused():
    with pytest.raises(cx.InvalidOption, match=r"expected \(inputs, target\), got 3 parts"):
        next(batches((X, X, X)))
    (batch,) = batches(((X, X),))
    assert len(batch.positional) == 2
    assert batch.target is None


def test_parts_of_a_batch():
    batch = Batch(10, 4, (torch.arange(4), torch.zeros(3)), {"mask": torch.arange(8).view(4, 2), "flag": True}, Y[:4])
    part = batch.slice(1, 3)
    assert (part.offset, part.size) == (11, 2)
    assert part.positional[0].tolist() == [1, 2]
    assert len(part.positional[1]) == 3
    assert part.named["mask"].tolist() == [[2, 3], [4, 5]]
    assert part.named["flag"] is True
    assert part.target.tolist() == [1, 2]
    assert batch.first(9).size == 4
    for chosen in (torch.tensor([0, 3]), torch.tensor([True, False, False, True])):
        taken = batch.take(chosen)
        assert taken.size == 2
        assert taken.positional[0].tolist() == [0, 3]
        assert taken.target.tolist() == [0, 3]
    assert [(p.offset, p.size) for p in batch.split(3)] == [(10, 3), (13, 1)]
    assert batch.without_target().target is None


def test_runs_with_and_without_gradients():
    model, (batch,) = network(), batches((X, Y))
    assert not batch.run(model).requires_grad
    assert batch.run(model, gradients=True).requires_grad
    assert batch.call(model).requires_grad
    with pytest.raises(cx.InvalidOption, match="Sequential cannot be called with the batch at sample 0"):
        Batch(0, 2, (torch.zeros(2, 3),)).run(model)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("specify input_ids"), r"\(float32 \[2, 3\], mask int64 \[2\]\): specify input_ids; data is a list"),
        (IndexError("index out of range in self"), "in self: .* inside the vocabulary, positions and classes$"),
        (RuntimeError("expected 3 channels"), "expected 3 channels$"),
        (TypeError("forward() missing 1 argument"), "missing 1 argument; data is a list of batches"),
        (KeyError("ids"), "KeyError: 'ids'; data"),
        (AssertionError(), "AssertionError$"),
    ],
)
def test_what_a_model_raises_is_one_line_with_what_it_was_given(error, said):
    class Raises(nn.Module):
        def forward(self, x, mask):
            raise error

    with pytest.raises(cx.InvalidOption, match=f"Raises cannot be called with the batch at sample 0 .*{said}"):
        Batch(0, 2, (torch.zeros(2, 3),), {"mask": torch.ones(2, dtype=torch.int64)}).run(Raises())


@pytest.mark.parametrize("error", [cx.CrystalliteError("known"), cx.InvalidOption("known"), ZeroDivisionError()])
def test_other_errors_stay_as_they_are(error):
    class Raises(nn.Module):
        def forward(self, x):
            raise error

    with pytest.raises(type(error)) as raised:
        Batch(0, 2, (torch.zeros(2, 3),)).run(Raises())
    assert raised.value is error


def test_labels_reach_models_that_take_them_but_not_a_call():
    class Labelled(nn.Module):
        def forward(self, x, labels=None):
            return {"logits": x} if labels is None else {"loss": labels.float().mean(), "logits": x}

    (batch,) = batches({"x": X, "labels": Y})
    assert set(batch.run(Labelled())) == {"loss", "logits"}
    assert torch.equal(batch.call(Labelled()), X)
    assert set(batch.without_target().run(Labelled())) == {"logits"}


def test_modules_go_back_to_their_modes():
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2).eval())
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, True, False]


def test_positions_are_tokens_that_are_no_padding():
    tokens = torch.ones(3, 5, dtype=torch.int64)
    assert count_positions(Batch(0, 3, (tokens,))) == 15
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    batch = Batch(0, 3, named={"input_ids": tokens, "attention_mask": mask})
    assert count_positions(batch) == 8 == len(real_rows(batch, torch.Size([3, 5]), 99, 0))
    some = real_rows(batch, torch.Size([3, 5]), 4, 0)
    assert len(some) == 4
    assert mask.flatten()[some].all()
    assert torch.equal(some, real_rows(batch, torch.Size([3, 5]), 4, 0))
    assert len(real_rows(batch, torch.Size([3]), 99, 0)) == 3


def test_calibration_looks_at_no_target_and_ends_an_endless_loader():
    def endless():
        while True:
            yield X, Y

    found = Calibration.read(endless())
    assert sum(batch.size for batch in found.all) == 32_768
    assert all(batch.target is None for batch in found.all)


@pytest.mark.parametrize(("samples", "fitted"), [(2, 1), (3, 2), (4, 3), (5, 4)])
def test_few_samples_in_one_batch_are_cut_in_two(samples, fitted):
    data = Calibration.read(torch.zeros(samples, 3))
    assert [batch.size for batch in data.all] == [fitted, samples - fitted]
