"""A network learns to read two digits at once. Watch its modules form, name them, and split the network along them.

python examples/training_monitor.py                    pairs of handwritten digits of scikit-learn
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import crystallite as cx


def pairs(part, count):
    """Two images side by side out of a part of all images, and both digits."""
    images, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(images[part]).float() / 16, torch.tensor(digits[part])
    first, second = torch.randint(0, len(x), (2, count))
    return torch.cat([x[first], x[second]], 1), torch.stack([y[first], y[second]], 1)


def loss(answer, digits):
    return nn.functional.cross_entropy(answer.view(-1, 10), digits.view(-1))


def right(model, x, y):
    return (model(x).view(-1, 2, 10).argmax(-1) == y).float().mean()


def main():
    torch.manual_seed(0)
    x, y = pairs(slice(0, 1200), 4000)
    held_out = pairs(slice(1200, None), 1000)
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 20))
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    with cx.StructureMonitor(model, batch=x[:512], every=100) as monitor:
        for step in range(501):
            part = torch.randint(0, len(x), (128,))
            optimizer.zero_grad()
            loss(model(x[part]), y[part]).backward()
            optimizer.step()
            monitor.step(step)
    for row in monitor.rows:
        if row["layer"] == "(model)":
            print(f"step {row['step']}: {row['modules']} modules, gap {row['gap']:.2f}")

    found = cx.discover(model.eval(), x[:1500])
    print(found, "\n")
    if found.k > 1:
        data = list(zip(x.split(200), y.split(200), strict=True))
        small = cx.upgrade(model, modules=found, data=data, loss=loss, epochs=2, learning_rate=0.003)
        print(cx.summary(small), "\n")
        print(f"digits right: {right(model, *held_out):.1%} dense, {right(small, *held_out):.1%} as two networks")


if __name__ == "__main__":
    main()
