"""One range of a slow training, started as flow runs of its deployment, and what can be done to it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil

from infra.servers import ask
from infra.settings import Settings
from tasks.data import ensure_data
from tasks.order import RangeOrder
from training.checkpoint.history import head_ref, read_lineage, sequences
from training.checkpoint.manifest import Ref
from training.checkpoint.store import open_store
from training.checkpoint.token import Seal, claim, seal
from training.config import CheckpointConfig, JobConfig, digest_of

T = TypeVar("T")
FINAL = ("COMPLETED", "CRASHED", "CANCELLED", "FAILED")


class Range:
    """One range as flow runs of its deployment, seen by raw requests; the processes by the claims in the store."""

    def __init__(self, settings: Settings, folder: Path, epochs: int) -> None:
        ports = settings.ports()
        assert ports is not None
        data = ensure_data(settings.home, "data/mnist")
        self._port = ports.prefect
        self.run = f"unwanted-{os.urandom(4).hex()}"
        self.store = open_store(folder / self.run)
        inside = {"job": "training.jobs.mnist_cnn:MnistCnn", "folder": str(folder / "drill"), "step_seconds": 0.05}
        config = JobConfig(
            job="training.jobs.drilled:Drilled",
            epochs=epochs,
            epochs_per_range=epochs,
            batch_size=100,
            params=inside,
            data=data.path,
            checkpoint=CheckpointConfig(every_steps=4),
        )
        self._order = RangeOrder(
            run=self.run,
            start=0,
            stop=epochs,
            attempt=1,
            config=config,
            requested=digest_of(config.identity()),
            store_url=str(folder / self.run),
            data_version=data,
        )
        self.flow_run_id = ""

    def start(self, attempt: int = 1) -> None:
        """Have the worker start an attempt."""
        deployment = self._ask("GET", "deployments/name/train-range/gpu")
        order = self._order.model_copy(update={"attempt": attempt}).model_dump(mode="json")
        name = f"{self.run}-a{attempt}"
        body = {
            "parameters": {"order": order},
            "name": name,
            "idempotency_key": name,
            "state": {"type": "SCHEDULED"},
        }
        made = self._ask("POST", f"deployments/{deployment['id']}/create_flow_run", body)
        self.flow_run_id = made["id"]

    def state(self) -> dict[str, Any]:
        """The flow run's state now; its id changes whenever anybody sets one."""
        found: dict[str, Any] = self._ask("GET", f"flow_runs/{self.flow_run_id}")["state"]
        return found

    def set_state(self, state_type: str, message: str) -> None:
        """As an automation or another parent does it. It kills nothing."""
        body = {"state": {"type": state_type, "message": message}, "force": True}
        self._ask("POST", f"flow_runs/{self.flow_run_id}/set_state", body)

    def ended(self) -> dict[str, Any] | None:
        """The state, when it is final."""
        state = self.state()
        return state if state["type"] in FINAL else None

    def processes(self, token: int) -> tuple[psutil.Process, psutil.Process]:
        """Supervisor and training process, once the token has committed twice."""

        def look() -> tuple[psutil.Process, psutil.Process] | None:
            assert (state := self.ended()) is None, state
            if len(sequences(self.store, token)) < 2:
                return None
            attempt = read_lineage(self.store).attempts[token - 1]
            assert attempt.claim is not None
            supervisor = psutil.Process(attempt.claim.who["pid"])
            found = [p for p in supervisor.children() if "training.process" in " ".join(p.cmdline())]
            return (supervisor, found[0]) if found else None

        return wait_for(look)

    def take_over(self, token: int) -> Ref | None:
        """What the next attempt does to the store. Returns the head that it starts from."""
        assert claim(self.store, self.run, {"test": "the replacement"}) == token
        head = head_ref(self.store)
        seal(self.store, Seal(run=self.run, token=token, head=head))
        return head

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        return ask(self._port, method, f"/api/{path}", body)


def end_all(found: Range) -> None:
    """Kill what still runs of it."""
    for attempt in read_lineage(found.store).attempts:
        with suppress(psutil.Error, KeyError):
            psutil.Process((attempt.claim.who if attempt.claim else {})["pid"]).kill()


def dies_within(process: psutil.Process, seconds: float) -> bool:
    """A zombie is dead: it waits for its parent, which may be frozen."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)


def wait_for(look: Callable[[], T | None], timeout_seconds: float = 60) -> T:
    deadline = time.monotonic() + timeout_seconds
    while (found := look()) is None:
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.03)
    return found
