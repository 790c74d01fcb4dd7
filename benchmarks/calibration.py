"""How the tests of annealing behave on matrices of pure noise: the tables of docs/annealing.md.

    python -m benchmarks.calibration

For n rows and every family of f0: the bandwidth δ·n, and the share of noise that counts as structural preference
(mean and largest over the seeds), for the literal and the calibrated random-walk test; then rejection rates of the
Neyman test, exact and after rounding to the number formats of checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from crystallite.annealing import nulls
from crystallite.annealing.anneal import anneal
from crystallite.annealing.random_walk import random_walk_test

SIZES = (16, 64, 256, 1024, 4096)
LARGEST = 1 << 21  # entries; taller matrices get fewer columns

Draw = Callable[[int, int, np.random.Generator], tuple[np.ndarray, nulls.Null]]


def uniform(rows: int, cols: int, rng: np.random.Generator) -> tuple[np.ndarray, nulls.Null]:
    f0 = nulls.Uniform(0.05)
    return f0.sample((rows, cols), rng), f0


def normal(rows: int, cols: int, rng: np.random.Generator) -> tuple[np.ndarray, nulls.Null]:
    f0 = nulls.Normal(0.02)
    return f0.sample((rows, cols), rng), f0


def truncated_normal(rows: int, cols: int, rng: np.random.Generator) -> tuple[np.ndarray, nulls.Null]:
    f0 = nulls.TruncatedNormal(0.02)
    return f0.sample((rows, cols), rng), f0


def orthogonal(rows: int, cols: int, rng: np.random.Generator) -> tuple[np.ndarray, nulls.Null]:
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 31)))
    w = torch.nn.init.orthogonal_(torch.empty(rows, cols), generator=generator)
    return w.numpy(), nulls.Orthogonal(rows, cols)


def empirical(rows: int, cols: int, rng: np.random.Generator) -> tuple[np.ndarray, nulls.Null]:
    w = nulls.Normal(0.05, mean=-0.01).sample((rows, cols), rng)  # off-centre, as some transformers are
    return w, nulls.Empirical.fit(w)


def from_init(rows: int, cols: int, rng: np.random.Generator) -> tuple[np.ndarray, nulls.Null]:
    w0 = rng.laplace(0, 0.02, (rows, cols))
    return rng.permuted(w0.reshape(-1)).reshape(rows, cols), nulls.FromInit(w0)


FAMILIES: dict[str, Draw] = {
    f.__name__: f for f in (uniform, normal, truncated_normal, orthogonal, empirical, from_init)
}


def noise_as_preference(family: str, rows: int, method: str, seeds: int) -> tuple[float, float, float]:
    """(mean δ·n, mean share, largest share) of noise labelled preference over this many seeds."""
    cols = min(rows, LARGEST // rows)
    bands, shares = [], []
    for seed in range(seeds):
        w, f0 = FAMILIES[family](rows, cols, np.random.default_rng(seed))
        walk = random_walk_test(w, f0, method)
        bands.append(walk.relative_bandwidth)
        shares.append(walk.shares["preference"])
    return float(np.mean(bands)), float(np.mean(shares)), float(np.max(shares))


def noise_as_suppression(family: str, rows: int, seeds: int) -> int:
    """In how many of so many matrices of noise anything counts as suppressed."""
    cols = min(rows, LARGEST // rows)
    drawn = (FAMILIES[family](rows, cols, np.random.default_rng(seed)) for seed in range(seeds))
    return sum(random_walk_test(w, f0).shares["suppression"] > 0 for w, f0 in drawn)


def planted_suppression(family: str, rows: int, share: float, factor: float) -> tuple[float, float]:
    """(found, noise): shares of planted entries, scaled by the factor, and of the others that count as suppressed."""
    rng = np.random.default_rng(1)
    w, f0 = FAMILIES[family](rows, rows, rng)
    planted = rng.random(w.shape) < share
    w = np.where(planted, factor * w, w)
    suppressed = np.abs(w) < random_walk_test(w, f0).suppression_below
    return float(suppressed[planted].mean()), float(suppressed[~planted].mean())


def rejection_rate(family: str, level: float, correction: str | None, seeds: int = 20) -> float:
    """The share of pure noise (256×256) that the Neyman test keeps."""
    kept = []
    for seed in range(seeds):
        w, f0 = FAMILIES[family](256, 256, np.random.default_rng(seed))
        kept.append(anneal(w, f0, level, correction, rule="neyman").kept_share)
    return float(np.mean(kept))


def rate_after_rounding(dtype: torch.dtype, level: float) -> float:
    """The share of normal noise (2000×2000) that the Neyman test keeps once the noise is stored in a coarse format."""
    w = torch.randn(2000, 2000, generator=torch.Generator().manual_seed(0)) * 0.02
    return anneal(w.to(dtype), nulls.Normal(0.02), level, rule="neyman").kept_share


def main() -> None:
    for method in ("literal", "calibrated"):
        print(f"\n{method}: δ·n, then noise labelled preference (mean, largest over seeds)\n")
        print(f"| {'f0':<16} |" + "".join(f" {f'n = {n}':^22} |" for n in SIZES))
        print("|---" * (len(SIZES) + 1) + "|")
        for family in FAMILIES:
            cells = []
            for rows in SIZES:
                band, mean, largest = noise_as_preference(family, rows, method, 100 if rows < 256 else 5)
                cells.append(f" {band:5.2f} {mean:7.2%} {largest:7.2%} ")
            print(f"| {family:<16} |" + " |".join(cells) + " |")
    print("\nsuppression: matrices of noise with any (100 at n = 16 and 64, 10 at 256 and 1024)\n")
    for family in FAMILIES:
        counts = [noise_as_suppression(family, rows, 100 if rows < 256 else 10) for rows in (16, 64, 256, 1024)]
        print(f"| {family:<16} | {counts}")
    print("\nplanted suppression, 256×256: found, and noise beside it, at 1 and 2 % scaled by .01, then by .1\n")
    for family in FAMILIES:
        cells = [planted_suppression(family, 256, share, factor) for factor in (0.01, 0.1) for share in (0.01, 0.02)]
        print(f"| {family:<16} | " + " | ".join(f"{found:4.0%} {noise:5.1%}" for found, noise in cells) + " |")
    print("\nNeyman, 20 matrices of 256×256: share of noise kept\n")
    print(f"| {'f0':<16} |    5 % |    1 % |   .1 % | edges in all, 1 % with bonferroni, holm, bh |")
    print("|---" * 5 + "|")
    for family in FAMILIES:
        rates = " | ".join(f"{rejection_rate(family, x, None):6.3%}" for x in (0.05, 0.01, 0.001))
        edges = ", ".join(
            f"{rejection_rate(family, 0.01, c) * 20 * 256 * 256:.0f}" for c in ("bonferroni", "holm", "bh")
        )
        print(f"| {family:<16} | {rates} | {edges} |")
    print("\nNeyman on normal noise that was rounded when it was stored\n")
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        rates = " | ".join(f"{rate_after_rounding(dtype, x):6.3%}" for x in (0.05, 0.01, 0.001))
        print(f"| {str(dtype).removeprefix('torch.'):<16} | {rates} |")


if __name__ == "__main__":
    main()
