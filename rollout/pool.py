"""Workers that may die: groups go to the least busy one, a lost worker is replaced, and its groups start again elsewhere."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rollout.trajectory import Group, Task
from rollout.worker import Weights, Worker, WorkerLostError

logger = logging.getLogger(__name__)
AnyWorker = TypeVar("AnyWorker", bound=Worker)


class TooManyLossesError(Exception):
    """The same group lost its worker again and again."""


@dataclass
class _Seat(Generic[AnyWorker]):
    """A place for a worker; `generation` grows with each replacement."""

    worker: AnyWorker
    generation: int = 0
    in_flight: dict[int, Task] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class WorkerPool(Generic[AnyWorker]):
    """Runs groups on a fixed number of seats; the work of a lost worker is done again, never dropped."""

    def __init__(
        self,
        spawn: Callable[[int, Weights | None], Awaitable[AnyWorker]],
        kill: Callable[[AnyWorker], Awaitable[None]],
        *,
        num_workers: int,
        deadline_s: float,
        max_losses: int = 3,
    ) -> None:
        """spawn: makes a worker that holds the given version and weights (None: those of the config).
        kill: ends a worker for good, even one that hangs. deadline_s: a group that takes longer counts as a lost worker.
        max_losses: a group that loses this many workers raises TooManyLossesError.
        """
        self._spawn, self._kill = spawn, kill
        self._num_workers, self._deadline_s, self._max_losses = num_workers, deadline_s, max_losses
        self._seats: list[_Seat[AnyWorker]] = []
        self._keys = itertools.count()
        self._version: int = 0
        self._weights: Weights | None = None
        self.num_replaced = 0
        """Workers replaced so far."""

    async def start(self, version: int, weights: Weights | None) -> None:
        """Start all workers with these weights."""
        self._version, self._weights = version, weights
        workers = await asyncio.gather(*(self._spawn(version, weights) for _ in range(self._num_workers)))
        self._seats = [_Seat(worker) for worker in workers]

    @property
    def num_in_flight(self) -> int:
        """Groups that run now."""
        return sum(len(seat.in_flight) for seat in self._seats)

    async def run_group(self, task: Task, size: int, temperature: float) -> Group:
        """Return the group; a lost worker costs time only. Raises TooManyLossesError."""
        for _ in range(self._max_losses):
            seat = min(self._seats, key=lambda seat: len(seat.in_flight))
            generation, key = seat.generation, next(self._keys)
            seat.in_flight[key] = task
            try:
                async with asyncio.timeout(self._deadline_s):
                    return await seat.worker.run_group(task, size, temperature)
            except (TimeoutError, WorkerLostError) as error:
                await self._replace(seat, generation, error)
            finally:
                seat.in_flight.pop(key, None)
        raise TooManyLossesError(
            f"a group must not lose more than {self._max_losses} workers, task seed {task.seed} of {task.env_id} did: "
            f"look for an environment that kills its process, or raise rollout.group_deadline_s (now {self._deadline_s:g} s)"
        )

    async def set_weights(self, version: int, weights: Weights) -> None:
        """Give all workers new weights; a worker that is lost meanwhile is replaced by one that has them."""
        self._version, self._weights = version, weights
        await asyncio.gather(*(self._set_weights(seat) for seat in self._seats))

    async def live_environments(self) -> int:
        """Return how many environments are open in all workers."""
        return sum(await asyncio.gather(*(seat.worker.live_environments() for seat in self._seats)))

    async def shutdown(self) -> None:
        """End all workers; a worker that does not answer is killed."""

        async def end(seat: _Seat[AnyWorker]) -> None:
            try:
                async with asyncio.timeout(10):
                    await seat.worker.shutdown()
            except (TimeoutError, WorkerLostError):
                logger.warning("a rollout worker did not shut down in time and is killed")
            await self._kill(seat.worker)

        await asyncio.gather(*(end(seat) for seat in self._seats))
        self._seats = []

    async def _set_weights(self, seat: _Seat[AnyWorker]) -> None:
        generation, version = seat.generation, self._version
        try:
            await seat.worker.set_weights(version, self._weights or {})
        except WorkerLostError as error:
            await self._replace(seat, generation, error)

    async def _replace(self, seat: _Seat[AnyWorker], generation: int, error: Exception) -> None:
        """Put a new worker on the seat, unless another caller has done so since `generation`."""
        async with seat.lock:
            if seat.generation != generation:
                return
            seeds = sorted(task.seed for task in seat.in_flight.values())
            logger.warning(
                "a rollout worker is lost (%s) and replaced; task seeds in flight, started again: %s", error or "deadline", seeds
            )
            await self._kill(seat.worker)
            version = self._version
            seat.worker = await self._spawn(version, self._weights)
            if version != self._version:
                await seat.worker.set_weights(self._version, self._weights or {})
            seat.generation += 1
            self.num_replaced += 1
