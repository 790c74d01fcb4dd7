"""A small network trained on scikit-learn's digits."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

RECIPE = {"learning_rate": 5e-3, "smoothing": 0.0, "block_loss": 1.0}  # of an upgrade with labels that searches nothing


def data():
    """Training batches, test images and test labels."""
    stored = load_digits()
    x, y = torch.tensor(stored.data / 16, dtype=torch.float32), torch.tensor(stored.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return DataLoader(TensorDataset(x[:1400], y[:1400]), batch_size=64, shuffle=True), x[1400:], y[1400:]


def network(dropout=0.0):
    torch.manual_seed(0)
    between = [nn.ReLU(), nn.Dropout(dropout)] if dropout else [nn.ReLU()]
    return nn.Sequential(nn.Linear(64, 96), *between, nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10))


def train(model, loader, epochs, rate=2e-3):
    optimizer = torch.optim.Adam(model.parameters(), rate)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model


@torch.no_grad()
def accuracy(model, x, y):
    return float((model(x).argmax(1) == y).float().mean())
