"""`reorganize` and `restore` as users call them: exact where a level is given, fitted where a budget is."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from crystallite.errors import InvalidOption
from crystallite.refitting import fit
from crystallite.reorganization import restore as restoring
from crystallite.reorganization import rewrite

__all__ = ["reorganize", "restore"]

_EXACT, _FITTED = (frozenset(inspect.signature(each).parameters) for each in (rewrite.reorganize, fit))


def reorganize(model: nn.Module, **options: Any) -> nn.Module:
    """A reorganized copy of a model, with its interface; `cx.summary` says what each layer became.

    **Exact** (the default): every layer is annealed by the paper's tests, decomposed and rebuilt from its blocks. The
    result computes exactly what the model computes with the annealed weights, and `cx.restore` undoes it. Needs no
    data. Linear layers, convolutions and recurrent networks; a layer that stays one block, or whose blocks would not
    pay, keeps its place with its annealed weight.

    - `level` (.01), `correction`, `random_walk`, `rule`, `null` ("auto", "init", "empirical" or a null): as for
      `cx.anneal`. level=None anneals nothing and takes the nonzeros of the weights as they are.
    - `example`: inputs to follow the neurons through a model that cannot be traced without.
    - `fold` (True): put the order of hidden neurons into the stored weights where the model allows it.
    - `only_if_faster` (True): replace a layer only where its blocks are expected to run faster on a CPU.

    **Fitted**, with `budget`, `blocks` or `tolerance`: layers become the smaller operators that keep most of
    what the model computes, fitted in closed form to inputs like its own. The dense weights are gone afterwards.

    - `calibration`: batches of inputs as for `cx.validate`, without targets: a few times as many samples, or tokens, as
      the widest layer has inputs. The last fifth only judges.
    - `budget`: the share of the layers' multiply-adds to keep; they go where that does
      least damage to the outputs.
    - `objective` ("macs"): what the budget is a share of; "parameters"; "latency": measured time of the layers; "int8":
      that time with 8-bit weights in ONNX Runtime, for what will be exported so.
    - `blocks`: every layer as so many independent blocks; `joint`: one partition through consecutive layers.
    - `tolerance`, `confidence` (.95): the cheapest budget whose `risk` ("deviation": mean relative deviation from the
      dense model; "disagreement": share of other decisions) is at most the tolerance with this confidence on data like
      the calibration data; refused where that cannot be shown.
    - `polish_steps` (0): steps of training inside the structure, towards the dense model's outputs; `checkpoint`: a
      folder from which an interrupted training goes on.
    - `ridge` (.01), `seed` (0).

    Both: `targets`, `ignore`: patterns of layer names; `progress`: a bar on standard error.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
    >>> with torch.no_grad():
    ...     model[2].weight[:, 16:] = 0  # 48 of 64 hidden neurons do nothing
    >>> reorganize(model, budget=0.25, calibration=torch.randn(400, 16))[0]
    Linear(in_features=16, out_features=16, bias=True)
    >>> reorganize(model, level=0.001, budget=0.25)
    Traceback (most recent call last):
    crystallite.errors.InvalidOption: level= belongs to exact reorganization, budget= to fitting: pass one
    """
    exact, fitted = ([name for name in options if name in mine - yours]
                     for mine, yours in ((_EXACT, _FITTED), (_FITTED, _EXACT)))  # fmt: skip
    if exact and fitted:
        raise InvalidOption(f"{_names(exact)} belongs to exact reorganization, {_names(fitted)} to fitting: pass one")
    if not fitted:
        return rewrite.reorganize(model, **options)
    if "calibration" not in options:
        raise InvalidOption(f"{_names(fitted)} needs calibration=: batches of inputs that the layers are fitted to")
    return fit(model, **options)


def restore(model: nn.Module) -> nn.Module:
    """A copy of an exactly reorganized model with every block operator replaced by the dense layers it stands for.

    Weights are those of the original after annealing, bit for bit, in their places and under their names. A module
    that was replaced as a whole (a feed-forward pair) comes back as a `DenseFeedForward` of the same layers. A fitted
    model is refused: what its layers were is not in it.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> with torch.no_grad():
    ...     model[0].weight[:2, 2:] = model[0].weight[2:, :2] = 0
    >>> again = restore(reorganize(model, level=None, only_if_faster=False))
    >>> all(torch.equal(again.state_dict()[name], value) for name, value in model.state_dict().items())
    True
    """
    record: Any = getattr(model, "reorganization", None)
    if record is not None and record.fitted:
        raise InvalidOption(
            "this model was fitted: its dense weights are gone, nothing can restore them; keep the original"
        )
    return restoring.restore(model)


def _names(options: list[str]) -> str:
    return ", ".join(f"{name}=" for name in options)
