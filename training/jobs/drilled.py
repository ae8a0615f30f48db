"""Any job, in a drill: its steps are written down, and it can be made to hang or its disk to be slow.

The numbers are those of the job inside. What a signal can do to a process needs none of this; a hang does.

Files in `folder`:
    steps/<pid>          a line for each optimizer step: when it ended, seconds since the epoch; of rank 0 alone
    ranks/<rank>         the newest process that is this rank of a group
    orders/<pid>.hang, orders/<pid>.hang-gil    hang after this step, without or with the interpreter's lock;
                         `<name>.begun` appears when it does
    orders/slow-disk     while it exists, each fsync takes a second longer
    orders/hurry         while it exists, steps do not wait `step_seconds`
    orders/leave         a number: each process asks itself to leave after so many steps
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from training.config import JOB_PATTERN
from training.job import Job, Params, load_job

SLOW_SECONDS = 1.0
_fsync = os.fsync


class DrilledParams(Params):
    """The job inside, and the drill's folder."""

    job: str = Field(pattern=JOB_PATTERN, description="import path of the job inside")
    params: dict[str, Any] = Field(default_factory=dict, description="its own parameters")
    folder: str = Field(min_length=1, description="of the drill; steps and orders lie there")
    step_seconds: float = Field(0.0, ge=0, description="each step waits so long, to be slow without being busy")


class Drilled(Job[DrilledParams]):
    """Passes everything on to the job inside."""

    Params: ClassVar[type[Params]] = DrilledParams

    def __init__(self, params: DrilledParams, data: Path | None) -> None:
        super().__init__(params, data)
        self.inside = load_job(params.job, params.params, data)
        self.orders = Path(params.folder) / "orders"
        self.steps = Path(params.folder) / "steps" / str(os.getpid())
        self._rank = os.environ.get("RANK")
        self._out: int | None = None
        self._left: int | None = None  # steps until it leaves

    def model(self) -> nn.Module:
        """The model of the job inside."""
        return self.inside.model()

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Its optimizer, which tells of each step."""
        optimizer = self.inside.optimizer(model)
        optimizer.register_step_post_hook(self._stepped)
        return optimizer

    def scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler | None:
        """Its scheduler."""
        return self.inside.scheduler(optimizer, total_steps)

    def train_data(self) -> Dataset[Any]:
        """Its data."""
        return self.inside.train_data()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Its loss."""
        return self.inside.loss(model, batch)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Its blocks."""
        return self.inside.blocks(model)

    def tensor_plan(self, model: nn.Module) -> dict[str, Any]:
        """Its plan."""
        return self.inside.tensor_plan(model)

    def sequence_plan(self, model: nn.Module, ranks: int) -> dict[str, Any]:
        """Its plan that shares the sequence, too."""
        return self.inside.sequence_plan(model, ranks)

    def stages(self, model: nn.Module, count: int) -> list[nn.Module]:
        """Its stages."""
        return self.inside.stages(model, count)

    def inputs(self, batch: Any) -> Tensor | tuple[Tensor, ...]:
        """Its inputs."""
        return self.inside.inputs(batch)

    def loss_of(self, output: Any, batch: Any) -> Tensor:
        """Its loss of an output."""
        return self.inside.loss_of(output, batch)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Its metrics."""
        return self.inside.evaluate(model)

    def _stepped(self, *_: Any) -> None:
        if self._out is None:  # the first step: this process trains, and does not only check or evaluate
            self._out = self._open()
            self._left = self._number("leave")
            os.fsync = self._maybe_slow_fsync
        with contextlib.suppress(OSError):  # a disk that is full is the store's matter
            os.write(self._out, f"{time.time():.4f}\n".encode())
        if self.params.step_seconds and not self._is_ordered("hurry"):
            time.sleep(self.params.step_seconds)
        if self._left is not None:
            self._left -= 1
            if self._left == 0:  # as a node that is about to go: all ranks commit this step
                os.kill(os.getpid(), signal.SIGTERM)
        if self._takes(f"{os.getpid()}.hang"):
            threading.Event().wait()
        if self._takes(f"{os.getpid()}.hang-gil"):
            _wait_for_ever_with_the_lock()

    def _open(self) -> int:
        """Where the times of the steps go."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        if self._rank is not None:
            file = self.steps.parent.with_name("ranks") / self._rank
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(str(os.getpid()))
        if self._rank not in (None, "0"):  # the ranks of a group step together
            return os.open(os.devnull, flags)
        self.steps.parent.mkdir(parents=True, exist_ok=True)
        return os.open(self.steps, flags, 0o644)

    def _takes(self, name: str) -> bool:
        """Whether it is ordered; it is marked as begun then."""
        if not self._is_ordered(name):
            return False
        (self.orders / f"{name}.begun").touch()
        return True

    def _is_ordered(self, name: str) -> bool:
        return (self.orders / name).exists()

    def _number(self, name: str) -> int | None:
        return int((self.orders / name).read_text()) if self._is_ordered(name) else None

    def _maybe_slow_fsync(self, fd: Any) -> None:
        if self._is_ordered("slow-disk"):
            time.sleep(SLOW_SECONDS)
        _fsync(fd)


def _wait_for_ever_with_the_lock() -> None:
    """Lock a mutex twice, in C, with the interpreter's lock held. Unlike a sleep, no signal ends that."""
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)
