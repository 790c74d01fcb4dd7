"""`crystallite demo`: one real network from training to validated, smaller models and a report."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from crystallite.analysis import analyze
from crystallite.baselines import METHODS, Row, compare, table
from crystallite.compression.compress import compress
from crystallite.core.errors import CrystalliteError
from crystallite.core.tables import terminal_width, text_table
from crystallite.models.artifact import save
from crystallite.models.manifest import attach_verdict
from crystallite.models.summary import summary
from crystallite.report import report
from crystallite.separation import upgrade
from crystallite.serving import Service
from crystallite.validation import Verdict, sweep, validate

__all__ = ["run"]

_BUDGET = 0.25
_BLOCKS = 4
_WIDTH = 512  # wide enough for blocks to be faster


def run(out: Path) -> None:
    """Train, analyse, anneal, fit, upgrade, validate, save, serve and report; everything is written to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # networks this small are quickest so, and do not wait for a second core that is busy
    train, held_out, test = _digits()

    print(f"1. A network trained on handwritten digits, 64-{_WIDTH}-{_WIDTH}-10\n")
    dense = nn.Sequential(nn.Linear(64, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 10))
    _fit(dense, train)
    weights = out / "digits.safetensors"
    save_file(dense.state_dict(), weights)
    analysis = analyze(weights, null="init")
    print(analysis.table(terminal_width()))
    print(f"\n   {analysis.verdict}\n")

    print("2. Annealed by the paper's tests, at every level, beside the original\n")
    levels = sweep(dense, [held_out], [0.05, 0.01, 0.001], metric="accuracy", rule=["both", "neyman"], null="init")
    print(f"{levels}\n")

    print(f"3. Fitted to {_BUDGET:.0%} of its multiply-adds: no training, no labels\n")
    fitted = compress(dense, budget=_BUDGET, calibration=train[0])
    print(f"{summary(fitted)}\n")

    print(f"4. Trained on until it consists of {_BLOCKS} independent blocks, by the same tests\n")
    loader = DataLoader(TensorDataset(*train), 64, shuffle=True)
    cross_entropy = nn.functional.cross_entropy
    small = upgrade(dense, blocks=_BLOCKS, data=loader, loss=cross_entropy, epochs=15, null="init", ignore="4")
    print(f"{summary(small)}\n")

    print("5. Each beside the original on the same images, which none has seen\n")
    verdicts, models = {}, {"fitted": fitted, "in-blocks": small}
    judged = list(zip(*(part.split(100) for part in test), strict=True))
    for name, model in models.items():
        verdicts[name] = validate(
            dense, model.eval(), judged, "accuracy",
            max_drop=0.03, min_agreement=0.9, max_relative_deviation=None, layers=False,
        )  # fmt: skip
        print(f"{name}: {verdicts[name]}\n")
        artifact = out / f"digits-{name}"
        shutil.rmtree(artifact, ignore_errors=True)
        save(model, artifact, source=dense)
        attach_verdict(artifact, verdicts[name].to_json())
        with Service.load(artifact) as service, torch.inference_mode():
            served = torch.as_tensor(service.infer(test[0].numpy()))
            difference = float((served - model(test[0])).abs().max())
        print(f"Saved, and served once in process: answers differ by at most {difference:.0e} from the model's.\n")

    print("6. Beside what others make of the network without training, at the multiply-adds of the fitted one\n")
    others = [name for name in METHODS if name != "ONNX Runtime fp32"]  # each export takes seconds
    beside = {"in-blocks": small}
    rows = compare(dense, fitted, judged, "accuracy", calibration=train[0], methods=others, beside=beside)
    print(f"{table(rows)}\n")
    page = out / "report.html"
    report(
        weights, page, reorganized=models, verdict=verdicts, sweep=levels, front=[row.to_json() for row in rows],
        title="Handwritten digits", null="init",
    )  # fmt: skip
    _table(verdicts, {row.name: row for row in rows})
    print(f"\nWritten: {weights}, {', '.join(str(out / f'digits-{name}') for name in verdicts)}\nReport:  {page}")
    print(f"Next:    crystallite serve {out / 'digits-fitted'}")


def _digits() -> tuple[tuple[Tensor, Tensor], ...]:
    """Images and digits: 1,000 to train with, 297 to choose with, 500 to judge with."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise CrystalliteError("the demo needs scikit-learn: pip install 'crystallite[demo]'") from None
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = torch.tensor(data.data[order] / 16, dtype=torch.float32)
    digits = torch.tensor(data.target[order])
    bounds = [slice(0, 1000), slice(1000, 1297), slice(1297, None)]
    return tuple((images[part], digits[part]) for part in bounds)


def _fit(model: nn.Module, data: tuple[Tensor, Tensor], epochs: int = 20) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    images, digits = data
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(128):
            loss = nn.functional.cross_entropy(model(images[batch]), digits[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def _table(verdicts: dict[str, Verdict], rows: dict[str, Row]) -> None:
    shown = [rows[name] for name in ("dense", *verdicts)]
    sizes = [next(iter(verdicts.values())).parameters[0], *(verdict.parameters[1] for verdict in verdicts.values())]
    lines = [
        ["", "before", *verdicts],
        ["test accuracy", *(f"{row.quality:.1%}" for row in shown)],
        ["parameters", *(f"{size:,}" for size in sizes)],
        ["multiply-adds", *(f"{row.macs:,}" for row in shown)],
        [f"milliseconds for {shown[0].batch}", *(f"{row.latency_ms:.2f}" for row in shown)],
    ]
    print("\n".join(text_table(lines)))
