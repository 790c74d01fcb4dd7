import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from crystallite.report.picture import NEVER, SHARES, densities, level_order, share_stops
from crystallite.structure.levels import level_profile

matrices = arrays(
    np.float32,
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    elements=st.sampled_from([0.0, 0.5, -0.5, 1.0, -2.0, 3.0, 4.5]),
)


def runs_at(order, threshold):
    """The blocks that the page draws: runs of neighbours joined at or above a threshold."""
    parts = np.split(order.neurons, np.flatnonzero(~((order.gaps >= threshold) & (order.gaps > 0))) + 1)
    return {frozenset(part.tolist()) for part in parts if len(part) > 1}


@settings(max_examples=60)
@given(matrices, st.floats(0.1, 5))
def test_one_order_has_the_blocks_of_every_level_as_runs(w, threshold):
    profile = level_profile(w)
    label = np.concatenate(profile.labels(threshold))
    expected = {frozenset(np.flatnonzero(label == number).tolist()) for number in set(label.tolist()) - {-1}}
    assert runs_at(level_order(profile), threshold) == expected


@settings(max_examples=60)
@given(matrices, st.integers(1, 12), st.randoms(use_true_random=False))
def test_densities_count_what_lies_in_each_cell(w, grid, random):
    rows, cols = (random.sample(range(n), n) for n in w.shape)
    orders = [(np.array(rows), np.array(cols))]
    (found,) = densities(w, 1.0, orders, grid)
    kept = (np.abs(w) >= 1.0)[rows][:, cols]
    for (i, j), share in np.ndenumerate(found):
        inside = [
            kept[r, c]
            for r in range(w.shape[0])
            for c in range(w.shape[1])
            if r * found.shape[0] // w.shape[0] == i and c * found.shape[1] // w.shape[1] == j
        ]
        assert share == np.mean(inside)


def test_densities_take_a_threshold_per_column():
    w = np.array([[1.0, 1.0], [3.0, 3.0]])
    (found,) = densities(w, np.array([2.0, 0.5]), [(np.arange(2), np.arange(2))], 2)
    assert found.tolist() == [[0.0, 1.0], [1.0, 1.0]]


@settings(max_examples=60)
@given(matrices, st.integers(1, 4))
def test_a_cell_knows_the_first_stop_that_keeps_a_share_of_it(w, grid):
    thresholds = np.array([4.5, 2.5, 1.0, 0.5])
    stops, kept = share_stops(w, thresholds, np.arange(w.shape[0]), np.arange(w.shape[1]), grid)
    assert kept.tolist() == [int((np.abs(w) >= c).sum()) for c in thresholds]
    at = [densities(w, c, [(np.arange(w.shape[0]), np.arange(w.shape[1]))], grid)[0] for c in thresholds]
    for share, first in zip(SHARES, stops, strict=True):
        for cell, stop in np.ndenumerate(first):
            reached = [k for k, density in enumerate(at) if density[cell] >= share and density[cell] > 0]
            assert stop == (reached[0] if reached else NEVER)


def test_formats_and_layouts_give_the_same_picture():
    w = torch.randn(40, 30, generator=torch.Generator().manual_seed(0)).bfloat16()
    orders = [(np.arange(40), np.arange(30))]
    (expected,) = densities(w.double(), 1.0, orders, 8)
    for other in (w, w.float().numpy().astype(np.float16), w.t().contiguous().t()):
        assert np.array_equal(densities(other, 1.0, orders, 8)[0], expected)
