"""Words of 64 comparisons in NumPy, as without a compiler, beside the vector instructions."""

import numpy as np
import pytest

from crystallite.core.compiling import COMPILES, njit
from crystallite.structure import lanes, vector_lanes

pytestmark = pytest.mark.skipif(not COMPILES, reason="there is nothing to compare with: numba is not there")

RNG = np.random.default_rng(0)


@njit
def _surviving(row, start, mask, threshold):
    return vector_lanes.surviving_lanes(row, start, mask, threshold)


@njit
def _unsettled(row, start, mask, threshold, ceiling, parent, root):
    return vector_lanes.unsettled_lanes(row, start, mask, threshold, ceiling, parent, root)


@njit
def _bits(word):
    return vector_lanes.lowest_bit(word), vector_lanes.bit_count(word)


@pytest.mark.parametrize("width", [8, 16, 32, 64])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("per_column", [True, False])
def test_words(width, signed, per_column):
    kind = np.dtype(f"u{width // 8}").type
    most = np.iinfo(kind).max
    row = RNG.integers(0, most, 192, kind, endpoint=True)
    mask = np.dtype(f"i{width // 8}").type(most >> 1) if signed else kind(most)
    threshold = RNG.integers(1, most >> 1, 192, kind) if per_column else kind(most // 3)
    ceiling, parent = kind(int(mask) // 8 * 7), RNG.integers(1, 3, 192).astype(np.int32)
    settled = 0
    for start in (0, 64, 128):
        word = lanes._surviving_lanes(row, start, mask, threshold)
        assert word == _surviving(row, start, mask, threshold)
        assert (lanes._lowest_bit(word), lanes._bit_count(word)) == _bits(word)
        arguments = (row, start, mask, threshold, ceiling, parent, np.int32(2))
        assert lanes._unsettled_lanes(*arguments) == _unsettled(*arguments)
        settled += lanes._unsettled_lanes(*arguments) != word
    assert settled
