"""The thread that all S3 stores of this process share: an event loop in the background.

Our own and not fsspec's, for two reasons: a call that is interrupted in the waiting thread must be able to cancel
its work *and* wait for the clean-up, and the last save of a script that ends without `close()` must still be able
to look up a host name, when the interpreter's executors take no new jobs any more.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from training.checkpoint import patience

T = TypeVar("T")

CLEANUP_SECONDS = 10.0


class _Shared:
    """What the threads of one process share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.loop: asyncio.AbstractEventLoop | None = None


_shared = _Shared()
# Only the forking thread lives on in the child: the loop's thread does not, nor whoever held the lock.
os.register_at_fork(after_in_child=_shared.__init__)  # type: ignore[misc]


def background_loop() -> asyncio.AbstractEventLoop:
    """The running loop of this process. A forked child gets a new one."""
    with _shared.lock:
        if _shared.loop is None:
            _shared.loop = asyncio.new_event_loop()
            _shared.loop.set_default_executor(_LastCallExecutor(2, "retoma-s3-names"))
            threading.Thread(target=_shared.loop.run_forever, name="retoma-s3", daemon=True).start()
        return _shared.loop


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the loop and wait for it.

    An exception in the waiting thread, KeyboardInterrupt for one, cancels the work and waits until it has cleaned
    up, at most `CLEANUP_SECONDS`.
    """
    ended = threading.Event()

    async def whole() -> T:
        try:
            return await work
        finally:
            ended.set()

    future = asyncio.run_coroutine_threadsafe(whole(), background_loop())
    try:
        return patience.result(future)
    except BaseException:
        if not ended.is_set():
            future.cancel()
            ended.wait(CLEANUP_SECONDS)
        raise


async def all_of(work: Iterator[Coroutine[Any, Any, None]]) -> None:
    """Run side by side. The first error ends the others, and is raised when they have ended."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _LastCallExecutor(ThreadPoolExecutor):
    """Does a job at once, in the calling thread, when the interpreter is on its way out."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            done: Future[T] = Future()
            try:
                done.set_result(fn(*args, **kwargs))
            except OSError as error:
                done.set_exception(error)
            return done
