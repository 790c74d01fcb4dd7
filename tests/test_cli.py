"""The command: examples in the help, tables and JSON, one line and a non-zero exit on bad input."""

import json
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from crystallite.cli import main


@pytest.fixture
def checkpoint(tmp_path):
    torch.manual_seed(0)
    path = tmp_path / "model.safetensors"
    save_file({"encoder.layer.weight": torch.randn(64, 48), "encoder.norm.weight": torch.ones(48)}, path)
    return path


def test_analyze_prints_a_table_and_a_verdict(checkpoint, capsys):
    assert main(["analyze", str(checkpoint)]) == 0
    out = capsys.readouterr().out
    assert "encoder.layer" in out
    assert "Left out: 1 tensors" in out
    assert max(map(len, out.splitlines()[:3])) <= 100


def test_analyze_json(checkpoint, capsys):
    assert main(["analyze", str(checkpoint), "--json", "--level", "percolation", "--rule", "neyman"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["matrices"][0]["level"] == pytest.approx((64 * 48) ** -0.5)
    assert result["skipped"] == {"encoder.norm.weight": "norm"}


@pytest.mark.parametrize("command", ["analyze", "demo"])
def test_help_shows_an_example(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert re.search(rf"example:\n\s+crystallite {command}", capsys.readouterr().out)


@pytest.mark.parametrize("content", [None, b"", b"not weights at all"])
def test_bad_files_give_one_line(tmp_path, capsys, content):
    path = tmp_path / "model.safetensors"
    if content is not None:
        path.write_bytes(content)
    assert main(["analyze", str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("crystallite: ")
    assert error.count("\n") == 1
    assert "Traceback" not in error


def test_bad_options_are_refused(checkpoint, capsys):
    for arguments in (["--level", "x"], ["--rule", "x"], ["--null", "x"]):
        with pytest.raises(SystemExit) as stop:
            main(["analyze", str(checkpoint), *arguments])
        assert stop.value.code == 2
    assert main(["analyze", str(checkpoint), "--level", "7"]) == 1
    assert "level" in capsys.readouterr().err


def test_a_closed_pipe_is_no_error_trace(checkpoint):
    run = f"{sys.executable} -m crystallite analyze {checkpoint} --json | head -1"
    done = subprocess.run(["bash", "-c", run], capture_output=True, text=True, check=True)
    assert done.stdout == "{\n"
    assert done.stderr == ""


def test_demo(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "inputs to outputs: 2 blocks, the largest with 50% of the neurons" in out
    assert (tmp_path / "out" / "analysis.json").exists()
    picture = (tmp_path / "out" / "blocks.svg").read_text()
    assert picture.startswith("<svg")
    assert picture.count('class="block"') == 2
    assert "path{stroke:" in picture
