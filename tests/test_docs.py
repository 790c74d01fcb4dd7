"""What README and docs show is what happens: every block of Python is run, every command is parsed, in order."""

import argparse
import ast
import contextlib
import importlib
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from benchmarks.namespace import NAMESPACE
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import crystallite as cx
from crystallite.cli.main import main
from crystallite.core import errors
from crystallite.serving import Listener, Service
from tests.helpers.artifacts import network, saved
from tests.helpers.block_models import keep_, labels, mask
from tests.helpers.compressible import repeated

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A block that needs more has <!-- not run: reason --> on the line before it, is listed here, and has a slow test below.
NOT_RUN = {("ray.md", "needs a Ray cluster")}
BLOCK = re.compile(r"(?:<!-- not run: (?P<reason>[^\n]*) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
COMMANDS = ("crystallite", "make", "python")


def blocks(page):
    """(kind, text, why it is not run or None) of all blocks of a page."""
    return [(found["kind"], found["text"], found["reason"]) for found in BLOCK.finditer(page.read_text())]


def compressed_page(folder):
    x = torch.randn(3000, 20)
    return {"cx": cx, "model": repeated().eval(), "batches": list(x[:2500].split(500)), "held_out": [x[2500:]]}


@contextlib.contextmanager
def served_page(folder):
    x = np.random.default_rng(0).standard_normal((5, 12)).astype(np.float32)
    path = saved(network(), folder / "small")
    tiny = pytest.importorskip("tests.helpers.text_models", reason="needs transformers")
    tiny.language_model(folder / "MiniLM", "BertModel")
    ids = torch.randint(1, 9, (2, 5))
    given = {"x": x, "ids": ids, "mask": torch.ones_like(ids)}
    with Service.load(path) as service, Listener(service, port=0, grpc_port=0) as listener:
        yield given, {"port=8000, grpc_port=8001": "port=0, grpc_port=0", "127.0.0.1:8001": listener.grpc_target}


class Learned(nn.Module):
    """Layers in code of their own, which stay single layers."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleDict({"dense": nn.Linear(16, 32), "output": nn.Linear(32, 16)})
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(torch.relu(self.encoder["output"](torch.relu(self.encoder["dense"](x)))))


def upgraded_page(folder):
    """A network of two parts from its inputs to its outputs."""
    peft = pytest.importorskip("peft", reason="needs peft")
    torch.manual_seed(0)
    model = Learned().eval()
    sizes = (16, 32, 16, 4)
    layers = (*model.encoder.values(), model.head)
    for layer, inputs, outputs in zip(layers, sizes[:-1], sizes[1:], strict=True):
        keep_(layer.weight, mask(labels(outputs, 2, outputs), labels(inputs, 2, inputs)))
        layer.weight.data.mul_(3)
    x = torch.randn(800, 16)
    y = model(x).argmax(1)
    loader = DataLoader(TensorDataset(x, y), 100)
    return {"cx": cx, "model": model, "loader": loader, "batches": list(x.split(200)), "peft": peft,
            "F": nn.functional, "loss": nn.functional.cross_entropy}  # fmt: skip


def gguf_page(folder):
    """A decoder that was opened from a folder with its tokenizer."""
    pytest.importorskip("gguf", reason="needs gguf")
    tiny = pytest.importorskip("tests.helpers.tiny_decoders", reason="needs transformers")
    tiny.decoder().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return {"cx": cx, "small": tiny.transformers.AutoModelForCausalLM.from_pretrained(folder)}


def text_page(folder):
    """A decoder in a folder with its tokenizer, and two files of text."""
    tiny = pytest.importorskip("tests.helpers.text_models", reason="needs transformers")
    tiny.language_model(folder / "my-hf-model")
    (folder / "prose.txt").write_text(tiny.prose(2000))
    (folder / "code.txt").write_text(tiny.prose(900, seed=1))
    return {}


# What the text of a page says that the reader has.
GIVEN = {
    "README.md": compressed_page,
    "compression.md": compressed_page,
    "gguf.md": gguf_page,
    "serving.md": served_page,
    "upgrading.md": upgraded_page,
    "your_data.md": text_page,
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_runs_and_prints_what_follows_it(page, tmp_path, monkeypatch):
    found = blocks(page)
    if not any(kind == "python" and reason is None for kind, _, reason in found):
        return
    monkeypatch.chdir(tmp_path)
    given, changes = GIVEN.get(page.name, lambda folder: {})(tmp_path), {}
    with contextlib.ExitStack() as stack:
        if not isinstance(given, dict):
            given, changes = stack.enter_context(given)
        for (kind, text, reason), (following, expected, _) in zip(found, [*found[1:], ("", "", None)], strict=True):
            if kind != "python" or reason is not None:
                continue
            for written, here in changes.items():
                text = text.replace(written, here)
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(text, page.name, "exec"), given)
            if page.name == "README.md" and following == "" and not expected.startswith(COMMANDS):
                assert printed.getvalue() == expected


@pytest.mark.slow
def test_python_that_needs_a_cluster_runs(tmp_path):
    """In a namespace with nothing but loopback, as Ray listens everywhere."""
    pytest.importorskip("ray")
    if shutil.which("unshare") is None or subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("Ray is tested in a namespace of its own, which `unshare` may not make here")
    saved(network(), tmp_path / "small")
    texts = [text for kind, text, reason in blocks(ROOT / "docs" / "ray.md") if kind == "python" and reason]
    code = "from benchmarks.namespace import bring_loopback_up; bring_loopback_up()\nimport os, numpy as np\n"
    code += f"os.chdir({str(tmp_path)!r})\nx = np.zeros((5, 12), np.float32)\n" + "\n".join(texts) + "\nprint(y.shape)"
    words = [*NAMESPACE, sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1800, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "http://127.0.0.1:" in done.stdout


class Parsed(Exception):
    """The command line was understood; nothing else is wanted."""


def commands():
    for page in PAGES:
        for kind, text, reason in blocks(page):
            if kind == "" and reason is None:
                for line in text.splitlines():
                    for part in line.removeprefix("$ ").split(" && "):
                        if (words := part.split()) and words[0] in COMMANDS:
                            yield pytest.param(shlex.split(part, comments=True), id=f"{page.name}: {part[:60]}")


@pytest.mark.parametrize("words", list(commands()))
def test_commands_are_understood(words, monkeypatch):
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[:2] == ["python", "-c"]:
        for node in ast.walk(ast.parse(words[2])):  # what it imports is there; other tests run it
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names)
    elif words[0] == "python":
        assert (ROOT / (f"benchmarks/{words[3]}.py" if words[1:3] == ["-m", "benchmarks"] else words[1])).is_file()
    else:
        parse = argparse.ArgumentParser.parse_args

        def parse_only(self, arguments=None, namespace=None):
            parse(self, arguments, namespace)
            raise Parsed

        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
        with pytest.raises(Parsed):
            main(words[1:])


def test_commands_of_figures_exist():
    """`python -m benchmarks part` and `python -m benchmarks.module` in running text."""
    parts = (ROOT / "benchmarks" / "__main__.py").read_text()
    for page in PAGES:
        for part, module in re.findall(r"python -m benchmarks(?: (\w+)|([.][\w.]+))", page.read_text()):
            if module:
                assert (ROOT / f"benchmarks{module.replace('.', '/')}.py").is_file(), f"{page.name}: {module}"
            else:
                assert re.search(rf"\b{part}\b", parts) or part == "PART", f"{page.name}: {part}"


def test_json_is_json():
    for page in PAGES:
        for kind, text, _ in blocks(page):
            if kind == "json":
                json.loads(text)


def test_what_is_not_run_is_listed():
    assert {(page.name, reason) for page in PAGES for *_, reason in blocks(page) if reason} == NOT_RUN


def anchors(page):
    """What a link may name behind #, as Python-Markdown makes it of headings, and the objects of an API page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    found = set(re.findall(r"^::: (\S+)", text, re.M))
    for heading in re.findall(r"^#+ (.*)", text, re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        plain = unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode()
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        there = page.parent / target if target else page
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there), f"{target}#{anchor}"


def test_every_page_is_in_the_navigation():
    def pages(nav):
        for entry in nav:
            for value in entry.values() if isinstance(entry, dict) else [entry]:
                yield from pages(value) if isinstance(value, list) else [value]

    listed = list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(listed) == [str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]]


def test_every_public_name_is_in_the_reference():
    shown = {
        name
        for page in (ROOT / "docs" / "api").glob("*.md")
        for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)
    }
    places = {"crystallite.annealing.nulls", "crystallite.baselines.compare", "crystallite.core.errors"}
    assert places < shown
    for name in shown - places:
        module, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(module), last), name
    last_parts = {name.rpartition(".")[2] for name in shown}
    rest = {name for name in cx.__all__ if name not in last_parts and not hasattr(errors, name)}
    assert rest == {"baselines"}
