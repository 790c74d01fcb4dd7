"""A cluster of two nodes inside a namespace, a service on it, and things that go wrong.

`tests/serving/test_ray.py` asserts what comes out of each scenario, `benchmarks/serving_ray.py` times the same ones.
`python -m benchmarks.ray_scenarios FOLDER` reads names of scenarios from its input and writes what happened, as JSON.
"""

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

import crystallite as cx
from benchmarks.namespace import OBJECT_STORE_BYTES, bring_loopback_up
from benchmarks.ray_forms import serve_form
from benchmarks.ray_load import CLOSE, PATIENCE, Load, ask_once, difference, wait_for
from crystallite.core.errors import CrystalliteError, InvalidOption
from crystallite.models.manifest import attach_verdict, write_manifest
from crystallite.serving import Limits, Machine, Service
from crystallite.serving.model import CutModel, Source
from crystallite.serving.ray_engine import Scaling
from crystallite.serving.ray_service import RayService

APART = Machine(hop=1e-12, macs_per_second=1e9, bytes_per_second=1e9)  # every part is worth a service
INPUTS, OUTPUTS = 16, 8
HEAVY, LIGHT = "0.0", "0.1"  # the plan puts the heaviest part first
TRANSFORM = "crystallite:transform"
LIMITS = Limits(timeout=40, max_batch=64, max_queue=1024)
SCALING = Scaling(window=11, up=2, down=5, transforms=1)


def uneven(seed=0, width=1200):
    """A network of two independent parts, one of which computes a thousand times what the other does."""
    torch.manual_seed(seed)
    layers = []
    for (a, b), (c, d) in zip([(8, 8), (width, 16), (width, 16)], [(width, 16), (width, 16), (4, 4)], strict=True):
        layer = nn.Linear(a + b, c + d)
        with torch.no_grad():
            layer.weight[:c, a:] = layer.weight[c:, :a] = 0
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1]).eval()


def saved(model, path):
    cx.save(cx.reorganize(model, level=None, only_if_faster=False, fold=False), path)
    attach_verdict(path, {"passed": True, "reasons": ["planted"]})
    return path


class Inside:
    """The cluster, the service, and the scenarios, which are its public methods."""

    def __init__(self, folder):
        import ray
        from ray.cluster_utils import Cluster

        self.folder, self.model = folder, uneven()
        saved(self.model, folder / "v0")
        self.link = folder / "small"
        self.link.symlink_to(folder / "v0")
        size = {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES}
        self.cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **size})
        self.size, self.worker = size, self.cluster.add_node(**size)
        ray.init(self.cluster.address, log_to_driver=False, configure_logging=False)
        started = time.monotonic()
        self.service = self.served()
        self.start_seconds = time.monotonic() - started

    def served(self):
        return RayService.load(self.link, machine=APART, workers=3, limits=LIMITS, scaling=SCALING)

    def end(self):
        """Leave the cluster to another service."""
        if self.service is not None:
            self.service.close()
            self.service = None

    # what happens

    def answers(self):
        """The same answers as in process and as the model, for one sample and for many, one request and many."""
        from ray import serve

        found = {"start seconds": self.start_seconds, "differences": {}, "nodes": len(self.cluster.list_all_nodes())}
        with Service.load(self.link, machine=APART) as local:
            for batch in (1, 64):
                x = torch.randn(batch, INPUTS)
                y = self.asked(x)
                found["differences"][f"local {batch}"] = difference(y, {"output": local.infer(x)})
                found["differences"][f"model {batch}"] = difference(y, answer(self.model, x))
        found["bad"] = asyncio.run(ask_once({"input": torch.full((1, INPUTS), torch.nan)}))[0]
        found["replicas"] = self.replicas()
        found["bounds"] = {p.name: (p.least, p.most) for p in self.service.models["small"].plan.pieces}
        found["applications"] = len(serve.status().applications)
        return found

    def kill_a_replica(self, requests=2000):
        """kill −9 of one of the two replicas of the heavy piece."""
        return self.under_load(lambda: os.kill(self.process(HEAVY), signal.SIGKILL), requests)

    def kill_the_only_replica(self):
        """kill −9 of the one replica of the light piece: its calls wait for the next one."""
        return self.under_load(lambda: os.kill(self.process(LIGHT), signal.SIGKILL), 1000)

    def kill_the_transform_replica(self):
        return self.under_load(lambda: os.kill(self.transform_process(), signal.SIGKILL), 1500)

    def kill_the_node(self):
        """The worker node goes without a word; another one joins, as a cluster's manager would see to."""

        victims = self.replicas_on(self.worker)

        def kill():
            self.cluster.remove_node(self.worker, allow_graceful=False)
            self.worker = self.cluster.add_node(**self.size)

        return self.under_load(kill, 2000) | {"victims": victims}

    def freeze_a_replica(self):
        """A replica that neither answers nor dies."""
        process = self.process(HEAVY)
        try:
            return self.under_load(lambda: os.kill(process, signal.SIGSTOP), 1000, recovered=lambda: True)
        finally:
            with suppress(ProcessLookupError):  # Ray may have seen to it
                os.kill(process, signal.SIGKILL)
            wait_for(self.is_whole)

    def grow_and_shrink(self):
        """Load on the heavy piece until it has another replica, then none until it has lost it again."""
        return asyncio.run(self.grown()) | {"shrunk": wait_for(self.is_whole), "after": self.replicas()}

    def bring_a_new_version(self):
        """A reload under load: every answer is that of one version or of the other."""
        new = uneven(seed=1)
        saved(new, self.folder / "v1")

        def reload():
            self.point_at(self.folder / "v1")
            self.service.reload("small")

        found = self.under_load(reload, 1500, either=new, recovered=self.is_whole)
        self.model = new
        x = torch.ones(1, INPUTS)
        return found | {"new": difference(self.asked(x), answer(new, x))}

    def bring_a_broken_version(self):
        """New versions that cannot be opened: one with infinite sizes in its manifest, and whatever is raised."""
        before = os.readlink(self.link)
        broken = saved(uneven(seed=3), self.folder / "broken")
        manifest = json.loads((broken / "manifest.json").read_text())
        for layer in manifest["modules"][""]["children"]["0"]["layers"]:
            layer["in_features"] = float("inf")
        write_manifest(broken, manifest)
        self.point_at(broken)
        errors, opened = [], CutModel.open
        for opening in (opened, raising(MemoryError()), raising(RuntimeError("PytorchStreamReader failed"))):
            CutModel.open = opening
            try:
                self.service.reload("small")
            except CrystalliteError as error:
                errors.append(str(error))
            finally:
                CutModel.open = opened
        self.point_at(before)
        return {"errors": errors, "right": self.answers_rightly(), "whole": self.is_whole()}

    def point_at(self, folder):
        fresh = self.folder / "fresh"
        fresh.symlink_to(folder)
        fresh.replace(self.link)

    def plan_with_other_weights(self):
        """Pieces whose file is not the one that was planned with."""
        from crystallite.serving.ray_engine import deploy_pieces

        other = saved(uneven(seed=2), self.folder / "other")
        cut = CutModel.open("small", Source(self.link, machine=APART, workers=1))
        try:
            deploy_pieces(dataclasses.replace(cut, path=other), None, SCALING, LIMITS, 1)
        except InvalidOption as error:
            return {"error": str(error), "whole": self.is_whole()}

    def serve_in_process(self):
        """`Service.load(engine="ray")`: the transform tier here, the pieces on the cluster."""
        self.end()
        with Service.load(self.link, machine=APART, workers=2, limits=LIMITS, engine="ray") as service:
            x = torch.randn(64, INPUTS)
            found = {"difference": difference({"output": service.infer(x)}, answer(self.model, x))}
            model = service.models["small"]
            found["pieces"] = [piece.name for piece in model.plan.pieces]
            service.reload("small")
            found["again"] = difference({"output": service.infer(x)}, answer(self.model, x))
        return found | {"left": self.applications()}

    def run_the_command(self):
        """`crystallite serve --engine ray`, ended by SIGTERM."""
        self.end()
        command = [sys.executable, "-m", "crystallite", "serve", str(self.link), "--engine", "ray", "--log", "json"]
        environment = {**os.environ, "RAY_ADDRESS": self.cluster.address}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, text=True, env=environment, **pipes) as process:
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(process.stderr.read())
            x = torch.randn(3, INPUTS)
            y = self.asked(x)
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=PATIENCE)
        found = {"line": line, "code": process.returncode, "errors": errors[-2000:], "left": self.applications()}
        found["log"] = [line for file in ray_logs() for line in file.read_text().splitlines() if '"protocol"' in line]
        return found | {"difference": difference(y, answer(self.model, x))}

    def join_without_the_token(self):
        """What a process gets that knows where the cluster is, but not its token."""
        program = f"import ray; ray.init({self.cluster.address!r}, log_to_driver=False)"
        environment = {**os.environ, "RAY_AUTH_TOKEN": "0" * 64}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        return {"code": done.returncode, "error": done.stderr[-2000:]}

    def serve_form(self, name, requests=300):
        """A model of one of the paper's forms, whose only replica of its heaviest piece is killed under load."""
        self.end()
        return serve_form(name, self.folder, requests)

    # how it is seen

    def under_load(self, event, requests, either=None, recovered=None):
        """What became of some requests of which the event met a quarter, and how long it took until all was well."""
        load = Load(requests, known([self.model] if either is None else [self.model, either]))
        sending = threading.Thread(target=lambda: asyncio.run(load.send()))
        sending.start()
        while load.done < requests // 4:
            time.sleep(0.005)
        load.event = time.monotonic()
        event()  # here: Ray starts nodes in the main thread only
        sending.join()
        wait_for(recovered or (lambda: self.is_whole() and self.answers_rightly()))
        seconds = {"until all was well": time.monotonic() - load.event}
        return load.outcome() | seconds | {"replicas": self.replicas()}

    def replicas(self):
        from ray import serve

        found = {}
        for application in serve.status().applications.values():
            for name, deployment in application.deployments.items():
                found[name] = {str(state): n for state, n in deployment.replica_states.items()}
        return found

    def is_whole(self):
        found = self.replicas()
        return found == {HEAVY: {"RUNNING": 2}, LIGHT: {"RUNNING": 1}, "transform": {"RUNNING": 1}}

    def answers_rightly(self):
        x = torch.randn(2, INPUTS)
        try:
            y = self.asked(x)
        except AssertionError:
            return False
        return difference(y, answer(self.model, x)) <= CLOSE

    def process(self, piece):
        from ray import serve

        return serve.get_deployment_handle(piece, self.application()).process.remote().result()

    def transform_process(self):
        """Ray adds what a process is doing to its name, and writes the name anew while it is read."""
        found = []
        wait_for(lambda: found or found.extend(p for p, name, _ in ray_processes() if name.startswith(TRANSFORM)))
        return found[0]

    def replicas_on(self, node):
        (raylet,) = (info.process.pid for info in node.all_processes["raylet"])
        return [name for _, name, parent in ray_processes() if parent == raylet]

    def application(self):
        return next(name for name in self.applications() if name != "crystallite")

    def applications(self):
        from ray import serve

        return list(serve.status().applications)

    def asked(self, x):
        status, found = asyncio.run(ask_once({"input": x}))
        assert status == 200, status
        return found

    async def grown(self):
        load = Load(10**6, known([self.model], samples=256))
        sending = asyncio.create_task(load.send())
        started, most, others = time.monotonic(), 0, Counter()
        while most < 3 and time.monotonic() - started < PATIENCE:
            await asyncio.sleep(0.5)
            found = await asyncio.to_thread(self.replicas)
            most = max(most, found[HEAVY].get("RUNNING", 0))
            others[sum(found[LIGHT].values()), sum(found["transform"].values())] += 1
        load.requests = load.started
        await sending
        others = [list(seen) for seen in others]
        return load.outcome() | {"grown": time.monotonic() - started, "most": most, "light and transform": others}


def answer(model, x):
    return {"output": model(x).detach()}


def known(models, samples=1):
    """What is asked, and what each of the models answers."""
    inputs = torch.randn(256, samples, INPUTS, generator=torch.Generator().manual_seed(7))
    return [({"input": x}, [answer(model, x) for model in models]) for x in inputs]


def ray_logs():
    """What the processes of the cluster wrote to standard error."""
    return Path(os.environ["RAY_TMPDIR"]).glob("ray/session_latest/logs/worker-*.err")


def raising(error):
    def opening(*_given):
        raise error

    return opening


def ray_processes():
    """The process, its application and deployment, and its parent, of each replica; Ray names its processes."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            kind, _, name = (entry / "cmdline").read_bytes().rstrip(b"\0").decode().partition("::ServeReplica:")
            if kind == "ray" and name:
                yield int(entry.name), name, int((entry / "stat").read_text().rpartition(")")[2].split()[1])


def main():
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed
    bring_loopback_up()
    inside = Inside(Path(sys.argv[1]))
    for line in sys.stdin:
        name, _, options = line.strip().partition(" ")
        try:
            found = {"outcome": getattr(inside, name)(**json.loads(options or "{}"))}
        except Exception as error:
            import traceback

            found = {"error": "".join(traceback.format_exception(error))[-4000:]}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
