"""`python -m benchmarks [part …]` runs the named parts, or all but those that take minutes and gigabytes of disk."""

import sys

from benchmarks import anneal, decompose, operators, recurrent, scale

PARTS = {part.__name__.rpartition(".")[2]: part.main for part in (decompose, anneal, operators, recurrent, scale)}
ONLY_WHEN_NAMED = {"scale"}

names = sys.argv[1:] or [name for name in PARTS if name not in ONLY_WHEN_NAMED]
unknown = [n for n in names if n not in PARTS]
if unknown:
    sys.exit(f"unknown part {unknown[0]!r}; expected one of {', '.join(PARTS)}")
for name in names:
    PARTS[name]()
