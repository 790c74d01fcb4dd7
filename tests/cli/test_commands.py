"""The table of commands says what the functions say, and what the user gives arrives, or is refused by name."""

import argparse
import inspect
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

from crystallite.annealing.neyman import CORRECTIONS
from crystallite.annealing.random_walk import METHODS
from crystallite.baselines.compare import LIKENESS
from crystallite.cli import main as main_module
from crystallite.cli.commands import COMMANDS
from crystallite.cli.completion import script
from crystallite.cli.main import main
from crystallite.cli.options import imported
from crystallite.compression.compress import OBJECTIVES
from crystallite.compression.guarantee import RISKS
from crystallite.export.gguf import TYPES as GGUF_TYPES
from crystallite.export.onnx import TYPES as ONNX_TYPES
from crystallite.validation.metrics import METRICS

# what only code can pass, or what a command passes itself
IN_PYTHON = {
    "analyze": {"progress"},
    "reorganize": {"example", "progress"},
    "compress": {"progress"},
    "validate": {"layers", "slices"},
    "upgrade": {"data", "held_out", "loss", "metric", "modules", "null", "progress"},
    "export": set(),
    "report": {"progress", "sweep"},
}
OPTIONS = [(c, o) for c in COMMANDS.values() for o in c.options]


def signatures(command):
    return [inspect.signature(imported(path)).parameters for path in command.functions]


@pytest.mark.parametrize(("command", "option"), OPTIONS, ids=lambda x: getattr(x, "name", ""))
def test_options_are_the_keywords_of_the_functions(command, option):
    if option.own:
        assert option.default is None or option.takes == "nothing" or option.described.endswith(")")
        return
    found = [names[option.name] for names in signatures(command) if option.name in names]
    assert found, f"{command.name} {option.word}: no such keyword"
    for keyword in found:
        expected = keyword.default if keyword.default is not inspect.Parameter.empty else None
        assert option.default == expected, f"{command.name} {option.word}"
        assert type(option.default) is type(expected)


@pytest.mark.parametrize("name", IN_PYTHON)
def test_no_keyword_is_forgotten(name):
    keywords = {n for n, p in signatures(COMMANDS[name])[0].items() if p.kind is p.KEYWORD_ONLY}
    assert keywords - {option.name for option in COMMANDS[name].options if not option.own} == IN_PYTHON[name]


def test_choices_are_those_of_the_functions():
    choices = {(c.name, o.name): o.choices for c, o in OPTIONS if o.choices}
    for command in ("analyze", "reorganize", "report"):
        assert choices[command, "correction"] == tuple(filter(None, CORRECTIONS))
        assert choices[command, "random_walk"] == METHODS
    assert choices["compress", "objective"] == OBJECTIVES
    assert choices["export", "type"] == GGUF_TYPES
    assert set(ONNX_TYPES) < set(GGUF_TYPES)
    assert choices["compress", "risk"] == tuple(RISKS)
    assert choices["validate", "metric"] == tuple(METRICS)
    assert choices["bench", "metric"] == tuple(sorted([*METRICS, *LIKENESS]))


@pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda c: c.name)
def test_the_table_refers_to_itself_correctly(command):
    words = [option.word for option in command.options]
    assert len(set(words)) == len(words)
    for option in command.options:
        assert {option.needs, *option.excludes} <= {"", *words}
        assert option.help[0].islower() or option.help.startswith("JSON")
        assert not option.help.startswith(("of ", "that ", "(", "its "))
    assert set(command.one_of) <= set(words)
    assert callable(imported(command.run))
    assert f"crystallite {command.name} " in command.example


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert f"example:\n  crystallite {command}" in capsys.readouterr().out


def test_what_was_not_given_is_not_passed_on(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(main_module, "imported", lambda path: lambda own, given: seen.append((own, given)) or 0)
    out, data = str(tmp_path / "small"), tmp_path / "data.npz"
    data.touch()
    assert main(["reorganize", "model", "--out", out]) == 0
    assert main(["reorganize", "model", "--out", out, "--level", "0.01", "--ignore", "a", "--ignore", "b"]) == 0
    assert main(["reorganize", "model", "--out", out, "--as-it-is", "--even-if-slower"]) == 0
    assert main(["compress", "model", "--out", out, "--calibration", str(data), "--blocks", "2", "--joint"]) == 0
    assert [given for _, given in seen] == [
        {},
        {"level": 0.01, "ignore": ["a", "b"]},
        {"level": None, "only_if_faster": False},
        {"blocks": 2, "joint": True},
    ]
    assert seen[-1][0].batch == 64
    assert isinstance(seen[-1][0], argparse.Namespace)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("reorganize m --out small --level 0.1 --as-it-is", "--as-it-is and --level do not go together"),
        ("compress m --out small --calibration x.npz --budget 0.5 --blocks 2", "got --budget and --blocks"),
        ("compress m --out small --calibration x.npz --budget 0.5 --confidence 0.9", "--confidence needs --tolerance"),
        ("compress m --out small --calibration x.npz --budget 0.5 --joint", "--joint needs --blocks"),
        ("compress m --out small --calibration x.npz --blocks 2 --objective int8", "--objective and --blocks do not"),
        ("compress m --out small --calibration y.npz --budget 0.5", "y.npz: no such file"),
        ("compress m --out taken --calibration x.npz --budget 0.5", "taken: exists already"),
        ("validate a b --data x.npz --max-drop 0.1", "--max-drop needs --metric"),
        ("upgrade m --out small --data x.npz", "exactly one of --blocks, --modules; got none of them"),
        ("upgrade m --out small --data x.npz --modules --partition random", "--partition and --modules do not"),
        ("export m x.onnx --max-deviation 0.5", "--max-deviation needs --data"),
        ("export m x.onnx --data x.npz --int8 --type q4_0", "--int8 and --type do not go together"),
        ("serve small --plan --port 80", "--plan and --port do not go together"),
        ("serve small --json", "--json needs --plan"),
        ("bench --baselines m --clients 3", "--clients needs --serve"),
        ("report x.npz --format png", "--format needs --figures"),
    ],
)
def test_options_that_do_not_go_together_name_each_other(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.npz").touch()
    (tmp_path / "taken").mkdir()
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"crystallite: {message}") or message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["analyse", "x"], "did you mean analyze?"),
        (["analyze", "x", "--levle", "0.1"], "unrecognized arguments: --levle 0.1; did you mean --level?"),
        (["analyze", "x", "--rule", "nyman"], "did you mean neyman?"),
        (["analyze", "x", "--lev", "0.1"], "unrecognized arguments"),
        (["analyze"], "required: PATH"),
    ],
)
def test_bad_arguments_are_one_line_that_names_the_nearest(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("crystallite: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "said", "expected"),
    [
        (
            "compress",
            "checkpoint= keeps the state: pass polish_steps= too",
            "--checkpoint keeps the state: pass --polish-steps too",
        ),
        ("compress", "joint=True needs blocks=: the number", "--joint needs --blocks: the number"),
        ("compress", "got budget=0.5, blocks=2", "got --budget 0.5, --blocks 2"),
        ("analyze", 'rule="both" needs the test; pass rule="neyman"', "--rule both needs the test; pass --rule neyman"),
        ("serve", "max_batch: expected at least 1", "--max-batch: expected at least 1"),
        ("analyze", "level must be a number", "--level must be a number"),
        ("analyze", "runs/level=3/a.npz: no such level", "runs/level=3/a.npz: no such level"),
        ("completion", "a=b", "a=b"),
    ],
)
def test_errors_speak_the_words_of_the_command_line(command, said, expected):
    assert COMMANDS[command].reworded(said) == expected


def completed(*words):
    """What bash offers for the last of the words."""
    asked = " ".join(f"'{word}'" for word in words)
    code = f"{script('bash')}\nCOMP_WORDS=({asked}); COMP_CWORD={len(words) - 1}; _crystallite; echo ${{COMPREPLY[*]}}"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_completion(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert completed("crystallite", "re") == ["reorganize", "report"]
    assert completed("crystallite", "compress", "--b") == ["--batch", "--budget", "--blocks"]
    assert completed("crystallite", "compress", "m", "--objective", "") == ["macs", "parameters", "latency", "int8"]
    assert completed("crystallite", "analyze", "mod") == ["model.safetensors"]
    assert completed("crystallite", "completion", "") == ["bash", "zsh"]
    for name, command in COMMANDS.items():
        flags = {option.word for option in command.options if not option.positional}
        assert set(completed("crystallite", name, "-")) == {*flags, "--help"}


FILE = """
from dataclasses import dataclass
from layers_beside_it import linear

@dataclass
class Shape:
    width: "int" = 16

def build():
    return linear(Shape().width)

def late():
    import imported_when_called
    return imported_when_called.linear(8)

def broken():
    raise RuntimeError("no data")
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file that builds models, in a folder that is not the current one."""
    folder = tmp_path / "my models"
    folder.mkdir()
    (folder / "net-v2.py").write_text(FILE)
    for name in ("layers_beside_it", "imported_when_called"):
        (folder / f"{name}.py").write_text(
            "from torch import nn\ndef linear(n): return nn.Sequential(nn.Linear(n, n))\n"
        )
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    return "my models/net-v2.py"


@pytest.mark.parametrize("factory", ["build", "late"])
def test_a_model_from_a_file(file, factory, capsys):
    before = list(sys.path)
    words = ["--out", "small", "--as-it-is"]
    assert main(["reorganize", f"{file}:{factory}", *words]) == 1  # a dense layer is one block
    out = capsys.readouterr().out
    assert "Nothing saved" in out
    assert f"{file}:{factory}: weights as the factory returned them; pass --weights FILE for trained ones" in out
    assert sys.path == before


def test_weights_that_were_given_need_no_note(file, tmp_path, capsys):
    torch.save(nn.Sequential(nn.Linear(16, 16)).state_dict(), tmp_path / "weights.pt")
    assert main(["reorganize", f"{file}:build", "--out", "small", "--weights", "weights.pt", "--json"]) == 1
    captured = capsys.readouterr()
    assert "as the factory" not in captured.out + captured.err
    assert main(["reorganize", f"{file}:build", "--out", "small", "--json"]) == 1
    assert "as the factory returned them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("{}:broken", "RuntimeError: no data"),
        ("{}:missing", "AttributeError: there is no missing in"),
        ("{}:biuld", ".py; did you mean 'build'?"),
        ("{}:", "file.py:factory"),
        ("nowhere.py:build", "no file nowhere.py"),
    ],
)
def test_bad_files_are_one_line(file, model, message, capsys):
    before = list(sys.path)
    assert main(["reorganize", model.format(file), "--out", "small"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert sys.path == before
