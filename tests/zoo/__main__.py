"""python -m tests.zoo [--models PATTERN …] [--verbs VERB …] [--jobs 1] [--json FILE] [--write-docs]"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import tempfile
from pathlib import Path

from tests.zoo.models import ZOO
from tests.zoo.running import run_models
from tests.zoo.support_page import PAGE, page
from tests.zoo.tables import causes, known_outcomes, overview, store_outcomes
from tests.zoo.verbs import VERBS


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.zoo", description="Every verb on every model of the zoo.")
    parser.add_argument("--models", nargs="+", default=["*"], metavar="PATTERN", help="names of models, with wildcards")
    parser.add_argument("--verbs", nargs="+", default=list(VERBS), choices=list(VERBS), help="cells to run")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    parser.add_argument("--json", type=Path, help="write all outcomes there")
    parser.add_argument("--update", action="store_true", help="keep the other cells that the JSON file holds")
    parser.add_argument(
        "--write-docs",
        action="store_true",
        help="keep the outcomes in tests/zoo/outcomes.json, and write docs/support.md from it",
    )
    options = parser.parse_args()
    names = [
        name
        for name, entry in ZOO.items()
        if entry.is_available and any(fnmatch.fnmatch(name, pattern) for pattern in options.models)
    ]
    if not names:
        parser.error(f"no model matches {options.models}; there are {', '.join(ZOO)}")
    with tempfile.TemporaryDirectory() as folder:
        table = run_models(names, options.verbs, Path(folder), options.jobs, lambda line: print(line, file=sys.stderr))
    if options.json:
        if options.update and options.json.exists():
            old = json.loads(options.json.read_text())
            table = {name: old.get(name, {}) | table.get(name, {}) for name in ZOO if name in old or name in table}
        options.json.write_text(json.dumps(table, indent=1, ensure_ascii=False))
    if options.write_docs:
        store_outcomes(table)
        PAGE.write_text(page(known_outcomes(), ZOO))
    print(overview(table))
    print()
    print(causes(table))


if __name__ == "__main__":
    main()
