"""A model of each of the paper's forms on a Ray cluster, every part a service, one of whose processes is killed."""

import asyncio
import os
import signal
import threading
import time

import torch

from benchmarks.ray_load import Load, ask_once, difference, wait_for
from benchmarks.serving_forms import FORMS, save_form
from crystallite.serving import Limits, Machine, Service
from crystallite.serving.interface import NamedModel
from crystallite.serving.ray_engine import Scaling
from crystallite.serving.ray_service import RayService

FREE = Machine(hop=0.0, macs_per_second=1e9, bytes_per_second=1e9)
LIMITS = Limits(timeout=90, max_batch=64, max_queue=1024)
SCALING = Scaling(window=11, up=2, down=5, transforms=1)
_QUESTIONS = 64


def serve_form(name, folder, requests):
    """How far the answers are from the model's and from the in-process engine's, and what a kill under load cost."""
    from ray import serve

    form = FORMS[name]
    path, model = save_form(name, folder / name.replace(" ", "-") / "small"), form.build()
    options = {"into": model if form.own_code else None, "machine": FREE, "limits": LIMITS}
    with torch.no_grad():
        torch.manual_seed(7)
        asked = [form.inputs(1 + i % 2) for i in range(_QUESTIONS)]
        known = [(given, [NamedModel(model, ("input",))(given)]) for given in asked]
    with Service.load(path, **options) as local:
        found = {"in process": max(difference(_named(local.infer(given)), right) for given, (right,) in known)}
    started = time.monotonic()
    with RayService.load(path, workers=1, scaling=SCALING, **options) as service:
        found["start seconds"] = time.monotonic() - started
        pieces = [piece.name for piece in service.models["small"].plan.pieces]
        application = next(each for each in serve.status().applications if each != "crystallite")
        found["pieces"] = len(pieces)
        found["on Ray"] = max(_asked(given, right) for given, (right,) in known[:4])
        return found | (_killed(application, pieces[0], Load(requests, known)) if requests else {})


def _killed(application, piece, load):
    """What became of the requests of which a kill −9 of the piece's only replica met a quarter."""
    from ray import serve

    sending = threading.Thread(target=lambda: asyncio.run(load.send()))
    sending.start()
    while load.done < load.requests // 4:
        time.sleep(0.005)
    process = serve.get_deployment_handle(piece, application).process.remote().result()
    killed = time.monotonic()
    os.kill(process, signal.SIGKILL)
    sending.join()
    wait_for(lambda: _is_whole(application))
    found = {"until all was well": time.monotonic() - killed}
    found["on Ray afterwards"] = max(_asked(given, right) for given, (right,) in load.known[:4])
    return found | load.outcome()


def _named(answer):
    return answer if isinstance(answer, dict) else {"output": answer}


def _asked(given, right):
    status, answer = asyncio.run(ask_once(given))
    assert status == 200, status
    return difference(answer, right)


def _is_whole(application):
    """Whether every piece has the one replica that it should have."""
    from ray import serve

    states = [each.replica_states for each in serve.status().applications[application].deployments.values()]
    return all({str(state): n for state, n in each.items()} == {"RUNNING": 1} for each in states)
