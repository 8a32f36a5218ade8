import asyncio
import logging

import pytest

from rollout.pool import TooManyLossesError, WorkerPool
from rollout.trajectory import Group, Task
from rollout.worker import WorkerLostError


class FakeWorker:
    """Answers at once, or dies, hangs or raises on the seeds that it was told."""

    def __init__(self, version, *, dies_on=(), hangs_on=(), raises_on=()):
        self.version, self.dies_on, self.hangs_on, self.raises_on = version, dies_on, hangs_on, raises_on
        self.is_dead = False
        self.done = []

    async def run_group(self, task, size, temperature):
        await asyncio.sleep(0)
        if self.is_dead or task.seed in self.dies_on:
            self.is_dead = True
            raise WorkerLostError("killed")
        if task.seed in self.hangs_on:
            await asyncio.Event().wait()
        if task.seed in self.raises_on:
            raise ValueError("a mistake in the recipe")
        self.done.append(task.seed)
        return Group(task, ())

    async def set_weights(self, version, weights):
        if self.is_dead:
            raise WorkerLostError("killed")
        self.version = version

    async def live_environments(self):
        return 0

    async def shutdown(self):
        pass


class Workers:
    """Spawns fakes; the first ones get the given faults."""

    def __init__(self, *faults):
        self.faults, self.spawned, self.killed = list(faults), [], []

    async def spawn(self, version, weights):
        worker = FakeWorker(version, **(self.faults.pop(0) if self.faults else {}))
        self.spawned.append(worker)
        return worker

    async def kill(self, worker):
        worker.is_dead = True
        self.killed.append(worker)

    def pool(self, num_workers, **kwargs):
        return WorkerPool(self.spawn, self.kill, num_workers=num_workers, deadline_s=kwargs.pop("deadline_s", 5.0), **kwargs)


def run_groups(pool, seeds):
    async def run():
        await pool.start(0, None)
        return await asyncio.gather(*(pool.run_group(Task("e", seed), 2, 1.0) for seed in seeds), return_exceptions=True)

    return asyncio.run(run())


def test_the_groups_of_a_dead_worker_are_run_again_and_none_is_lost():
    workers = Workers({}, {"dies_on": [3]})
    pool = workers.pool(2)
    groups = run_groups(pool, range(8))
    assert [group.task.seed for group in groups] == list(range(8))
    assert pool.num_replaced == 1
    assert pool.num_in_flight == 0


def test_a_worker_that_never_answers_is_replaced_after_the_deadline_with_a_warning(caplog):
    workers = Workers({"hangs_on": [0, 2]}, {})
    pool = workers.pool(2, deadline_s=0.1)
    with caplog.at_level(logging.WARNING):
        groups = run_groups(pool, range(4))
    assert [group.task.seed for group in groups] == list(range(4))
    assert "started again: [0, 2]" in caplog.text
    assert len(workers.killed) == pool.num_replaced == 1
    assert pool.num_in_flight == 0


def test_a_replacement_starts_with_the_newest_weights():
    workers = Workers({"dies_on": [1]})
    pool = workers.pool(1)

    async def run():
        await pool.start(0, None)
        await pool.set_weights(7, {})
        await pool.run_group(Task("e", 1), 2, 1.0)

    asyncio.run(run())
    assert workers.spawned[-1].version == 7


def test_a_worker_that_dies_while_it_takes_weights_is_replaced():
    workers = Workers({"dies_on": [1]}, {})
    pool = workers.pool(2)

    async def run():
        await pool.start(0, None)
        workers.spawned[0].is_dead = True
        await pool.set_weights(3, {})
        return [seat.version for seat in workers.spawned[1:]]

    assert asyncio.run(run()) == [3, 3]


def test_errors_that_are_not_losses_come_through_and_leave_no_group_in_flight():
    workers = Workers({"raises_on": [0, 1, 2, 3]})
    pool = workers.pool(1)
    results = run_groups(pool, range(10))
    assert [type(result) for result in results[:4]] == [ValueError] * 4
    assert [result.task.seed for result in results[4:]] == list(range(4, 10))
    assert pool.num_in_flight == 0
    assert pool.num_replaced == 0


def test_a_group_that_kills_every_worker_stops_the_run_by_name():
    workers = Workers(*[{"dies_on": [5]}] * 9)
    results = run_groups(workers.pool(1), [5])
    assert isinstance(results[0], TooManyLossesError)
    assert "seed 5" in str(results[0])


@pytest.mark.parametrize("num_groups", [6, 7])
def test_groups_are_spread_over_the_workers(num_groups):
    workers = Workers()
    run_groups(workers.pool(3), range(num_groups))
    assert sorted(len(worker.done) for worker in workers.spawned)[0] == 2
