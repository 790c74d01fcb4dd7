"""Batches that form while others are computed; deadlines, full queues, callers that leave, and failures."""

import asyncio
import functools

import pytest
import torch

from crystallite.serving import Limits, Refusal
from crystallite.serving.batching import Batcher
from crystallite.serving.joining import Joining
from crystallite.serving.metrics import Metrics
from crystallite.serving.signature import TensorSpec
from crystallite.serving.statistics import Statistics
from tests.helpers.waiting import PATIENCE


class Work:
    """x + 1, one batch at a time, each only when it is let through."""

    def __init__(self, gated=False):
        self.batches, self.gate = [], asyncio.Event()
        if not gated:
            self.gate.set()

    async def run(self, given):
        x = given["input"]
        self.batches.append(len(x))
        await self.gate.wait()
        if (x == 13).any():
            raise ValueError("unlucky")
        return {"output": x + 1}


JOINING = Joining((TensorSpec("input", torch.float32, (1,)),), (TensorSpec("output", torch.float32, (1,)),))


class Queue(Batcher):
    """A batcher of one tensor."""

    async def infer(self, x, timeout=None):
        return (await super().infer({"input": x}, timeout))["output"]


def batcher(work, **limits):
    return Queue("small", work.run, JOINING, Limits(**limits), Metrics(), Statistics())


def rows(*values):
    return torch.tensor(values, dtype=torch.float32)[:, None]


async def until(condition):
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


def scenario(test):
    """Run an asynchronous test."""

    @functools.wraps(test)
    def run():
        asyncio.run(asyncio.wait_for(test(), PATIENCE))

    return run


@scenario
async def test_requests_that_come_while_it_is_busy_are_the_next_batch():
    work = Work(gated=True)
    queue = batcher(work, max_batch=8)
    first = asyncio.create_task(queue.infer(rows(0)))
    await until(lambda: work.batches == [1])
    others = [asyncio.create_task(queue.infer(rows(i, i + 0.5))) for i in range(1, 7)]
    await until(lambda: queue.waiting == 6)
    work.gate.set()
    assert torch.equal(await first, rows(1))
    for i, other in enumerate(others, 1):
        assert torch.equal(await other, rows(i + 1, i + 1.5))
    assert work.batches == [1, 8, 4]


@scenario
async def test_a_request_larger_than_a_batch_runs_alone():
    work = Work()
    assert len(await batcher(work, max_batch=2).infer(rows(*range(5)))) == 5
    assert work.batches == [5]


@scenario
async def test_an_idle_model_waits_for_a_fuller_batch():
    work = Work()
    queue = batcher(work, max_wait=PATIENCE / 2, max_batch=3)
    first = asyncio.create_task(queue.infer(rows(0, 1)))
    await until(lambda: queue.waiting == 1)
    assert work.batches == []
    await queue.infer(rows(2))  # full: nobody waits any longer
    await first
    await batcher(work, max_wait=0.05).infer(rows(0))  # nobody else came
    assert work.batches == [3, 1]


@scenario
async def test_a_full_queue_refuses_and_says_when_to_come_back():
    work = Work(gated=True)
    queue = batcher(work, max_queue=2)
    tasks = [asyncio.create_task(queue.infer(rows(0)))]
    await until(lambda: work.batches == [1])
    tasks += [asyncio.create_task(queue.infer(rows(i))) for i in (1, 2)]
    await until(lambda: queue.waiting == 2)
    with pytest.raises(Refusal) as caught:
        await queue.infer(rows(3))
    assert caught.value.status == 429
    assert caught.value.retry_after >= 1
    tasks[2].cancel()  # who leaves makes room
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    tasks[2] = asyncio.create_task(queue.infer(rows(3)))
    await until(lambda: queue.waiting == 2)
    work.gate.set()
    assert [y.item() for y in await asyncio.gather(*tasks)] == [1, 2, 4]


@scenario
async def test_who_waited_too_long_is_told_at_once_and_not_computed():
    work = Work(gated=True)
    queue = batcher(work)
    busy = asyncio.create_task(queue.infer(rows(0)))
    await until(lambda: work.batches == [1])
    with pytest.raises(Refusal, match=r"0\.05 s") as caught:
        await queue.infer(rows(1), timeout=0.05)
    assert caught.value.status == 504
    work.gate.set()
    assert torch.equal(await busy, rows(1))
    assert torch.equal(await queue.infer(rows(2)), rows(3))
    assert work.batches == [1, 1]  # the one that came too late was not computed


@scenario
async def test_the_limit_of_the_service_holds_though_the_work_has_begun():
    work = Work(gated=True)
    with pytest.raises(Refusal, match=r"0\.05 s"):
        await batcher(work, timeout=0.05).infer(rows(0))
    assert work.batches == [1]


@scenario
async def test_who_has_left_is_not_computed():
    work = Work(gated=True)
    queue = batcher(work)
    tasks = [asyncio.create_task(queue.infer(rows(0)))]
    await until(lambda: work.batches == [1])
    tasks += [asyncio.create_task(queue.infer(rows(i))) for i in (1, 2)]
    await until(lambda: queue.waiting == 2)
    tasks[0].cancel()  # its batch runs, and nobody takes the answer
    tasks[1].cancel()
    work.gate.set()
    assert (await tasks[2]).item() == 3
    assert work.batches == [1, 1]


@scenario
async def test_one_request_that_fails_does_not_fail_the_others():
    work = Work(gated=True)
    queue = batcher(work)
    tasks = [asyncio.create_task(queue.infer(rows(i))) for i in (0, 1, 13, 2)]
    await until(lambda: work.batches)
    work.gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[2], ValueError)
    assert [y.item() for i, y in enumerate(results) if i != 2] == [1, 2, 3]
    assert (await queue.infer(rows(5))).item() == 6


@scenario
async def test_closing_does_not_wait_for_a_fuller_batch():
    work = Work()
    queue = batcher(work, max_wait=PATIENCE / 2)
    waiting = asyncio.create_task(queue.infer(rows(0)))
    await until(lambda: queue.waiting == 1)
    async with asyncio.timeout(PATIENCE):
        await queue.close()
    assert (await waiting).item() == 1


@scenario
async def test_closing_answers_what_was_accepted():
    work = Work(gated=True)
    queue = batcher(work)
    tasks = [asyncio.create_task(queue.infer(rows(i))) for i in range(3)]
    await until(lambda: work.batches)
    closing = asyncio.create_task(queue.close())
    await asyncio.sleep(0)
    with pytest.raises(Refusal) as caught:
        await queue.infer(rows(9))
    assert caught.value.status == 503
    assert caught.value.retry_after
    assert not closing.done()
    work.gate.set()
    await closing
    assert all(task.done() for task in tasks) or await asyncio.gather(*tasks)
    assert [task.result().item() for task in tasks] == [1, 2, 3]


@pytest.mark.parametrize("limits", [{"max_batch": 0}, {"max_queue": 0}, {"timeout": 0}, {"max_wait": float("nan")}])
def test_limits_that_make_no_sense(limits):
    from crystallite import InvalidOption

    with pytest.raises(InvalidOption, match=next(iter(limits))):
        Limits(**limits)


@scenario
async def test_several_batches_at_once_where_the_engine_has_room():
    work = Work(gated=True)
    queue = Queue("small", work.run, JOINING, Limits(max_batch=8), Metrics(), Statistics(), batches=lambda: 2)
    asked = []
    for i in range(5):
        asked.append(asyncio.create_task(queue.infer(rows(i))))
        await until(lambda n=i + 1: len(work.batches) == min(n, 2) and queue.waiting == max(n - 2, 0))
    assert work.batches == [1, 1]
    assert queue.waiting == 3
    work.gate.set()
    for i, answer in enumerate(asked):
        assert torch.equal(await answer, rows(i + 1))
    assert work.batches == [1, 1, 3]
    assert torch.equal(await queue.infer(rows(7)), rows(8))  # both workers were done, and one comes back
    await queue.close()


LONG = Joining(
    (TensorSpec("input", torch.float32, ("length",)),),
    (TensorSpec("output", torch.float32, ("length",)),),
    frozenset({"length"}),
)


async def shapes_of_batches(costs, lengths):
    """What is computed together of requests of these lengths, where batches cost this; the first request runs alone."""
    work, shapes = Work(gated=True), []

    async def run(given):
        shapes.append(tuple(given["input"].shape))
        return await work.run(given)

    queue = Queue("small", run, LONG, Limits(), Metrics(), Statistics())
    for size in range(100, 1000, 100):
        queue._costs.add(size, costs(size))

    def ask(length):
        return asyncio.create_task(queue.infer(torch.full((1, length), float(length))))

    tasks = [ask(1)]
    await until(lambda: shapes)
    tasks += map(ask, lengths)
    await until(lambda: queue.waiting == len(lengths))
    work.gate.set()
    for length, task in zip((1, *lengths), tasks, strict=True):
        assert torch.equal(await task, torch.full((1, length), length + 1.0))
    return shapes[1:]


@scenario
async def test_what_batches_cost_by_themselves_decides_how_far_they_are_filled_up():
    lengths = (40, 100, 41, 45, 99)
    assert await shapes_of_batches(lambda size: size, lengths) == [(1, 40), (1, 100), (1, 41), (1, 45), (1, 99)]
    assert await shapes_of_batches(lambda size: 100 + size, lengths) == [(3, 45), (2, 100)]
    assert await shapes_of_batches(lambda size: 100 + size, (40, 60)) == [(1, 40), (1, 60)]
    assert await shapes_of_batches(lambda size: 1.0, (40, 60)) == [(2, 60)]
