"""Without a compiler the passes run in NumPy: each gives what its compiled equal gives."""

import numpy as np
import pytest

from crystallite.annealing import kernels, plain_kernels
from crystallite.core.compiling import COMPILES

pytestmark = pytest.mark.skipif(not COMPILES, reason="there is nothing to compare with: numba is not there")

RNG = np.random.default_rng(0)
SHAPES = [(1, 1), (3, 5), (7, 64), (64, 7), (130, 1030)]
CELLS = (0.5, 3.0, 4)  # start, split, split_cell


def bits(shape, kind):
    return RNG.integers(0, np.iinfo(kind).max, shape, kind)


def values(shape, kind):
    return RNG.standard_normal(shape).astype(kind)


def both(name, arguments, filled):
    """The last argument after a call of each of them, and what they returned."""
    outcomes = []
    for home in (kernels, plain_kernels):
        out = filled.copy()
        returned = getattr(home, name)(*arguments, out)
        outcomes.append((out[:returned] if returned is not None else out, returned))
    return outcomes


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_patterns(shape, kind):
    given = bits(shape, kind)
    width = 8 * given.itemsize
    mask, shift = kind(np.iinfo(kind).max >> 1), kind(max(0, width - 9))
    counts = np.zeros(1 << 8 if width > 8 else 1 << 7, np.int64)
    (compiled, _), (plain, _) = both("bin_patterns", (given, mask, shift), counts)
    assert plain.sum() == given.size
    np.testing.assert_array_equal(plain, compiled)
    wanted = kind(int(np.argmax(plain)))
    (compiled, many), (plain, same) = both("collect_bin", (given, mask, shift, wanted), np.zeros(given.size, kind))
    assert many == same > 0
    np.testing.assert_array_equal(plain, compiled)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numbers_of_patterns(shape):
    given, mask = bits(shape, np.uint16), np.uint16(0x7FFF)
    table = RNG.standard_normal(1 << 15).astype(np.float32)
    (compiled, _), (plain, _) = both("magnitudes_of", (given, mask, table), np.zeros(shape, np.float32))
    np.testing.assert_array_equal(plain, compiled)
    (compiled, _), (plain, _) = both("upper_halves", (given, mask), np.zeros(shape, np.uint32))
    np.testing.assert_array_equal(plain, compiled)
    assert (plain >> 31 == 0).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_sums(shape, kind):
    given = values(shape, kind)
    (compiled, _), (plain, _) = both("add_column_magnitudes", (given,), np.ones(shape[1]))
    np.testing.assert_allclose(plain, compiled, rtol=1e-12)
    (compiled, _), (plain, _) = both("add_row_magnitudes", (given,), np.ones(shape[0]))
    np.testing.assert_allclose(plain, compiled, rtol=1e-12)
    upper = (given.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    (compiled, _), (plain, _) = both("add_column_magnitudes", (upper,), np.ones(shape[1]))
    np.testing.assert_allclose(plain, compiled, rtol=1e-12)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_cells(shape, kind):
    given = values(shape, kind) * 8 + np.sign(values(shape, kind))
    given = np.where(np.abs(given) < 1, kind(1), given)  # none below the first cell
    for name, axis in (("bin_by_column", 1), ("bin_by_row", 0)):
        scales = RNG.uniform(0.6, 2, shape[axis])
        scales[1::3] = 0  # left out
        (compiled, _), (plain, _) = both(name, (given, scales, *CELLS), np.zeros(20, np.int64))
        np.testing.assert_array_equal(plain, compiled)
        assert plain.sum() == np.count_nonzero(scales) * shape[1 - axis]
