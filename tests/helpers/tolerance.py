"""One tolerance per dtype, stated once: what a reordered sum of products may differ by, relative to its scale."""

import torch

RELATIVE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def assert_close(found, expected):
    """found ≈ expected to the dtype's tolerance of the largest expected magnitude."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    if expected.numel():
        scale = expected.detach().abs().max().item()
        assert (found - expected).detach().abs().max().item() <= RELATIVE[expected.dtype] * max(scale, 1e-30)
