"""Which task comes next: a seeded order over epochs that survives a kill without losing or repeating a task."""

import random
from typing import TypedDict

from rollout.trajectory import Task


class TaskQueueState(TypedDict):
    """What a checkpoint keeps: `{"next_index": 8, "unfinished": [4, 6]}` (indices taken but not finished)."""

    next_index: int
    unfinished: list[int]


class TaskQueue:
    """An endless queue of tasks; each seed comes once an epoch, in an order that only the run's seed fixes.

    A task that was taken is unfinished until `finish`; a restored queue hands the unfinished ones out again, first.
    Restoring in the last step of an epoch does not start that epoch again.
    """

    def __init__(self, env_id: str, seeds: range, run_seed: int) -> None:
        """seeds: the seeds of one epoch, at least one."""
        if not len(seeds):
            raise ValueError("a task queue needs at least one seed, got an empty range")
        self._env_id, self._seeds, self._run_seed = env_id, seeds, run_seed
        self._next_index = 0
        self._returned: list[int] = []
        self._unfinished: set[int] = set()
        self._order: tuple[int, list[int]] | None = None

    def take(self) -> Task:
        """Return the next task: one that was put back, if any, else a new one."""
        if self._returned:
            index = self._returned.pop(0)
        else:
            index = self._next_index
            self._next_index += 1
        self._unfinished.add(index)
        return self._task(index)

    def put_back(self, task: Task) -> None:
        """Hand the task out again later; raises ValueError when it was not taken."""
        if task.index not in self._unfinished or task.index in self._returned:
            raise ValueError(f"only a task that was taken can be put back, got index {task.index}")
        self._returned.append(task.index)

    def finish(self, task: Task) -> None:
        """Mark the task as learned from or given up, for good; raises ValueError when it was not taken."""
        if task.index not in self._unfinished or task.index in self._returned:
            raise ValueError(f"only a task that was taken can be finished, got index {task.index}")
        self._unfinished.remove(task.index)

    def state_dict(self) -> TaskQueueState:
        """Return what `load_state_dict` needs to go on."""
        return {"next_index": self._next_index, "unfinished": sorted(self._unfinished)}

    def load_state_dict(self, state: TaskQueueState) -> None:
        """Go on where the state was taken; its unfinished tasks come first, in their old order."""
        self._next_index = state["next_index"]
        self._unfinished = set(state["unfinished"])
        self._returned = sorted(state["unfinished"])

    def _task(self, index: int) -> Task:
        epoch, position = divmod(index, len(self._seeds))
        if self._order is None or self._order[0] != epoch:
            order = list(range(len(self._seeds)))
            random.Random(f"{self._run_seed}:{epoch}").shuffle(order)
            self._order = (epoch, order)
        return Task(self._env_id, self._seeds[self._order[1][position]], index)
