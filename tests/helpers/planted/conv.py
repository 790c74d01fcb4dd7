"""A convolution whose channels fall into blocks."""

import torch
from torch import nn

from tests.helpers.planted.linear import planted

SETTINGS = [
    {},
    {"padding": 1, "bias": False},
    {"stride": 2, "padding": 2, "dilation": 2},
    {"padding": "same", "dilation": 2},
    {"padding": "valid", "stride": 2},
    {"padding": 1, "padding_mode": "reflect"},
    {"padding": "same", "padding_mode": "circular"},
]
SIZES = {nn.Conv1d: (11,), nn.Conv2d: (9, 8), nn.Conv3d: (5, 6, 7)}


def masked(kind, conv_type=nn.Conv2d, dtype=torch.float32, kernel_size=3, **settings):
    """A convolution from 20 to 12 channels whose kernels are zero outside the planted blocks."""
    torch.manual_seed(0)
    conv = conv_type(20, 12, kernel_size, dtype=dtype, **settings)
    groups = conv.groups
    mask = torch.cat([planted(kind, 12 // groups, 20 // groups, seed=g) for g in range(groups)]) != 0
    with torch.no_grad():
        conv.weight *= mask.view(*mask.shape, *[1] * len(conv.kernel_size))
    return conv


def signal(conv, batch=(2,)):
    torch.manual_seed(1)
    return torch.randn(*batch, 20, *SIZES[type(conv)]).to(conv.weight.dtype)
