"""A network of four independent parts as a two-tier service on a Ray cluster.

python examples/ray_service.py                         without Ray it says what is missing

Ray listens on all network interfaces of a machine: run it in a private network (docs/ray.md, "Safety").
"""

import importlib.util
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

import crystallite as cx


def separate():
    """Four networks in one, their neurons in no order."""
    torch.manual_seed(0)
    group = torch.randint(0, 4, (512,))
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).eval()
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.mul_(group[:, None] == group)
    return model


def main():
    model = separate()
    small = cx.reorganize(model, level=None, only_if_faster=False)
    print(cx.summary(small), "\n")
    x = torch.randn(200, 512)
    with TemporaryDirectory() as place:
        saved = cx.save(small, Path(place) / "small", source=model)
        print(cx.validate(model, saved, x), "\n")  # its verdict lies in the folder then, and it may be served
        if importlib.util.find_spec("ray") is None:
            print("Ray is not installed: pip install 'crystallite[ray]'")
            return
        with cx.Service.load(saved, engine="ray") as service:  # the parts on the cluster, the transform tier here
            answer = service.infer(x[:5])
        with torch.no_grad():
            print(f"largest difference: {(answer - model(x[:5])).abs().max():.1e}")


if __name__ == "__main__":
    main()
