"""Requests of all lengths in one batch have the answers that they have alone."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crystallite.serving.joining import Joining
from crystallite.serving.model import CutModel, Source
from crystallite.serving.signature import TensorSpec
from tests.helpers import tiny_transformers as tiny
from tests.helpers.artifacts import TOGETHER
from tests.helpers.tolerance import assert_close

SEQUENCES = Joining(
    (TensorSpec("x", torch.float32, ("length", 2)), TensorSpec("mask", torch.int64, ("length",), optional=True)),
    (TensorSpec("states", torch.float32, ("length", 2)), TensorSpec("score", torch.float32, ())),
    frozenset({"length"}),
    {"x": 9},
    ("mask",),
)


@pytest.fixture(scope="module", params=["bert_classifier", "bert", "llama", "mamba", "t5"])
def cut(request):
    model = tiny.build(request.param)
    return CutModel.of("small", "0", Path(), model, Source(Path(), machine=TOGETHER))


# lengths and samples of each request, and whether it brings a mask
REQUESTS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 3), st.booleans()), min_size=1, max_size=6)


@settings(max_examples=12, deadline=None)
@given(requests=REQUESTS, seed=st.integers(0, 99))
def test_answers_do_not_depend_on_who_else_asks(cut, requests, seed):
    joining, parts = cut.joining, []
    for length, samples, masked in requests:
        sizes = {axis: length if axis == "length" else 31 - length for axis in cut.example.sizes}
        part = cut.example.made(samples, sizes, seed)
        parts.append(dict(joining.completed(part)) if masked else part)
    complete = [joining.completed(part) for part in parts]
    assert len({joining.key(part) for part in complete}) == 1
    answers = joining.split(cut.network(joining.joined(complete)), complete)
    for part, answer in zip(parts, answers, strict=True):
        for name, expected in cut.network(part).items():
            assert answer[name].shape == expected.shape
            assert_close(answer[name], expected)


def test_shorter_requests_are_filled_up_masked_and_cut():
    parts = [{"x": torch.ones(1, 3, 2)}, {"x": torch.ones(2, 1, 2), "mask": torch.zeros(2, 1, dtype=torch.int64)}]
    complete = [SEQUENCES.completed(part) for part in parts]
    batch = SEQUENCES.joined(complete)
    assert batch["x"][:, :, 0].tolist() == [[1, 1, 1], [1, 9, 9], [1, 9, 9]]
    assert batch["mask"].tolist() == [[1, 1, 1], [0, 0, 0], [0, 0, 0]]
    states, score = torch.arange(18.0).view(3, 3, 2), torch.arange(3.0)
    answers = SEQUENCES.split({"states": states, "score": score}, complete)
    assert torch.equal(answers[0]["states"], states[:1])
    assert torch.equal(answers[1]["states"], states[1:, :1])
    assert answers[1]["score"].tolist() == [1, 2]


def test_a_request_alone_is_left_as_it_is():
    part = {"x": torch.ones(1, 3, 2)}
    assert SEQUENCES.joined([part]) is part
    answer = {"states": torch.ones(1, 3, 2)}
    assert SEQUENCES.split(answer, [part]) == [answer]


def test_what_must_be_equal_in_a_batch():
    several = Joining((TensorSpec("x", torch.float32, ("height", "width")),), (), frozenset({"height"}))
    one, taller, wider = ({"x": torch.ones(1, *size)} for size in ((2, 3), (5, 3), (2, 4)))
    assert several.key(one) == several.key(taller) != several.key(wider)
    assert SEQUENCES.key({"x": torch.ones(1, 3, 2)}) != SEQUENCES.key(
        {"x": torch.ones(1, 3, 2), "mask": torch.ones(1, 3)}
    )
