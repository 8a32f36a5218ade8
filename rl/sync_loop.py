"""The synchronous loop: generate, learn, publish, write down; one after the other."""

import asyncio

from rl.stages import Run, admit, finish_step, generate_group, learn, publish
from rollout.trajectory import Group


async def train_sync(run: Run) -> None:
    """Run the remaining optimiser steps."""
    while run.step < run.config.learner.num_steps:
        with run.timed("generate"):
            groups = await generate_step(run)
        metrics = await learn(run, groups)
        await publish(run)
        await finish_step(run, groups, metrics)


async def generate_step(run: Run) -> list[Group]:
    """Return one step's groups, all sampled with the current weights; a group that is not admitted is made up for by another."""
    groups: list[Group] = []
    while missing := run.config.learner.groups_per_step - len(groups):
        made = await asyncio.gather(*(generate_group(run) for _ in range(missing)))
        groups += [group for group in made if admit(run, group)]
    return groups
