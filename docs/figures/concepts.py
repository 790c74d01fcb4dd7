"""The figures of docs/concepts.md: `python docs/figures/concepts.py` draws them with the package itself."""

from pathlib import Path

import numpy as np

import crystallite as cx
from crystallite.core.drawing import side_by_side

HERE = Path(__file__).parent


def planted(rng, rows, cols, noise=0.06):
    """Noise, and weights that training confirmed between neurons of one group; groups of 0 have none."""
    return rng.uniform(-noise, noise, (len(rows), len(cols))) + rng.normal(0, 0.5, (len(rows), len(cols))) * (
        (rows[:, None] == cols) & (rows > 0)[:, None]
    )


def main():
    rng = np.random.default_rng(3)
    hidden = rng.permutation(np.repeat([0, 1, 2, 3], [6, 18, 18, 18]))
    first = planted(rng, hidden, rng.permutation(np.repeat([1, 2, 3], 20)))
    second = planted(rng, rng.permutation(np.repeat([1, 2, 3], 16)), hidden)
    found = [cx.anneal(w, null=cx.nulls.Uniform(0.06), correction="holm", rule="neyman") for w in (first, second)]
    one, two = (cx.decompose(a.mask) for a in found)
    cx.level_profile(first).plot().save(HERE / "levels.svg")
    side_by_side([one.plot(first * found[0].mask), two.plot(second * found[1].mask)], 2).save(HERE / "layers.svg")
    states = np.zeros((9, 9))
    for j, i in [(0, 1), (1, 2), (2, 0), (2, 3), (3, 4), (4, 3), (5, 6), (6, 5), (4, 7)]:
        states[i, j] = 1.0
    cx.decompose(states, kind="directed").plot(states).save(HERE / "feedback.svg")


if __name__ == "__main__":
    main()
