"""The copy of tensors into host buffers, shared out among whoever has time for it."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from training.checkpoint.state.overlap import CHANGE_ROWS_ONLY, Promised, changing_rows
from training.errors import Invalid

COPY_THREADS = max(1, min(4, os.cpu_count() or 1))  # one core does not use up the bandwidth of the memory
PIECE_BYTES = 8 * 1024 * 1024
_AS_BYTES = {torch.bool}
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Part:
    """A tensor, its place in a buffer, and the promise that it stays as it is until it is copied.

    Attributes:
        version: of the promised tensor when the copy began.
    """

    key: str
    target: torch.Tensor
    source: torch.Tensor
    promised: Promised | None = None
    version: int = 0


class Copying:
    """Tensors on their way into host buffers. Every thread that calls `finish` takes a share of the work."""

    def __init__(self, parts: Iterable[Part] = ()) -> None:
        self._parts = tuple(parts)
        self._pieces = deque(_pieces((part.target, part.source) for part in self._parts))
        self._ready = {  # the sources are valid when the work queued before now is done
            device: torch.cuda.current_stream(device).record_event()
            for device in {source.device for piece in self._pieces for _, source in piece if source.is_cuda}
        }
        self._left = len(self._pieces)
        self._aside: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._in_steps: set[str] = set()  # keys of what a step has changed since, in rows that are set aside
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._error: BaseException | None = None
        if not self._left:
            self._done.set()

    def finish(self) -> None:
        """Help, and return when everything is copied.

        Raises:
            Invalid: a promise was broken, and the copy may be of two moments.
        """
        self._help()
        self._done.wait()
        if self._error is not None:
            raise self._error

    def share(self, helpers: ThreadPoolExecutor) -> None:
        """Like `finish`, with the threads of `helpers` beside this one, if there is enough to copy."""
        for _ in range(min(COPY_THREADS, len(self._pieces)) - 1):
            helpers.submit(self._help)
        self.finish()

    def let_step(self, *, gradients_stay: bool) -> None:
        """Return when the next step of the tensors' optimizer may be taken. An error is left to `finish`.

        Where the step changes some rows only, their values are set aside, and the copy goes on.
        """
        with self._lock:
            if self._done.is_set() or (gradients_stay and self._set_aside()):
                return
        self._help()
        self._done.wait()

    def _set_aside(self) -> bool:
        changing = []
        for part in self._parts:
            rows = changing_rows(part.promised) if part.promised else None
            if rows is None:
                return False
            changing.append((part, rows))
        self._check()
        for part, rows in changing:
            if len(rows):
                values = part.source.index_select(0, rows)
                self._aside.append((part.target, rows.to(part.target.device), values.to(part.target.device)))
                self._in_steps.add(part.key)
        return True

    def _help(self) -> None:
        while True:
            try:
                piece = self._pieces.popleft()
            except IndexError:
                return
            try:
                _copy(piece, self._ready)
            except BaseException as error:  # noqa: BLE001 - raised by `finish`, in whichever thread
                self._error = error
            with self._lock:
                self._left -= 1
                if not self._left:
                    self._end()

    def _end(self) -> None:
        try:
            self._check()
            for target, rows, values in reversed(self._aside):  # the first value of a row is that of the save
                target.index_copy_(0, rows, values)
        except BaseException as error:  # noqa: BLE001 - as above
            self._error = error
        self._aside.clear()
        self._done.set()

    def _check(self) -> None:
        changed = [
            part.key
            for part in self._parts
            if part.promised and part.key not in self._in_steps and part.promised.tensor._version != part.version
        ]
        if changed and self._error is None:
            self._error = Invalid(
                f"{changed[0]} was changed between `save` and the next step of its optimizer, while it was copied"
                + (f"; so were {len(changed) - 1} more" if len(changed) > 1 else ""),
                hint="parameters may change in the optimizer's step only: do not call overlap(), "
                "or set checkpoint.overlap_copy=false",
            )


class Copyings:
    """The copy of one state that goes on beside the training: a share for each optimizer, one for all others."""

    def __init__(self, parts: Iterable[Part] = ()) -> None:
        shares: dict[Optimizer | None, list[Part]] = {}
        for part in parts:
            shares.setdefault(part.promised.owner if part.promised else None, []).append(part)
        last = sorted(shares, key=lambda owner: type(owner) in CHANGE_ROWS_ONLY)  # no step waits for those
        self._of = {owner: Copying(shares[owner]) for owner in last}
        self.waited_seconds = 0.0

    def finish(self) -> None:
        """See `Copying.finish`."""
        for copying in self._of.values():
            copying.finish()

    def let_step(self, optimizer: Optimizer, *, gradients_stay: bool) -> None:
        """See `Copying.let_step`. What no optimizer owns may change after any step."""
        started = time.perf_counter()
        for owner in (optimizer, None):
            if owner in self._of:
                self._of[owner].let_step(gradients_stay=gradients_stay)
        self.waited_seconds += time.perf_counter() - started


def _copy(piece: list[Pair], ready: Mapping[torch.device, torch.cuda.Event]) -> None:
    device = piece[0][1].device
    if device.type != "cuda":
        _copy_all(piece)
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        stream.wait_event(ready[device])
        _copy_all(piece, non_blocking=True)
    stream.synchronize()


def _copy_all(pairs: list[Pair], *, non_blocking: bool = False) -> None:
    targets, sources = (list(side) for side in zip(*pairs, strict=True))
    with torch.no_grad():  # one call for all: a thousand small copies are mostly Python otherwise
        torch._foreach_copy_(targets, sources, non_blocking=non_blocking)  # resolves conj and neg views


def _pieces(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """About `PIECE_BYTES` each, of one device; a tensor that is larger is cut along its first dimension."""
    pieces: dict[torch.device, list[list[Pair]]] = {}
    room: dict[torch.device, int] = {}
    for target, source in pairs:
        if source.dtype in _AS_BYTES:  # a copy of bools turns every true one into 1
            target, source = target.view(torch.uint8), source.view(torch.uint8)  # noqa: PLW2901
        of_device = pieces.setdefault(source.device, [[]])
        left = room.setdefault(source.device, PIECE_BYTES)
        while target.nbytes > left and target.dim() and target.shape[0] > 1:
            rows = min(max(1, left * target.shape[0] // target.nbytes), target.shape[0] - 1)
            of_device[-1].append((target[:rows], source[:rows]))
            target, source = target[rows:], source[rows:]  # noqa: PLW2901 - the rest of it
            of_device.append([])
            left = PIECE_BYTES
        of_device[-1].append((target, source))
        left -= target.nbytes
        if left <= 0:
            of_device.append([])
            left = PIECE_BYTES
        room[source.device] = left
    return [piece for of_device in pieces.values() for piece in of_device if piece]
