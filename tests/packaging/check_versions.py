"""Use the package with the oldest versions that it allows, and with the newest that can be had.

`check_versions.py [oldest | newest] [ARGUMENTS OF PYTEST]`: each in an environment of its own, by quick tests of every
room that leans on them. torch is a build for CPUs, as others bring gigabytes; where an index has none of the version
that is wanted, the pinned one is used, and that is said.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WANTED = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["hf"]]
PINNED = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.M)
TESTS = [
    "tests/core", "tests/structure", "tests/annealing/test_anneal.py", "tests/operators/test_linear.py",
    "tests/operators/test_recurrent.py", "tests/operators/test_devices.py", "tests/models/test_transformers_folder.py",
    "tests/reorganization/test_rewrite.py", "tests/compression/test_verbs.py", "tests/validation/test_validate.py",
]  # fmt: skip
FOR_TESTS = [
    "hypothesis", "networkx", "pandas", "pillow", "prometheus-client", "psutil", "pytest", "pyyaml", "scikit-learn",
]  # fmt: skip


def main() -> None:
    ends = {"oldest": [line.replace(">=", "==") for line in WANTED], "newest": WANTED}
    asked = [name for name in ends if name in sys.argv[1:]]
    words = [word for word in sys.argv[1:] if word not in ends]
    failed = []
    for name in asked or ends:
        versions = ends[name]
        with tempfile.TemporaryDirectory() as folder:
            venv.create(folder, with_pip=True)
            python = Path(folder) / "bin" / "python"
            pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade"]
            torch = next(line for line in versions if line.startswith("torch"))
            for_cpu = f"{torch}+cpu" if "==" in torch else "torch"
            if "==" not in torch or subprocess.run([*pip, for_cpu], cwd=ROOT, capture_output=True).returncode:
                print(f"{name}: no build of {torch} for CPUs to be sure of; {PINNED[0]} instead", flush=True)
                subprocess.run([*pip, PINNED[0]], cwd=ROOT, check=True)
            rest = [line for line in versions if not line.startswith("torch")]
            subprocess.run([*pip, *rest, *FOR_TESTS], cwd=ROOT, check=True)
            subprocess.run([*pip, "--no-deps", "-e", "."], cwd=ROOT, check=True)
            listed = subprocess.run([python, "-m", "pip", "freeze"], capture_output=True, text=True, check=True).stdout
            packages = "|".join(re.split("[>=]", line)[0] for line in WANTED)
            print(f"{name}:", *re.findall(rf"^(?:{packages})==\S+", listed, re.M), flush=True)
            options = ["-q", "-p", "no:cacheprovider", "-m", "not slow", "-o", "filterwarnings=default"]
            if subprocess.run([python, "-m", "pytest", *options, *words, *TESTS], cwd=ROOT).returncode:
                failed.append(name)
    if failed:
        sys.exit(f"failed with the {' and the '.join(failed)} versions")


if __name__ == "__main__":
    main()
