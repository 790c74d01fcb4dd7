"""The tree is the architecture: imports go one way, and heavy optional packages only where they are adapted."""

import ast
import re
from pathlib import Path

import pytest

import crystallite

SOURCE = Path(crystallite.__file__).parent
# Which rooms a room may import from, and no other; `docs/design.md` draws it. Whoever adds an edge adds it here, and
# says there why. An edge that nothing uses any more is taken out.
MAY_IMPORT = {
    "core": "",
    "structure": "core",
    "annealing": "core structure",
    "weights": "core",
    "analysis": "annealing core structure weights",
    "data": "core",
    "operators": "core structure",
    "models": "annealing core data operators weights",
    "graph": "core data models operators",
    "reorganization": "annealing core graph models operators structure weights",
    "statistics": "core data operators weights",
    "partitioning": "core data graph statistics structure",
    "discovery": "core data models partitioning",
    "monitoring": "annealing core discovery partitioning structure",
    "separation": "annealing core data discovery graph models operators partitioning reorganization statistics "
    "structure",
    "compression": "core data graph models operators partitioning reorganization statistics structure",
    "validation": "annealing core data models operators reorganization",
    "export": "core data models operators weights",
    "serving": "core data models operators reorganization validation",
    "baselines": "compression core data export graph models operators statistics validation",
    "report": "analysis annealing core models reorganization structure weights",
    "demo": "analysis baselines compression core models report separation serving structure validation",
    "cli": "analysis baselines compression core data demo discovery export models reorganization report separation "
    "serving validation",
}
ADAPTED_IN = {
    "peft": {"separation/lora.py"},
    "ray": {
        "compression/decoders/ray_engine.py",
        "core/ray_cluster.py",
        "serving/ray_engine.py",
        "serving/ray_service.py",
    },
    "onnx": {
        "export/int8.py",
        "export/weight_only.py",
        "compression/int8_latency.py",
        "weights/onnx_file.py",
        "weights/onnx_wire.py",
    },
    "onnxruntime": {
        "baselines/onnx_runtime.py",
        "export/int8.py",
        "export/onnx.py",
        "export/weight_only.py",
        "compression/int8_latency.py",
    },
    "onnxscript": {"export/experts.py", "export/onnx.py", "export/recurrent.py"},
    "google": {"serving/grpc_messages.py", "serving/grpc_service.py"},
    "grpc": {"serving/grpc_service.py"},
    "gguf": {"export/gguf.py", "export/vocabulary.py", "weights/gguf_file.py"},
    "PIL": {"core/drawing.py", "data/images.py"},
    "prometheus_client": {"serving/metrics.py"},
    "sklearn": {"demo/digits.py"},
    "starlette": {"serving/app.py"},
    "tokenizers": {"export/gguf.py", "export/vocabulary.py"},
    "torch_pruning": {"baselines/torch_pruning.py"},
    "transformers": {"data/images.py", "data/text.py", "models/transformers_folder.py", "monitoring/huggingface.py"},
    "uvicorn": {"serving/http_server.py"},
}


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def rooms_of(path):
    for module in imports_of(path):
        parts = module.split(".")
        if parts[0] == "crystallite" and len(parts) > 1:
            yield parts[1], module


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_keep_to_the_graph(path):
    relative = path.relative_to(SOURCE)
    room = relative.parts[0].removesuffix(".py")
    for module in imports_of(path):
        if module.partition(".")[0] in ADAPTED_IN:
            assert str(relative) in ADAPTED_IN[module.partition(".")[0]], f"{relative} imports {module}"
    if room not in ("__init__", "__main__"):
        for other, module in rooms_of(path):
            assert other == room or other in MAY_IMPORT[room].split(), f"{relative} imports {module}"


def test_every_edge_of_the_graph_is_used_and_none_goes_back():
    before = set()
    for room, others in MAY_IMPORT.items():
        used = {other for path in (SOURCE / room).rglob("*.py") for other, _ in rooms_of(path)} - {room}
        assert used == set(others.split()), room
        assert set(others.split()) <= before, room
        before.add(room)
    assert before == {path.parent.name for path in SOURCE.glob("*/__init__.py")}


def test_weights_and_statistics_do_not_know_each_other():
    for path in (SOURCE / "weights").glob("*.py"):
        assert not [m for m in imports_of(path) if m.startswith(("crystallite.annealing", "crystallite.structure"))]


def test_no_file_is_two_rooms():
    long = {str(p.relative_to(SOURCE)): n for p in SOURCE.rglob("*.py") if (n := len(p.read_text().splitlines())) > 420}
    assert not long


@pytest.mark.parametrize("folder", ["tests", "benchmarks"])
def test_test_files_are_not_imported(folder):
    """What several test files share is in tests/helpers; benchmarks share nothing with tests."""
    allowed = ("tests.helpers", "tests.zoo") if folder == "tests" else ()
    for path in (Path(__file__).parents[1] / folder).rglob("*.py"):
        if "node_modules" not in path.parts:
            others = [m for m in imports_of(path) if m.split(".")[0] == "tests" and not m.startswith(allowed)]
            assert not others, f"{path.name} imports {others}"


def test_the_graph_is_drawn_in_the_design():
    text = (Path(__file__).parents[1] / "docs" / "design.md").read_text()
    drawn = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE))
    assert drawn == {room: ", ".join(others.split()) or "–" for room, others in MAY_IMPORT.items()}


def test_every_file_that_the_design_names_is_there():
    text = (Path(__file__).parents[1] / "docs" / "design.md").read_text()
    flows = text.partition("## What a verb passes through")[2].partition("Values between stages")[0]
    for file in re.findall(r"\b(?:[a-z_]+/)+[a-z_]+\b", flows):
        assert (SOURCE / f"{file}.py").exists(), file
