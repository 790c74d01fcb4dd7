"""The line through sizes and seconds of batches."""

import random

import pytest

from crystallite.serving.batch_costs import BatchCosts


def seen(cost, sizes):
    costs = BatchCosts()
    for size in sizes:
        costs.add(size, cost(size))
    return costs


@pytest.mark.parametrize("fixed", [0, 10, 300])
@pytest.mark.parametrize("each", [1e-6, 0.1])
def test_it_finds_planted_costs_among_noise(fixed, each):
    rng = random.Random(0)
    sizes = [rng.randint(1, 1000) for _ in range(200)]
    costs = seen(lambda size: each * (fixed + size) * rng.uniform(0.95, 1.05), sizes)
    assert abs(costs.fixed(0) - fixed) < 40


def test_it_forgets_what_batches_cost_earlier():
    costs = seen(lambda size: 500 + size, range(1, 1000, 10))
    for _ in range(5):
        for size in range(1, 1000, 10):
            costs.add(size, 50.0 + size)
    assert abs(costs.fixed(0) - 50) < 1


def test_it_says_nothing_of_batches_of_one_size_or_of_few():
    assert seen(lambda _: 1.0, [7] * 100).fixed(3) == 3
    assert seen(lambda size: size, [1, 2, 3]).fixed(4) == 4


def test_fixed_costs_are_neither_negative_nor_more_than_a_usual_batch():
    sizes = [*range(10, 100, 10)] * 3
    assert seen(lambda size: size**2, sizes).fixed(5) == 0
    assert seen(lambda size: 1 / size, sizes).fixed(5) == pytest.approx(50, abs=10)
