"""A model with code of its own and weights in a file, by the commands of the quickstart in their order."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from crystallite.cli.main import main
from crystallite.models.manifest import read_manifest

CODE = """
import torch
from torch import nn

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(x + self.second(torch.relu(self.first(x))))

def build():
    torch.manual_seed(0)
    return Residual()
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_model.py").write_text(CODE)
    names = {}
    exec(CODE, names)
    save_file(names["build"]().state_dict(), "weights.safetensors")
    torch.manual_seed(1)
    for name, samples in (("inputs", 500), ("held_out", 100)):
        np.savez(f"{name}.npz", inputs=torch.randn(samples, 16).numpy())
    return tmp_path


def test_from_code_and_weights_to_a_page_of_both_models(files, capsys):
    mine = "my_model.py:build"
    words = f"{mine} --weights weights.safetensors --calibration inputs.npz"
    for name, budget in (("small", 0.7), ("smaller", 0.5)):
        assert main(["compress", *words.split(), "--budget", str(budget), "--out", name]) == 0
        judged = f"validate {mine} {name} --weights weights.safetensors --data held_out.npz --max-relative-deviation 1"
        assert main(judged.split()) == 0
    page = ["report", "weights.safetensors", "--force", "--reorganized"]
    assert main([*page, "small"]) == 2
    assert "--original" in capsys.readouterr().err  # says what is missing, and there is such an option
    assert main([*page, "small", "--original", mine]) == 0
    assert "PASSED" in (files / "report.html").read_text().upper()
    assert main([*page, "small", "smaller", "--original", mine]) == 0
    text = (files / "report.html").read_text()
    assert text.upper().count("PASSED") >= 2
    assert "smaller" in text
    assert read_manifest(files / "small")["verdict"]["passed"]


def test_code_without_a_rebuilt_model_is_not_asked_for(files, capsys):
    assert main(["report", "weights.safetensors", "--original", "my_model.py:build"]) == 2
    assert "--original needs --reorganized" in capsys.readouterr().err
