"""`python -m tests.helpers.killed VERB FOLDER SEED`: a verb killed at random moments, and then run to its end.

Its processes are forked. A moment is a number of events that Python's audit hooks see (files opened, made, renamed, …)
since the verb began, so that it is the same on a slow machine. Prints the hash of the resumed result, that of an
uninterrupted one, and after how many events each process was killed.
"""

import hashlib
import json
import os
import random
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import crystallite as cx
from crystallite.statistics import trainer

KILLS = 6
DATA = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


def digest(model):
    state = {name: value.detach().numpy().tobytes().hex() for name, value in sorted(model.state_dict().items())}
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()


def analyze(folder):
    found = cx.analyze(folder.parent / "w.pt", resume=folder / "done")
    return hashlib.sha256(json.dumps([row.to_json() for row in found.rows]).encode()).hexdigest()


def upgrade(folder):
    batches = [(x, x[:, :4].argmax(1)) for x in DATA.split(16)]
    options = {"blocks": 2, "epochs": 3, "level": 0.3, "loss": nn.functional.cross_entropy, "ignore": "4"}
    return digest(cx.upgrade(network(), data=batches, checkpoint=folder / "state", **options))


def compress(folder):
    return digest(cx.compress(network(), DATA, budget=0.6, polish_steps=8, checkpoint=folder / "state"))


def save(folder):
    """Each attempt after a kill finds no folder, or a whole one."""
    target = folder / "model"
    if not target.exists():
        small = cx.reorganize(network(), level=None, only_if_faster=False)
        layer = cx.LowRankLinear(nn.Linear(8, 2, bias=False), nn.Linear(2, 8))
        torch.manual_seed(1)
        for value in layer.parameters():
            nn.init.normal_(value)
        cx.save(nn.Sequential(layer, small), target)
    return digest(cx.load(target))


def report(folder):
    target = folder / "page.html"
    if not target.exists():
        cx.report(network(), target)
    return hashlib.sha256(target.read_bytes()[:200] + target.read_bytes()[-200:]).hexdigest()


def forked(verb, folder, after=None):
    """The result and the number of events of a process of its own; nothing if it was killed."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        events = 0

        def count(_event, _arguments):
            nonlocal events
            events += 1
            if events == after:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        result = verb(folder)
        os.write(writes, json.dumps([result, events]).encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    return json.loads(answer) if answer else None


def main():
    name, folder, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    trainer._SECONDS = 0.0  # a checkpoint after every batch
    torch.set_num_threads(1)
    torch.save({f"layer{i}.weight": torch.randn(12, 12) for i in range(8)}, folder / "w.pt")
    verb = globals()[name]
    whole, resumed = folder / "whole", folder / "resumed"
    for place in (folder / "first", whole, resumed):
        place.mkdir()
    verb(folder / "first")  # what is imported and compiled once is not what kills are about
    expected, events = forked(verb, whole)
    rng, killed = random.Random(seed), []
    while len(killed) < KILLS:
        after = rng.randrange(1, max(2, events))
        answer = forked(verb, resumed, after)
        if answer is not None:  # what was left took fewer events than that
            events = answer[1]
            break
        killed.append(after)
    found, _ = forked(verb, resumed)
    left = [path.name for path in resumed.rglob(".*")]
    print(json.dumps({"found": found, "expected": expected, "killed": killed, "left": left}))


if __name__ == "__main__":
    main()
