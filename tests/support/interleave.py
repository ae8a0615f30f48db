"""Every order in which the store operations of several attempts can happen, on the real protocol code.

An attempt is a plain function over a store. Its local state is the list of results that its operations have had so
far: run it again with those results, and it stops at the next operation. A global state is the store's content and
those lists; states that were seen are not explored again. That nobody takes another step is a crash of everyone,
so checking every state checks a kill between any two store operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from training.checkpoint.manifest import Ref
from training.checkpoint.store import Buffer, MemoryStore, NotFound, ObjectInfo
from training.errors import RetomaError

Attempt = Callable[[Any, list[Ref]], None]  # (store, acknowledged): appends what was acknowledged to it


class _Pending(BaseException):
    """The attempt has come to an operation that has not been run yet."""

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments = name, arguments


class _ReplayStore:
    """Answers from recorded results; the first question beyond them ends the run."""

    url = "memory://replay"

    def __init__(self, results: Sequence[Any]) -> None:
        self._results = iter(results)

    def _next(self, name: str, *arguments: Any) -> Any:
        try:
            result = next(self._results)
        except StopIteration:
            raise _Pending(name, arguments) from None
        if isinstance(result, NotFound):
            raise NotFound(result.message, key=result.key)
        return result

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        self._next("put", key, tuple(bytes(p) for p in parts))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return bool(self._next("put_if_absent", key, data))

    def get(self, key: str) -> bytes:
        return bytes(self._next("get", key))

    def read(self, key: str, offset: int, length: int) -> bytes:
        return bytes(self._next("read", key, offset, length))

    def exists(self, key: str) -> bool:
        return bool(self._next("exists", key))

    def list(self, prefix: str) -> list[ObjectInfo]:
        return list(self._next("list", prefix))

    def delete(self, key: str) -> None:
        self._next("delete", key)


@dataclass(frozen=True)
class State:
    """One global state."""

    objects: tuple[tuple[str, bytes], ...]
    results: tuple[tuple[Any, ...], ...]  # of each attempt

    def store(self) -> MemoryStore:
        """A copy of the store at this moment."""
        store = MemoryStore()
        for key, data in self.objects:
            store.put_if_absent(key, data)
        return store


def explore(attempts: Sequence[Attempt], check: Callable[[State, list[Ref], bool], None]) -> int:
    """Visit every reachable state.

    Args:
        attempts: run side by side.
        check: called with each state, everything acknowledged so far, and whether all attempts have ended.

    Returns:
        The number of distinct states.
    """
    start = State((), tuple(() for _ in attempts))
    seen, todo = {_fingerprint(start)}, [start]
    while todo:
        state = todo.pop()
        acknowledged: list[Ref] = []
        running = 0
        for number, attempt in enumerate(attempts):
            pending = _advance(attempt, state.results[number], acknowledged)
            if pending is None:
                continue
            running += 1
            following = _apply(state, number, pending)
            fingerprint = _fingerprint(following)
            if fingerprint not in seen:
                seen.add(fingerprint)
                todo.append(following)
        check(state, acknowledged, running == 0)
    return len(seen)


def _advance(attempt: Attempt, results: Sequence[Any], acknowledged: list[Ref]) -> _Pending | None:
    try:
        attempt(_ReplayStore(results), acknowledged)
    except _Pending as pending:
        return pending
    except RetomaError:
        return None  # the attempt has ended by an error, Fenced as a rule
    return None


def _apply(state: State, number: int, pending: _Pending) -> State:
    store = state.store()
    try:
        result: Any = getattr(store, pending.name)(*pending.arguments)
    except NotFound as error:
        result = error
    if isinstance(result, list):
        result = tuple(result)
    objects = tuple((key, store.get(key)) for key, _ in store.list(""))
    results = list(state.results)
    results[number] = (*results[number], result)
    return State(objects, tuple(results))


def _fingerprint(state: State) -> int:
    plain = tuple(tuple(str(r) if isinstance(r, NotFound) else r for r in results) for results in state.results)
    return hash((state.objects, plain))
