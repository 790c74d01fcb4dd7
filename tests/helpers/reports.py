"""Networks with planted structure, and rows as other stages would hand them to the report."""

import numpy as np
import torch
from torch import nn


def planted_blocks(rows, cols, blocks, seed=0, hub_rows=0):
    """Weak noise, strong weights inside scattered blocks, and rows that reach everywhere."""
    rng = np.random.default_rng(seed)
    row_block, col_block = rng.permutation(np.arange(rows) % blocks), rng.permutation(np.arange(cols) % blocks)
    noise = rng.uniform(-1, 1, (rows, cols)) * 0.3 / cols**0.5
    strong = rng.choice([-1, 1], (rows, cols)) * rng.uniform(2, 4, (rows, cols)) / cols**0.5
    kept = (row_block[:, None] == col_block) & (rng.random((rows, cols)) < 0.4)
    kept[:hub_rows] = rng.random((hub_rows, cols)) < 0.5
    return torch.tensor(np.where(kept, strong, noise), dtype=torch.float32)


class Planted(nn.Module):
    """Layers that fall into four and three blocks, one held together by hubs, noise, a recurrent layer, channels."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(96, 80), nn.Linear(80, 64)
        self.hubs, self.noise = nn.Linear(64, 64), nn.Linear(64, 48)
        self.cell, self.channels = nn.LSTM(48, 20), nn.Conv2d(8, 12, 3, groups=2)
        weights = {self.first: (80, 96, 4), self.second: (64, 80, 3), self.hubs: (64, 64, 2)}
        with torch.no_grad():
            for layer, (rows, cols, blocks) in weights.items():
                layer.weight.copy_(planted_blocks(rows, cols, blocks, hub_rows=2 if layer is self.hubs else 0))
            feedback = torch.zeros(20, 20)
            feedback[:8, :8] = feedback[8:16, 8:16] = 1  # two strong parts, the first feeds the second
            feedback[9, 3] = 1
            weak = self.cell.weight_hh_l0 * 0.1
            self.cell.weight_hh_l0.copy_(torch.where(feedback.repeat(4, 1) > 0, torch.rand(80, 20) + 1, weak))


def sweep_rows():
    return [
        {"rule": rule, "level": level, "kept_share": level, "blocks": 3, "largest_share": 0.5, "metric": 0.9 - level}
        for rule in ("both", "neyman")
        for level in (0.1, 0.01, 0.001)
    ]


def front_rows():
    return [
        {"name": "dense", "family": "original", "macs": 1000, "latency_ms": 2.0, "quality": 0.9},
        {"name": "blocks", "family": "crystallite", "macs": 250, "latency_ms": 1.0, "quality": 0.88},
        {"name": "pruned", "family": "baseline", "macs": 500, "latency_ms": 1.5, "quality": 0.85},
    ]


def monitor_rows():
    return [
        {"step": step, "layer": layer, "kept_share": 0.1, "largest_share": 1 - step / 200, "blocks": 1 + step // 50,
         "sigma": [1.0, step / 100]}
        for step in range(0, 101, 10)
        for layer in ("first", "second")
    ]  # fmt: skip


HOSTILE = "</script><img src=x onerror=alert(1)>&amp;\"'`${7*7}"
