"""The asynchronous loop: generation never waits for learning, and never runs ahead by more than `max_staleness` versions."""

import asyncio

from rl.stages import Run, admit, finish_step, generate_group, learn, publish
from rollout.trajectory import Group


async def train_async(run: Run) -> None:
    """Run the remaining optimiser steps."""
    finished: asyncio.Queue[Group] = asyncio.Queue()
    # A permit is held from a group's start until it was learned from or dropped. A group that starts now is therefore
    # among the next (max_staleness + 1) * groups_per_step to be learned from: at most max_staleness versions from now.
    permits = asyncio.Semaphore((_max_staleness(run) + 1) * run.config.learner.groups_per_step)
    async with asyncio.TaskGroup() as background:
        producer = background.create_task(_keep_generating(run, finished, permits))
        while run.step < run.config.learner.num_steps:
            with run.timed("wait"):
                groups = await _collect(run, finished, permits)
            metrics = await learn(run, groups)
            await publish(run)
            for _ in groups:
                permits.release()
            if run.step == run.config.learner.num_steps:
                producer.cancel()  # what it still generates would never be learned from, and would slow the last evaluation
            await finish_step(run, groups, metrics)


async def _keep_generating(run: Run, finished: asyncio.Queue[Group], permits: asyncio.Semaphore) -> None:
    """Start a group whenever a permit is free; the first group that raises ends the run."""

    async def generate_one() -> None:
        await finished.put(await generate_group(run))

    async with asyncio.TaskGroup() as groups:
        while True:
            await permits.acquire()
            groups.create_task(generate_one())


async def _collect(run: Run, finished: asyncio.Queue[Group], permits: asyncio.Semaphore) -> list[Group]:
    """Return the groups of one step, in the order in which they were finished."""
    groups: list[Group] = []
    while len(groups) < run.config.learner.groups_per_step:
        group = await finished.get()
        if admit(run, group):
            groups.append(group)
        else:
            permits.release()
    return groups


def _max_staleness(run: Run) -> int:
    if run.config.asynchrony is None:
        raise ValueError('the asynchronous loop needs the section [asynchrony] and mode = "async"')
    return run.config.asynchrony.max_staleness
