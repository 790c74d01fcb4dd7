"""Separators: planted hubs are found, noise has none, and the reported border is what separates."""

import numpy as np
import pytest

import crystallite as cx


def planted(rng, k=4, rows=120, cols=160, density=0.3):
    r, c = rng.permutation(np.arange(rows) % k), rng.permutation(np.arange(cols) % k)
    return (rng.random((rows, cols)) < density) & (r[:, None] == c)


def check_border(mask, bordered):
    """The blocks and the border hold every edge of the reordered mask."""
    reordered = bordered.apply(mask)
    rows, cols = (n - len(h) for n, h in zip(mask.shape, (bordered.hub_rows, bordered.hub_cols), strict=True))
    inner = reordered[:rows, :cols].copy()
    row = col = 0
    for r, c in bordered.structure.blocks:
        inner[row : row + len(r), col : col + len(c)] = False
        row, col = row + len(r), col + len(c)
    assert not inner.any()


@pytest.mark.parametrize("seed", range(5))
def test_planted_hub_rows_and_columns(seed):
    rng = np.random.default_rng(seed)
    mask = planted(rng)
    mask[[5, 77]] |= rng.random((2, 160)) < 0.8
    mask[:, [3]] |= rng.random((120, 1)) < 0.8
    assert cx.decompose(mask).n_blocks == 1
    found = cx.hubs(mask)
    assert found.separates
    assert set(found.hub_rows) <= {5, 77}
    assert set(found.hub_cols) <= {3}
    assert found.structure.largest_share <= 0.5
    check_border(mask, found)
    quarter = cx.hubs(mask, largest_share=0.26)
    assert set(quarter.hub_rows) == {5, 77}
    assert set(quarter.hub_cols) == {3}
    assert quarter.structure.n_blocks == 4
    check_border(mask, quarter)


def test_a_bridge_of_low_degree():
    mask = np.zeros((21, 20), bool)
    mask[:10, :10] = mask[10:20, 10:] = True
    mask[20, [0, 10]] = True  # two edges only, and all that joins the halves
    found = cx.hubs(mask)
    assert (found.n_hubs, found.structure.n_blocks) == (1, 2)
    assert found.hub_rows.tolist() == [20] or found.hub_cols.tolist() in ([0], [10])
    check_border(mask, found)


def test_noise_has_no_small_separator():
    rng = np.random.default_rng(0)
    mask = rng.random((150, 200)) < 0.1
    found = cx.hubs(mask)
    assert not found.separates
    assert found.n_hubs == 0
    assert found.structure == cx.decompose(mask)
    assert "no small set of hubs" in repr(found)


@pytest.mark.parametrize("shape", [(0, 0), (3, 0), (2, 2)])
def test_nothing_to_separate(shape):
    found = cx.hubs(np.zeros(shape))
    assert found.separates
    assert found.n_hubs == 0


def test_separate_blocks_need_no_hubs():
    mask = planted(np.random.default_rng(0), k=3)
    found = cx.hubs(mask)
    assert (found.separates, found.n_hubs) == (True, 0)
    assert found.structure == cx.decompose(mask)


def test_weights_with_a_threshold():
    rng = np.random.default_rng(0)
    mask = planted(rng, k=2)
    mask[7] = True
    w = np.asfortranarray(np.where(mask, 1.0, 0.1))
    assert cx.hubs(w, threshold=0.5).hub_rows.tolist() == cx.hubs(mask).hub_rows.tolist() == [7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"largest_share": 0}, "largest_share"),
        ({"largest_share": "1"}, "largest_share"),
        ({"max_hubs": -1}, "max_hubs"),
        ({"threshold": -1}, "threshold"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(cx.InvalidOption, match=message):
        cx.hubs(np.ones((2, 2)), **options)
