"""Plain text on the command line: compress, validate, upgrade with the tokenizer of the model's folder."""

import json

import numpy as np
import pytest
import torch

import crystallite as cx
from crystallite.cli.main import main
from crystallite.data.calibration import Calibration
from crystallite.models.manifest import read_manifest
from tests.helpers.text_models import language_model, prose, word_tokenizer


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    language_model(tmp_path / "model")
    (tmp_path / "a.txt").write_text(prose(2000))
    (tmp_path / "b.txt").write_text(prose(900, seed=1))
    return tmp_path


def test_compress_and_validate_a_decoder_by_text(folder, capsys):
    words = "compress model --out small --budget 0.8 --calibration a.txt --calibration b.txt --length 16 --tokens 1024"
    assert main(words.split()) == 0
    said = capsys.readouterr().err
    assert "a.txt, b.txt: 64 windows of 16 tokens, 1,024 tokens" in said
    assert read_manifest(folder / "small")["metadata"]["calibration"] == "a.txt, b.txt"
    words = "validate model small --data b.txt --metric perplexity --json --max-drop"
    assert main([*words.split(), "0.5"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metric"]["name"] == "perplexity"
    assert 20 < found["metric"]["values"][0] < 80  # 43 tokens by chance
    assert found["rules"]["max_relative_deviation"] is None
    assert main([*words.split(), "0", "--max-relative-deviation", "1e-9"]) == 1
    rules = {o["rule"]: o["status"] for o in json.loads(capsys.readouterr().out)["outcomes"]}
    assert rules["max_relative_deviation"] == "violated"


def test_an_encoder_is_judged_by_what_halves_of_paragraphs_find(folder, capsys):
    language_model(folder / "encoder", "BertModel")
    words = "compress encoder --out same --budget 0.9 --calibration a.txt --length 16"
    assert main(words.split()) == 0
    capsys.readouterr()
    words = "validate encoder same --data b.txt --metric retrieval --max-drop 0.4 --max-relative-deviation none --json"
    assert main(words.split()) == 0
    said = capsys.readouterr()
    assert "b.txt: 200 texts of up to 5 tokens" in said.err
    found = json.loads(said.out)
    assert found["metric"]["name"] == "retrieval"
    mixed = {name for name, why in found["skipped_layers"].items() if "in each attention head" in why}
    assert {name.rpartition(".")[2] for name in mixed} == {"query", "key", "value"}
    words = "validate model same --data b.txt --metric retrieval"
    assert main(words.split()) == 2
    assert "a causal language model reads windows" in capsys.readouterr().err


def test_an_encoder_is_fitted_to_general_text_as_well(folder, capsys, monkeypatch):
    monkeypatch.setattr("crystallite.data.files.general_text", lambda: prose(800, seed=2))
    language_model(folder / "encoder", "BertModel")
    words = "compress encoder --out small --budget 0.9 --calibration a.txt --length 16 --general-text"
    assert main(words.split()) == 0
    assert "a.txt, 1 text: " in capsys.readouterr().err
    assert read_manifest(folder / "small")["metadata"]["calibration"] == "a.txt, general text"
    np.savez(folder / "a.npz", input_ids=np.ones((4, 8), np.int64))
    assert main([*words.replace("a.txt", "a.npz").replace("small", "none").replace("--length 16", "").split()]) == 2
    assert "--general-text takes turns with text, and a.npz holds arrays" in capsys.readouterr().err


def test_a_decoder_is_fitted_to_general_text_and_to_its_own_as_well(folder, capsys, monkeypatch):
    monkeypatch.setattr("crystallite.data.files.general_text", lambda: "w7 " * 800)
    taken = []

    def take(data, *_):
        taken.extend(batch["input_ids"] for batch in data)
        raise cx.InvalidOption("that is all")

    monkeypatch.setattr(Calibration, "read", take)
    words = "compress model --out small --budget 0.8 --calibration a.txt --length 16 --tokens 1024 --own-text 512"
    assert main([*words.split(), "--general-text"]) == 2
    assert "a.txt, 1 text: 64 windows of 16 tokens" in capsys.readouterr().err
    windows = torch.cat(taken)
    general = (windows == word_tokenizer()("w7")["input_ids"][0]).all(1)
    given = torch.tensor(word_tokenizer()(prose(2000))["input_ids"])
    theirs = torch.tensor([bool((given.unfold(0, 16, 1) == window).all(1).any()) for window in windows])
    assert (len(windows), int(general.sum()), int(theirs.sum())) == (96, 32, 32)


def test_an_encoder_is_upgraded_with_paragraphs(folder, capsys):
    language_model(folder / "encoder", "BertModel")
    words = "upgrade encoder --out small --data b.txt --blocks 2 --loss match --epochs 1 --learning-rate 1e-3"
    assert main([*words.split(), "--targets", "*.0.intermediate.dense", "--targets", "*.0.output.dense"]) == 0
    assert "b.txt: 100 texts of up to 9 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--calibration empty.txt", "empty.txt: expected text, but there is none in it"),
        ("--calibration short.txt", "short.txt: 9 tokens, which is 0 windows of 32; at least 2 (64 tokens) are needed"),
        ("--calibration binary.bin", "binary.bin: expected text in UTF-8"),
        ("--calibration x.npz --calibration a.txt", "x.npz: expected one file of arrays, or several of text"),
        ("--calibration x.npz --length 8", "--length is that of text"),
        ("--calibration a.txt --length 99", "--length: the model takes at most 32 tokens, got 99"),
        ("--calibration a.txt --calibration none.txt", "none.txt: no such file"),
    ],
)
def test_bad_text_is_one_line_before_the_work(folder, words, message, capsys, monkeypatch):
    monkeypatch.setattr("crystallite.cli.reorganize.open_dense", lambda *_: pytest.fail("the model was opened"))
    (folder / "empty.txt").touch()
    (folder / "short.txt").write_text(prose(9))
    (folder / "binary.bin").write_bytes(bytes(range(256)))
    np.savez(folder / "x.npz", input_ids=np.ones((4, 4), int))
    assert main(["compress", "model", "--out", "small", "--budget", "0.5", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"crystallite: {message}")
    assert error.count("\n") == 1


def test_a_model_without_a_folder_needs_arrays(folder, capsys):
    assert main(["compress", "torch.nn:Identity", "--out", "s", "--budget", "0.5", "--calibration", "a.txt"]) == 2
    assert "text needs a tokenizer" in capsys.readouterr().err
