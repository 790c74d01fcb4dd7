"""Running statistics against the same numbers computed from all outputs at once."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from crystallite.core.errors import InvalidOption
from crystallite.data.batch import Batch
from crystallite.data.outputs import same_structure, tensors
from crystallite.validation.comparison import RunningComparison


def compare(original, other, *cuts):
    """The comparison of two systems' outputs that come in batches cut at these places."""
    running, edges = RunningComparison(), [0, *cuts, len(original)]
    for start, stop in pairwise(edges):
        if stop > start:
            running.add(Batch(start, stop - start), original[start:stop], other[start:stop])
    return running.done()


@given(st.integers(1, 30), st.sets(st.integers(0, 30), max_size=5), st.integers(0, 2**31))
def test_batches_do_not_matter(samples, cuts, seed):
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, samples, 3, 4, generator=generator)
    whole = compare(a, b)
    found = compare(a, b, *sorted(cut for cut in cuts if cut < samples))
    for name in ("index", "deviation", "cosine", "agreement"):
        np.testing.assert_array_equal(getattr(found.outputs[0], name), getattr(whole.outputs[0], name))
    assert found.worst() == whole.worst()


def test_every_number_against_numpy():
    a, b = torch.randn(2, 50, 6, 5)
    (found,) = compare(a, b, 7, 20).outputs
    x, y = (t.double().numpy().reshape(50, -1) for t in (a, b))
    norms = np.linalg.norm(x, axis=1)
    floor = 0.1 * np.sqrt((norms**2).mean())
    np.testing.assert_allclose(found.deviation, np.linalg.norm(y - x, axis=1) / np.maximum(norms, floor))
    np.testing.assert_allclose(found.cosine, (x * y).sum(1) / norms / np.linalg.norm(y, axis=1))
    np.testing.assert_allclose(found.agreement, (a.argmax(-1) == b.argmax(-1)).numpy().mean(1))
    case = found.case(3)
    assert case.original == (x[3].argmax(), pytest.approx(x[3].max()))
    assert case.reorganized == (y[3].argmax(), pytest.approx(y[3].max()))


def test_an_output_near_zero_is_measured_against_the_usual_size():
    a = torch.ones(100, 1)
    a[5] = 0.0
    (found,) = compare(a, a + 0.01).outputs
    assert 0.09 < found.deviation[5] < 0.11
    assert not found.decides


def test_what_is_not_finite_has_an_index():
    a, b = torch.ones(2, 10, 2)
    a[3, 1], b[7, 0] = float("inf"), float("nan")
    found = compare(a, b, 4)
    assert [case.index for case in found.not_finite] == [3, 7]
    assert found.outputs[0].deviation[[3, 7]].tolist() == [np.inf, np.inf]
    assert found.worst(1)[0].index in (3, 7)


def test_zeros_equal_zeros_and_nothing_else():
    a, b = torch.zeros(2, 3, 2)
    b[2] = 1.0
    (found,) = compare(a, b).outputs
    assert found.deviation.tolist() == [0.0, 0.0, np.inf]
    assert found.cosine.tolist() == [1.0, 1.0, 0.0]


def test_outputs_that_do_not_count_samples_are_compared_as_wholes():
    running = RunningComparison()
    for first in (0, 4):
        output = {"loss": torch.tensor(2.0), "states": torch.ones(2, 4, 3), "logits": torch.ones(4, 3)}
        running.add(Batch(first, 4), output, output | {"states": torch.ones(2, 4, 3) * 1.5})
    rows = {output.path: (output.index.tolist(), output.deviation.tolist()) for output in running.done().outputs}
    assert rows["output.states"] == ([0, 4], [0.5, 0.5])
    assert rows["output.loss"] == ([0, 4], [0.0, 0.0])
    assert len(rows["output.logits"][0]) == 8


def test_integers_are_decisions():
    a = torch.tensor([[1, 2], [3, 4]])
    (found,) = compare(a, torch.tensor([[1, 2], [3, 5]])).outputs
    assert found.agreement.tolist() == [1.0, 0.5]


def test_tensors_are_found_wherever_they_stand():
    @dataclass
    class Output:
        logits: torch.Tensor
        cache: object = None

    nested = {"a": [torch.zeros(1), (torch.zeros(2),)], "b": Output(torch.zeros(3), "no tensor")}
    assert {path: t.numel() for path, t in tensors(nested).items()} == {
        "output.a[0]": 1,
        "output.a[1][0]": 2,
        "output.b.logits": 3,
    }


def test_maps_decide_between_their_classes_at_each_place():
    a, b = torch.randn(2, 20, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    (found,) = compare(a, b, 7).outputs
    np.testing.assert_allclose(found.agreement, (a.argmax(1) == b.argmax(1)).double().mean((1, 2)))
    assert found.decides
    assert not compare(a[:, :1], b[:, :1]).outputs[0].decides  # one number at each place is no choice


def test_what_has_no_row_per_sample_decides_along_its_last_axis():
    a, b = torch.randn(2, 6, 4, 5, generator=torch.Generator().manual_seed(0))
    running = RunningComparison()
    running.add(Batch(0, 4), a, b)
    assert running.done().outputs[0].agreement == pytest.approx([float((a.argmax(-1) == b.argmax(-1)).double().mean())])


@pytest.mark.parametrize("other", [{"a": torch.zeros(2)}, {"a": torch.zeros(2), "b": torch.zeros(3)}])
def test_the_place_of_a_different_output_is_named(other):
    with pytest.raises(InvalidOption, match=r"output\.b: the original returns \(2,\)"):
        same_structure(tensors({"a": torch.zeros(2), "b": torch.zeros(2)}), tensors(other))


def test_an_output_that_comes_and_goes_is_refused():
    running = RunningComparison()
    running.add(Batch(0, 1), torch.zeros(1, 2), torch.zeros(1, 2))
    with pytest.raises(InvalidOption, match="comes and goes"):
        running.add(Batch(1, 1), (torch.zeros(1, 2),), (torch.zeros(1, 2),))


def test_no_tensor_is_no_output():
    with pytest.raises(InvalidOption, match="expected a tensor"):
        tensors("text")
