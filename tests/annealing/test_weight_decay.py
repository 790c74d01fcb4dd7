"""MNIST's always-black pixels: weights that no gradient ever touches, so only decay moves them."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from crystallite.annealing import nulls
from crystallite.annealing.anneal import anneal

MNIST = Path(__file__).parents[3] / "shared" / "data" / "mnist.npz"
STEPS, BATCH, RATE, DECAY = 60, 32, 1e-3, 1.0


@pytest.fixture(scope="module")
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    if not MNIST.exists():
        pytest.skip("mnist.npz is not here")
    with np.load(MNIST) as data:
        images, labels = data["Xtr"][: STEPS * BATCH].reshape(-1, 784), data["ytr"][: STEPS * BATCH]
    return torch.from_numpy(images).float() / 255, torch.from_numpy(labels).long()


@pytest.mark.parametrize(("optimizer", "decay"), [(torch.optim.Adam, 0.0), (torch.optim.AdamW, DECAY)])
def test_the_shrunk_null_predicts_the_dead_columns(digits, optimizer, decay):
    images, labels = digits
    never_lit = (images == 0).all(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    f0 = nulls.for_module(model[0])
    descent = optimizer(model.parameters(), lr=RATE, weight_decay=decay)
    for step in range(STEPS):
        batch = slice(step * BATCH, (step + 1) * BATCH)
        descent.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        descent.step()

    shrunk = f0.shrunk((1 - RATE * decay) ** STEPS)
    weight = model[0].weight.detach()
    # Pixels black in all images get no gradient in any batch: their weights are noise and nothing else.
    dead = weight[:, never_lit]
    assert dead.abs().max().item() == pytest.approx(shrunk.bound, rel=0.01)
    assert nulls.fit(shrunk, dead).ks < 0.02
    level, size = 0.01, dead.numel()
    kept = anneal(weight, shrunk, level, rule="neyman").mask[:, never_lit.numpy()]
    assert abs(kept.sum() - level * size) <= 4 * math.sqrt(size * level)
    if decay:  # the null that forgets the decay is wrong: it calls noise nothing but noise, and misses what was learnt
        assert shrunk.bound < 0.95 * f0.bound
        assert anneal(weight, f0, level, rule="neyman").mask[:, never_lit.numpy()].sum() == 0
