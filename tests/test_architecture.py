"""The tree is the architecture: imports go one way, and heavy optional packages only where they are adapted."""

import ast
from pathlib import Path

import pytest

import crystallite

SOURCE = Path(crystallite.__file__).parent
ORDER = [
    "errors",
    "options",
    "tables",
    "maps",
    "arrays",
    "parallel",
    "structure",
    "annealing",
    "discovery",
    "monitoring",
    "weights",
    "operators",
    "description",
    "analysis",
    "reorganization",
    "artifact",
    "opening",
    "validation",
    "serving",
    "upgrading",
    "refitting",
    "dispatch",
    "exporting",
    "baselines",
    "report",
    "demo_minilm",
    "demo",
    "cli",
]
ADAPTED_IN = {
    "peft": {"upgrading/lora.py"},
    "ray": {"analysis/ray_engine.py", "serving/ray_engine.py", "serving/ray_service.py"},
    "onnx": {"exporting.py", "refitting/int8_latency.py", "weights/onnx_file.py", "weights/onnx_wire.py"},
    "onnxruntime": {"baselines/onnx_runtime.py", "exporting.py", "refitting/int8_latency.py"},
    "onnxscript": {"exporting.py"},
    "google": {"serving/grpc_messages.py", "serving/grpc_service.py"},
    "grpc": {"serving/grpc_service.py"},
    "gguf": {"weights/gguf_file.py"},
    "PIL": {"report/drawing.py"},
    "sklearn": {"demo.py"},
    "starlette": {"serving/app.py"},
    "torch_pruning": {"baselines/torch_pruning.py"},
    "transformers": {"reorganization/huggingface.py", "monitoring/huggingface.py"},
    "uvicorn": {"serving/http_server.py"},
}


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_one_way(path):
    relative = path.relative_to(SOURCE)
    room = relative.parts[0].removesuffix(".py")
    if room in ("__init__", "__main__"):
        return
    for module in imports_of(path):
        parts = module.split(".")
        if parts[0] == "crystallite" and len(parts) > 1:
            assert ORDER.index(parts[1]) <= ORDER.index(room), f"{relative} imports {module}"
        elif parts[0] in ADAPTED_IN:
            assert str(relative) in ADAPTED_IN[parts[0]], f"{relative} imports {module}"


def test_weights_and_statistics_do_not_know_each_other():
    for path in (SOURCE / "weights").glob("*.py"):
        assert not [m for m in imports_of(path) if m.startswith(("crystallite.annealing", "crystallite.structure"))]


def test_no_file_is_two_rooms():
    long = {str(p.relative_to(SOURCE)): n for p in SOURCE.rglob("*.py") if (n := len(p.read_text().splitlines())) > 420}
    assert not long
