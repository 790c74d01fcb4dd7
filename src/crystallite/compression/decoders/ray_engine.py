"""Shares of the calibration data on a Ray cluster: an actor on every node keeps one, with its hidden states.

Actors read finished layers from the disk, are sent the one that is being fitted, and return sums. One that is lost is
replaced: the next one has the same data and nothing else, and computes what it lacks again.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from crystallite.compression.decoders.shares import Chunks, Layers, Share, Shares
from crystallite.compression.decoders.stack import Stack
from crystallite.compression.decoders.workspace import Workspace
from crystallite.core.errors import CrystalliteError, InvalidOption
from crystallite.core.ray_cluster import connected

__all__ = ["spread_over_ray"]

_ATTEMPTS = 3  # at one step with one share, each by another actor
_CLEANING = 60  # seconds that nodes have to remove files

Opener = Callable[[], tuple[Stack, Layers]]
P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def spread_over_ray(opener: Opener, run: str) -> Iterator[Callable[[Stack, Chunks], Shares]]:
    """Who puts shares of data on the nodes of a cluster; they are there until this ends.

    opener: gives an actor the model without its layers, and where these are: every node must see the same files under
    the same paths, and have the same packages. run: a name for files on the nodes, none of which stays.
    """
    with connected() as ray:
        held: list[_RayShares] = []

        def spread(stack: Stack, chunks: Chunks) -> Shares:
            held.append(_RayShares(ray, opener, stack.rounded, chunks, f"crystallite-{run}-"))
            return held[-1]

        try:
            yield spread
        finally:
            for shares in held:
                shares.close()


class _RayShares:
    """An actor for each share; see `Shares`."""

    def __init__(self, ray: Any, opener: Opener, rounded: bool, chunks: Chunks, prefix: str) -> None:
        self._ray, self._opener, self._rounded, self._prefix = ray, opener, rounded, prefix
        nodes = self._nodes()
        if not nodes:
            raise InvalidOption('engine="ray": expected a cluster with processors, got none')
        self._clean()  # of a run that was killed
        self._chunks = chunks.split(len(nodes))
        self._places: list[str] = [""] * len(self._chunks)
        self._actors = [self._start(number) for number in range(len(self._chunks))]

    def each(self, step: Callable[Concatenate[Share, P], T], *given: P.args, **named: P.kwargs) -> list[T]:
        ray, found = self._ray, dict[int, T]()
        sent = ray.put((step, given, named))
        waiting = {actor.take.remote(sent): number for number, actor in enumerate(self._actors)}
        attempts = Counter(waiting.values())
        while waiting:
            (done,), _ = ray.wait(list(waiting))
            number = waiting.pop(done)
            try:
                result = ray.get(done)
            except ray.exceptions.RayTaskError:
                raise
            except ray.exceptions.RayError as error:  # the actor is lost, or what it returned
                attempts[number] += 1
                if attempts[number] > _ATTEMPTS:
                    raise CrystalliteError(f"a share of the data was lost {_ATTEMPTS} times: {error!s:.500}") from None
                ray.kill(self._actors[number])
                self._actors[number] = self._start(number)
                waiting[self._actors[number].take.remote(sent)] = number
                continue
            if isinstance(result, CrystalliteError):
                raise result
            found[number] = result
        return [found[number] for number in sorted(found)]

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        self._clean()

    def _start(self, number: int) -> Any:
        """An actor for a share, on the node that has fewest."""
        nodes = self._nodes()
        used = Counter(self._places[:number] + self._places[number + 1 :])
        place = min(nodes, key=lambda node: (used[node] / nodes[node], node), default="")
        self._places[number] = place
        threads = max(1, int(nodes.get(place, 1)) // (used[place] + 1))
        actor = self._ray.remote(num_cpus=0)(_Keeper).options(**self._on(place))
        return actor.remote(self._opener, self._rounded, self._chunks[number], self._prefix, threads)

    def _nodes(self) -> dict[str, float]:
        """The nodes that have processors, and how many."""
        found = {node["NodeID"]: node["Resources"].get("CPU", 0.0) for node in self._ray.nodes() if node["Alive"]}
        return {node: count for node, count in found.items() if count}

    def _on(self, node: str) -> dict[str, Any]:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True)} if node else {}

    def _clean(self) -> None:
        """Remove what actors have left on all nodes."""
        task = self._ray.remote(num_cpus=0)(_remove_folders)
        asked = [task.options(**self._on(node)).remote(self._prefix) for node in self._nodes()]
        with suppress(self._ray.exceptions.RayError):
            self._ray.wait(asked, num_returns=len(asked), timeout=_CLEANING)


class _Keeper:
    """Runs on a node: keeps a share, its states in files of that node."""

    def __init__(self, opener: Opener, rounded: bool, chunks: Chunks, prefix: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._given = opener, rounded, chunks, prefix
        self._share: Share | None = None

    def take(self, sent: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> Any:
        """What comes of a step; our errors are results, as Ray would wrap them."""
        step, given, named = sent
        try:
            if self._share is None:
                self._share = self._opened()
            with torch.no_grad():
                return step(self._share, *given, **named)
        except CrystalliteError as error:
            return error.with_traceback(None)

    def _opened(self) -> Share:
        opener, rounded, chunks, prefix = self._given
        stack, layers = opener()
        work = Workspace(Path(tempfile.mkdtemp(prefix=prefix)))
        return Share(Stack(stack.model, stack.name, rounded), layers, chunks, work)


def _remove_folders(prefix: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        shutil.rmtree(folder, ignore_errors=True)
