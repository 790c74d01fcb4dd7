"""A small network that reads sequences."""

import torch
from torch import nn

KINDS = {"RNN": nn.RNN, "GRU": nn.GRU, "LSTM": nn.LSTM}


class Reader(nn.Module):
    """Reads a sequence and says something at each step."""

    def __init__(self, kind="GRU", inputs=12, hidden=32, **options):
        super().__init__()
        self.recurrent = KINDS[kind](inputs, hidden, batch_first=True, **options)
        self.head = nn.Linear(hidden * (1 + self.recurrent.bidirectional), 8)

    def forward(self, x):
        return self.head(self.recurrent(x)[0])


def sequences(count=200, length=7, inputs=12):
    return torch.randn(count, length, inputs, generator=torch.Generator().manual_seed(1))
