"""`python -m benchmarks [part …] [options of the last part]` runs the named parts, or all but those that take long."""

import sys
from functools import partial
from itertools import takewhile

from benchmarks import anneal, decoders, decompose, fitted, modularity, operators, recurrent, scale, serving, speed

PARTS = {part.__name__.rpartition(".")[2]: part.main for part in (decompose, anneal, operators, recurrent, scale)}
WITH_OPTIONS = {
    "decoders": decoders.main,
    "fitted": fitted.main,
    "modularity": modularity.main,
    "serving": serving.main,
    "speed": speed.main,
}
ONLY_WHEN_NAMED = {"scale", "decoders", "fitted", "modularity", "serving", "speed"}

named = list(takewhile(lambda argument: not argument.startswith("-"), sys.argv[1:]))
PARTS |= {name: partial(main, sys.argv[1 + len(named) :]) for name, main in WITH_OPTIONS.items()}
unknown = [n for n in named if n not in PARTS]
if unknown:
    sys.exit(f"unknown part {unknown[0]!r}; expected one of {', '.join(PARTS)}")
for name in named or [name for name in PARTS if name not in ONLY_WHEN_NAMED]:
    PARTS[name]()
