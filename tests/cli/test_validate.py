"""`crystallite validate`: exit codes, JSON, one line on bad input."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import crystallite as cx
from crystallite.cli.main import main
from crystallite.core.errors import CrystalliteError
from crystallite.data.files import read_data
from crystallite.models.artifact import read_manifest
from tests.helpers.block_models import block_linear


def model():
    torch.manual_seed(0)
    return nn.Sequential(block_linear(16, 16, 4, 0), nn.ReLU(), block_linear(16, 8, 4, 1))


def command(original, *arguments):
    """The exit code of the command; the original comes from this file."""
    return main(["validate", f"{__name__}:{original}", *map(str, arguments)])


@pytest.fixture
def files(tmp_path):
    small = cx.save(cx.reorganize(model(), level=None, only_if_faster=False), tmp_path / "small")
    inputs = torch.randn(600, 16)
    with torch.no_grad():
        right = model()(inputs).argmax(1)
    np.savez(tmp_path / "data.npz", inputs=inputs.numpy(), labels=right.numpy())
    save_file({"inputs": inputs}, tmp_path / "data.safetensors")
    return tmp_path, small


def test_pass_fail_and_what_is_kept(files, capsys):
    folder, small = files
    assert command("model", small, "--data", folder / "data.npz", "--metric", "accuracy", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metric"] == {"name": "accuracy", "values": [1.0, 1.0]}
    assert read_manifest(small)["verdict"]["passed"] is True
    assert command("model", small, "--data", folder / "data.safetensors", "--min-agreement", 0.999) == 1
    said = capsys.readouterr().out
    assert said.startswith("FAILED on 600 samples")
    assert said.endswith(f"Verdict written into {small}.\n")
    assert read_manifest(small)["verdict"]["passed"] is False


def test_the_task_alone_can_judge(files, capsys):
    folder, small = files
    words = ("--data", folder / "data.npz", "--metric", "accuracy", "--max-relative-deviation", "none", "--json")
    assert command("model", small, *words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rules"]["max_relative_deviation"] is None
    assert [outcome["rule"] for outcome in found["outcomes"]] == ["max_drop"]


def test_another_original_than_the_recorded_one_is_refused(files, capsys):
    folder, _ = files
    other = model()
    with torch.no_grad():
        next(other.parameters()).add_(1)
    small = cx.save(cx.reorganize(other, level=None, only_if_faster=False), folder / "other", source=other)
    assert command("model", small, "--data", folder / "data.npz") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "made from a model with the hash" in said
    assert f"{__name__}:model returned, which may be random: pass --weights FILE with the trained ones" in said
    assert read_manifest(small)["verdict"] is None
    torch.save(other.state_dict(), folder / "trained.pt")
    assert command("model", small, "--data", folder / "data.npz", "--weights", folder / "trained.pt") == 0
    torch.save(model().state_dict(), folder / "others.pt")
    assert command("model", small, "--data", folder / "data.npz", "--weights", folder / "others.pt") == 2
    assert "pass the one it was made from" in capsys.readouterr().err  # weights that were given are no random ones


def test_a_folder_without_a_manifest_is_opened_as_a_pretrained_model(files, monkeypatch, capsys):
    folder, _ = files
    monkeypatch.setattr("crystallite.cli.validate.open_pretrained", lambda folder: model())
    (folder / "pretrained").mkdir()
    assert command("model", folder / "pretrained", "--data", folder / "data.npz") == 0
    assert "Verdict written" not in capsys.readouterr().out


def test_levels_are_swept(files, capsys):
    folder, small = files
    command("model", small, "--data", folder / "data.npz", "--levels", 0.1, "percolation", "--json")
    points = json.loads(capsys.readouterr().out)["sweep"]["points"]
    assert sorted(str(point["level"]) for point in points) == ["0.1", "percolation"]
    with pytest.raises(SystemExit, match="2"):
        command("model", small, "--data", folder / "data.npz", "--levels", "many")
    assert "--levels" in capsys.readouterr().err


def test_help_shows_an_example(capsys):
    with pytest.raises(SystemExit):
        main(["validate", "--help"])
    assert "example:\n  crystallite validate" in capsys.readouterr().out


def test_keyword_arguments_come_from_their_names(tmp_path):
    np.savez(tmp_path / "a.npz", input_ids=np.ones((5, 3), int), attention_mask=np.ones((5, 3)), labels=np.ones(5))
    found = read_data(tmp_path / "a.npz", 2)
    assert [sorted(batch) for batch in found] == [["attention_mask", "input_ids", "labels"]] * 3
    assert [len(batch["labels"]) for batch in found] == [2, 2, 1]


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"labels": np.ones(3)},
        {"inputs": np.ones((3, 2)), "labels": np.ones(2)},
        {"inputs": np.ones((0, 2))},
        {"inputs": np.array(1.0)},
        {"inputs": np.array([{}], dtype=object)},
        {"inputs": np.array(["text"])},
    ],
)
def test_arrays_that_are_no_samples_are_refused(tmp_path, arrays):
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(CrystalliteError, match=r"bad\.npz"):
        read_data(tmp_path / "bad.npz", 4)


@pytest.mark.parametrize("name", ["bad.npz", "bad.safetensors", "bad.npy"])
@pytest.mark.parametrize("content", [None, b"", b"not arrays", b"PK\x03\x04 cut off"])
def test_files_that_cannot_be_read_are_refused(tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CrystalliteError, match="bad"):
        read_data(tmp_path / name, 4)


def test_an_array_without_a_name_is_refused(tmp_path):
    np.save(tmp_path / "bad.npy", np.zeros((4, 3), dtype=np.float32))
    with pytest.raises(CrystalliteError, match=r"bad\.npy: expected \.npz with named arrays, got one array"):
        read_data(tmp_path / "bad.npy", 4)


def test_a_missing_folder_is_refused(files, capsys):
    folder, _ = files
    assert command("model", folder / "nowhere", "--data", folder / "data.npz") == 2
    assert "expected a folder" in capsys.readouterr().err
