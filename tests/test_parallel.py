"""Kernels compile where nothing can be cached, and work is dealt out and gathered in order."""

import numpy as np
import pytest

from crystallite.parallel import compiled, over_tasks


def test_kernels_compile_without_a_place_for_a_cache():
    """Read-only packages and no home folder: numba would refuse. Code without a file has no such place either."""
    names = {}
    exec("def double(x):\n    return 2 * x", names)
    assert compiled(names["double"])(np.float32(3)) == 6


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 3, 11])
def test_results_come_in_the_order_of_the_tasks(threads, count):
    assert over_tasks(threads, range(count), lambda task: task * task) == [task * task for task in range(count)]


@pytest.mark.parametrize("bad", range(4))
def test_a_failing_task_is_raised_whoever_ran_it(bad):
    def work(task):
        if task == bad:
            raise ValueError(f"task {task}")

    with pytest.raises(ValueError, match=f"task {bad}"):
        over_tasks(2, range(4), work)
