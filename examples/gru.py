"""A recurrent network: fitted to fewer multiply-adds, and one whose states are separate, found and run exactly.

python examples/gru.py                                 handwritten digits of scikit-learn, read line by line
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import crystallite as cx


class Reader(nn.Module):
    """Reads an image of eight lines from top to bottom, and says which digit it is."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(8, 96, batch_first=True)
        self.head = nn.Linear(96, 10)

    def forward(self, x):
        states, _ = self.gru(x)
        return self.head(states[:, -1])


def trained(x, y):
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(150):
        part = torch.randint(0, len(x), (128,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()
    return model.eval()


def main():
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.images).float() / 16, torch.tensor(digits.target)  # (images, lines, pixels)
    model = trained(x[:1200], y[:1200])

    small = cx.compress(model, x[:1200], budget=0.5)
    print(cx.summary(small), "\n")
    test = (x[1200:], y[1200:])
    print(cx.validate(model, small, test, metric="accuracy", max_drop=0.05, max_relative_deviation=None), "\n")

    # four groups of states that do not hear each other, in no order: found, and run side by side
    gru = nn.GRU(16, 256).eval()
    group = torch.randint(0, 4, (256,))
    with torch.no_grad():
        gru.weight_hh_l0.mul_((group[:, None] == group).repeat(3, 1))
        blocks = cx.reorganize(gru, level=None, only_if_faster=False)
        print(cx.summary(blocks))
        sequence = torch.randn(50, 2, 16)
        difference = (blocks(sequence)[0] - gru(sequence)[0]).abs().max()
    print(f"largest difference: {difference:.1e}")


if __name__ == "__main__":
    main()
