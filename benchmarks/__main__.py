"""`python -m benchmarks [part …]` runs the named parts, or all of them."""

import sys

from benchmarks import anneal, decompose

PARTS = {"decompose": decompose.main, "anneal": anneal.main}

names = sys.argv[1:] or list(PARTS)
unknown = [n for n in names if n not in PARTS]
if unknown:
    sys.exit(f"unknown part {unknown[0]!r}; expected one of {', '.join(PARTS)}")
for name in names:
    PARTS[name]()
