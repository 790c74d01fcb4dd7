"""Machines unlike this one: without numba, of the other byte order (without OpenMP: `core/test_parallel.py`)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from crystallite.core.compiling import COMPILES, REGISTER_BITS

if COMPILES:
    from numba.core.codegen import get_host_cpu_features

ROOT = Path(__file__).parents[1]
VERBS = """
import json, tempfile
import numpy as np, torch
from torch import nn
import crystallite as cx
from crystallite.core.compiling import COMPILES

torch.manual_seed(0)
rng = np.random.default_rng(0)
group = rng.integers(0, 3, 150)
w = rng.uniform(-0.06, 0.06, (150, 150)) + (group[:, None] == group) * rng.normal(0, 0.5, (150, 150))
w = w.astype(np.float32)
a = cx.anneal(w, null=cx.nulls.Uniform(0.06), correction="holm", rule="neyman")
s, d = cx.decompose(a.mask), cx.decompose(a.mask, kind="directed")
paper = cx.anneal(w)
levels = cx.level_profile(w)
border = w.copy()
border[group[:, None] != group] = 0
border[7] = 1
layers = [nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 8)]
with torch.no_grad():
    for layer in layers[:2]:
        layer.weight *= torch.block_diag(*[torch.ones([n // 2 for n in layer.weight.shape])] * 2)
model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.GELU(), layers[2]).eval()
x = torch.randn(600, 32)
blocks = cx.reorganize(model, level=None, only_if_faster=False)
small = cx.compress(model, x[:500], budget=0.6)
gru = nn.GRU(8, 12)
with torch.no_grad():
    gru.weight_hh_l0 *= torch.block_diag(torch.ones(6, 6), torch.ones(6, 6)).repeat(3, 1)
sequences = torch.randn(5, 2, 8)
with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
    again = cx.load(cx.save(blocks, folder + "/blocks"))
    found = {
        "compiles": COMPILES,
        "kept": int(a.mask.sum()), "threshold": float(np.max(a.threshold)), "paper": int(paper.mask.sum()),
        "blocks": [s.n_blocks, str(s), str(d)],
        "levels": [len(levels.thresholds), int(levels.n_blocks.sum()), int(levels.largest.sum())],
        "hubs": cx.hubs(border, threshold=0.01).hub_rows.tolist(),
        "table": cx.analyze(model).table(),
        "verdicts": [cx.validate(model, blocks, x[500:]).passed, str(cx.summary(blocks)).count("blocks")],
        "exact": [float((blocks(x) - model(x)).abs().max()), float((again(x) - blocks(x)).abs().max())],
        "fitted": float((small(x) - model(x)).norm() / model(x).norm()),
        "states": float((cx.BlockRecurrent.from_dense(gru)(sequences)[0] - gru(sequences)[0]).abs().max()),
    }
print(json.dumps(found))
"""


NARROW = """
import json
import torch
from torch import nn
import crystallite as cx
from crystallite.core.compiling import REGISTER_BITS
from crystallite.operators.conv import BlockConv
from crystallite.operators.linear import BlockLinear

torch.manual_seed(0)
errors = []
for dtype in (torch.float32, torch.float64):
    for outputs in (5, 8, 13):
        dense = nn.Linear(48, 3 * outputs, dtype=dtype)
        with torch.no_grad():
            dense.weight *= torch.block_diag(*[torch.ones(outputs, 16)] * 3)
        layer = BlockLinear.from_dense(dense.weight, dense.bias, cx.decompose(dense.weight.detach()))
        conv = nn.Conv2d(12, 3 * outputs, 3, padding=1, groups=3, dtype=dtype)
        for samples in (1, 5, 40):
            x, image = torch.randn(samples, 48, dtype=dtype), torch.randn(samples, 12, 7, 9, dtype=dtype)
            with torch.no_grad():
                errors += [float((layer(x) - dense(x)).abs().max())]
                errors += [float((BlockConv.from_dense(conv)(image) - conv(image)).abs().max())]
print(json.dumps({"bits": REGISTER_BITS, "error": max(errors)}))
"""


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=1800, cwd=ROOT,
        env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not COMPILES, reason="numba is not there: all tests run without it")
def test_the_verbs_give_the_same_without_numba():
    compiled, plain = run(VERBS), run(f"from tests.helpers.without_numba import forbid_numba\nforbid_numba()\n{VERBS}")
    assert (compiled.pop("compiles"), plain.pop("compiles")) == (True, False)
    for found in (compiled, plain):
        assert max(*found.pop("exact"), found.pop("states")) < 1e-5
    assert plain.pop("fitted") == pytest.approx(compiled.pop("fitted"), rel=0.02)
    assert plain.pop("threshold") == pytest.approx(compiled.pop("threshold"), rel=1e-9)
    assert plain == compiled
    assert plain["blocks"][0] == 3


@pytest.mark.skipif(REGISTER_BITS == 256, reason="registers are narrow: all tests run on such")
def test_kernels_without_wide_registers():
    features = [f for f in get_host_cpu_features().split(",") if "avx512" not in f]
    found = run(NARROW, NUMBA_CPU_FEATURES=",".join([*features, "-avx512f"]))
    assert found["bits"] == 256
    assert found["error"] < 1e-5


def test_big_endian_machines_are_refused_by_name():
    code = "import sys; sys.byteorder = 'big'; import crystallite"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert "ImportError: crystallite runs on little-endian machines only; this one is big-endian" in done.stderr
