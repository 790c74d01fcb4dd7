"""A convolutional network and a folder of images: calibrate with the images, compress, export as ONNX.

python examples/cnn.py                                 handwritten digits of scikit-learn, written as PNG files
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

import crystallite as cx


def written(folder, images, digits):
    """A folder of images with a subfolder for each class, as `cx.images` and many others read it."""
    for i, (image, digit) in enumerate(zip(images, digits, strict=True)):
        (folder / str(digit)).mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15.9).astype(np.uint8)).save(folder / str(digit) / f"{i}.png")
    found = cx.images(folder, samples=len(images))  # of a model of transformers: cx.images(folder, "./my-vision-model")
    return found, torch.cat(list(found)), torch.tensor([int(path.parent.name) for path in found.files])


def trained(x, y):
    """A network that has learned the task; put your own in its place."""
    model = nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(),
        nn.Conv2d(24, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(48 * 16, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(100):
        part = torch.randint(0, len(x), (64,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()
    return model.eval()


def main():
    torch.manual_seed(0)
    digits = load_digits()
    with TemporaryDirectory() as place:
        folder = Path(place)
        calibration, x, y = written(folder / "train", digits.images[:1200], digits.target[:1200])
        _, test, labels = written(folder / "test", digits.images[1200:], digits.target[1200:])
        model = trained(x, y)

        small = cx.compress(model, calibration, budget=0.5)
        print(cx.summary(small), "\n")
        verdict = cx.validate(
            model, small, (test, labels), metric="accuracy", max_drop=0.03, max_relative_deviation=None
        )
        print(verdict, "\n")

        print(cx.export(small, folder / "small.onnx", test[:8]))  # compared in ONNX Runtime before it is written


if __name__ == "__main__":
    main()
