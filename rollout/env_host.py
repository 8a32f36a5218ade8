"""An environment in a thread of its own, with a deadline on every call and exactly one close."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from envs.tool_env import ToolEnv

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class EnvTimeoutError(Exception):
    """An environment call took longer than its deadline."""


class LiveCount:
    """How many environments are open; shared by the hosts of a worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._value = 0

    @property
    def value(self) -> int:
        """Environments made and not yet closed."""
        return self._value

    def add(self, change: int) -> None:
        """Change the count."""
        with self._lock:
            self._value += change


class EnvHost:
    """Owns one environment: it is made, used and closed in one daemon thread, so that a call that hangs blocks nothing else.

    The environment is closed once: by `close`, or, after a call ran past its deadline, as soon as that call returns.
    A close that raises is logged, never passed on.
    """

    def __init__(self, make: Callable[[], ToolEnv], deadline_s: float, live: LiveCount) -> None:
        self._make, self._deadline_s, self._live = make, deadline_s, live
        self._requests: queue.SimpleQueue[tuple[asyncio.Future[Any], Callable[[ToolEnv], Any]] | None] = queue.SimpleQueue()
        self._is_closing = False
        self._closed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._serve, name="env-host", daemon=True).start()

    async def call(self, function: Callable[[ToolEnv], Result]) -> Result:
        """Return `function(env)`; raises what it raised, or EnvTimeoutError after the deadline (the host is then closed)."""
        if self._is_closing:
            raise RuntimeError("an environment host must be open to be called, it was closed or ran past a deadline")
        future: asyncio.Future[Result] = self._loop.create_future()
        self._requests.put((future, function))
        done, _ = await asyncio.wait([future], timeout=self._deadline_s)
        if done:
            return future.result()
        future.cancel()
        self._start_closing()
        raise EnvTimeoutError(f"an environment call must return within {self._deadline_s:g} s, it did not")

    async def close(self) -> None:
        """Close the environment and wait for it, at most for the deadline; may be called again."""
        self._start_closing()
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._closed.wait()
        except TimeoutError:
            logger.warning("an environment must close within %g s, it did not; its thread stays until it does", self._deadline_s)

    def _start_closing(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._requests.put(None)

    def _serve(self) -> None:
        try:
            env, failure = self._make(), None
        except Exception as error:
            env, failure = None, error
        self._live.add(env is not None)
        try:
            while (request := self._requests.get()) is not None:
                self._answer(*request, env, failure)
        finally:
            if env is not None:
                _close_quietly(env)
                self._live.add(-1)
            self._tell(self._closed.set)

    def _answer(
        self, future: asyncio.Future[Any], function: Callable[[ToolEnv], Any], env: ToolEnv | None, failure: Exception | None
    ) -> None:
        """Run one call in the environment's thread; whatever it raises goes to the caller."""
        if env is None:
            self._tell(lambda: None if future.done() else future.set_exception(failure or RuntimeError("no environment")))
            return
        try:
            result = function(env)
        except Exception as error:
            raised = error  # the except clause unbinds its own name
            self._tell(lambda: None if future.done() else future.set_exception(raised))
        else:
            self._tell(lambda: None if future.done() else future.set_result(result))

    def _tell(self, callback: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            logger.debug("the event loop closed before its environment answered")


def _close_quietly(env: ToolEnv) -> None:
    try:
        env.close()
    except Exception:
        logger.exception("an environment raised while it was closed")
