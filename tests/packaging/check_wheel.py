"""Build sdist and wheel, and use the wheel in an environment that has nothing else: `check_wheel.py [EXTRA …]`.

The core is always tried; each extra in the same environment after it, so that torch is installed once.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = """
import sys, torch, crystallite as cx
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
with torch.no_grad():
    model[0].weight[:4, 4:] = model[0].weight[4:, :4] = 0
small = cx.reorganize(model, level=None, only_if_faster=False)
x = torch.randn(32, 8)
assert cx.validate(model, small, x).passed
assert torch.allclose(cx.load(cx.save(small, "small"))(x), small(x))
cx.report(model, "page.html", reorganized=small)
assert not {"transformers", "ray", "onnx", "pandas", "starlette", "PIL"} & {*sys.modules}
"""
USES = {
    "onnx": 'cx.export(small, "small.onnx", x)',
    "gguf": "import gguf",
    "hf": 'import transformers; transformers.AutoConfig.for_model("bert")',
    "pandas": "assert len(cx.analyze(model).to_pandas()) == 2",
    "serve": 'import crystallite.serving as s\nwith s.Service.load("small", unvalidated=True) as service, '
    "s.Listener(service, port=0) as listener: assert listener.url",
    "figures": 'cx.decompose(model[0].weight).plot().save("blocks.png")',
    "demo": "import sklearn",
    "ray": "import ray.serve",
}
KEPT = ("CHANGELOG.md", "docs/design.md", "README.md", "LICENSE", "tests/conftest.py")


def main(extras: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _run([sys.executable, "-m", "build", "--outdir", folder, str(ROOT)], folder)
        (wheel,), (sdist,) = Path(folder).glob("*.whl"), Path(folder).glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
        assert {*KEPT} <= names, f"the sdist lacks {sorted({*KEPT} - names)}"
        with zipfile.ZipFile(wheel) as archive:
            (page,) = (
                archive.read(name).decode() for name in archive.namelist() if name.endswith(".dist-info/METADATA")
            )
        lost = re.findall(r"\]\((?!https?:|#)[^)]*\)", page)
        assert "# crystallite" in page
        assert not lost, f"links that lead nowhere on a package index: {lost}"
        place = Path(folder) / "empty"
        venv.create(place, with_pip=True)
        python = place / "bin" / "python"
        for extra in ["", *extras]:
            wanted = f"{wheel}[{extra}]" if extra else str(wheel)
            pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            _run([*pip, "-c", str(ROOT / "constraints.txt"), wanted], folder)
            work = Path(folder) / f"work-{extra}"
            work.mkdir()
            _run([python, "-c", f"{CORE}\n{USES.get(extra, '')}"], work)
            _run([place / "bin" / "crystallite", "--help"], work)
            print(f"{extra or 'core'}: installed and used")


def _run(command: list[object], folder: Path | str) -> None:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([str(part) for part in command], cwd=folder, env=clean, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main(sys.argv[1:])
