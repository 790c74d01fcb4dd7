"""Every example runs as it is, and prints what its documentation promises."""

import ast
import importlib.util
import io
import json
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from benchmarks.namespace import NAMESPACE

EXAMPLES = Path(__file__).parents[1] / "examples"
PRINTS = {  # what a run says
    "mlp": ["PASSED on 597 samples", "served: ["],
    "cnn": ["PASSED on 597 samples", "small.onnx: "],
    "gru": ["PASSED on 597 samples", "4 SCCs in 4 blocks", "largest difference: "],
    "minilm": ["PASSED on ", "opened again by transformers; largest difference: 0.0\n"],
    "language_model": ["PASSED on ", "intermediate size: 192 → 128"],
    "training_monitor": ["step 500: 2 modules", "as two networks"],
    "paper_examples": ["12×12: 3 blocks", "18 nodes: 9 SCCs"],
    "ray_service": ["PASSED on 200 samples", "Ray is not installed: pip install 'crystallite[ray]'"],
}


def printed(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    out = io.StringIO()
    with redirect_stdout(out):
        example.main()
    return out.getvalue()


def test_all_are_run_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == PRINTS.keys()


@pytest.mark.parametrize("name", PRINTS)
def test_it_runs(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    if name in ("minilm", "language_model"):
        pytest.importorskip("transformers")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda module, *rest: None if module == "ray" else find(module, *rest)
    )
    said = printed(name)
    assert [words for words in PRINTS[name] if words not in said] == []
    assert not list(tmp_path.iterdir())  # nothing is left behind


@pytest.mark.slow
def test_the_service_runs_on_ray():
    """In a namespace with nothing but loopback, as Ray listens everywhere."""
    pytest.importorskip("ray")
    if shutil.which("unshare") is None or subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("Ray is tested in a namespace of its own, which `unshare` may not make here")
    code = "import runpy, sys; from benchmarks.namespace import bring_loopback_up; bring_loopback_up(); "
    code += "runpy.run_path(sys.argv[1], run_name='__main__')"
    words = [*NAMESPACE, sys.executable, "-c", code, str(EXAMPLES / "ray_service.py")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1800, cwd=EXAMPLES.parent)
    assert done.returncode == 0, done.stderr
    assert "largest difference: " in done.stdout


def test_the_notebook_runs_and_was_run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    cells = [c for c in json.loads((EXAMPLES / "first_hour.ipynb").read_text())["cells"] if c["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    known = {}
    for cell in cells:
        assert not any(output["output_type"] == "error" for output in cell["outputs"])
        body = ast.parse("".join(cell["source"])).body
        shown = ast.Expression(body.pop().value) if isinstance(body[-1], ast.Expr) else None
        with redirect_stdout(io.StringIO()):
            exec(compile(ast.Module(body, []), "first_hour.ipynb", "exec"), known)
            value = None if shown is None else eval(compile(shown, "first_hour.ipynb", "eval"), known)
        if value is not None:  # what is shown was shown
            (result,) = [output for output in cell["outputs"] if output["output_type"] == "execute_result"]
            assert ("text/html" in result["data"]) == hasattr(value, "_repr_html_")
