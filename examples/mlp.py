"""A trained MLP made smaller: analyse, compress, validate, save, load, serve in process.

python examples/mlp.py                                 handwritten digits of scikit-learn
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from sklearn.datasets import load_digits
from torch import nn

import crystallite as cx


def trained(x, y):
    """A network that has learned the task; put your own in its place."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(200):
        part = torch.randint(0, len(x), (128,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()
    return model.eval()


def main():
    torch.manual_seed(0)
    images, digits = load_digits(return_X_y=True)
    order = torch.randperm(len(images))
    x, y = torch.tensor(images).float()[order] / 16, torch.tensor(digits)[order]
    fitted, test = slice(0, 1200), slice(1200, None)
    model = trained(x[fitted], y[fitted])

    print(cx.analyze(model), "\n")  # what structure is there already: usually one block

    small = cx.compress(model, x[fitted], budget=0.25)  # a quarter of the multiply-adds, no labels
    print(cx.summary(small), "\n")

    verdict = cx.validate(
        model, small, (x[test], y[test]), metric="accuracy", max_drop=0.03, max_relative_deviation=None
    )
    print(verdict, "\n")

    with TemporaryDirectory() as folder:
        saved = cx.save(small, Path(folder) / "small", source=model)
        cx.attach_verdict(saved, verdict.to_json())
        again = cx.load(saved)
        assert torch.equal(again(x[test]), small(x[test]))
        with cx.Service.load(saved) as service:  # refused if the verdict says that a rule was broken
            answer = service.infer(x[test][:5])
        print("served:", answer.argmax(-1).tolist(), "labels:", y[test][:5].tolist())


if __name__ == "__main__":
    main()
