"""The training that a drill disturbs, and the straight run that it is compared with."""

from __future__ import annotations

import shutil
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import yaml

from tasks.ask import ask
from tasks.data import ensure_data
from tasks.plan import check_job
from training.config import JobConfig, load_config
from training.errors import Invalid, RetomaError
from training.parallel.config import ParallelConfig
from training.straight import Segment

BUILT_IN = "training/jobs/mnist_cnn.yaml"
BUILT_IN_CHANGES = ("batch_size=64", "checkpoint.every_steps=5", "checkpoint.max_lost_steps=10")
STEP_SECONDS = 0.1  # that a step of the built-in job waits: long without being busy
DRILLED = "training.jobs.drilled:Drilled"
STRAIGHT_COMMAND = (sys.executable, "-m", "training.straight")
STRAIGHT_SECONDS = 3600.0


@dataclass(frozen=True)
class DrillJob:
    """A training of one range, and how long a step of it waits."""

    config: JobConfig
    data_folder: Path | None
    step_seconds: float
    steps_per_epoch: int

    def drilled(self, folder: Path) -> Path:
        """Write and return the job's file: the same training inside the drilled job, in its folder."""
        folder.mkdir(parents=True, exist_ok=True)
        values = self.config.model_dump(mode="json")
        # a name of its own: on a stack that is in use, a drill must not become a version of the real model
        values |= {"name": f"drill-{self.config.short_name}"[:64], "job": DRILLED}
        values["params"] = {
            "job": self.config.job,
            "params": self.config.params,
            "folder": str(folder),
            "step_seconds": self.step_seconds,
        }
        file = folder / "job.yaml"
        file.write_text(yaml.safe_dump(values, sort_keys=False))
        return file


def built_in_job(root: Path, steps: int, group: ParallelConfig) -> DrillJob:
    """The digits of `make train`, with at least so many steps, by such a group."""
    config = load_config(root / BUILT_IN, BUILT_IN_CHANGES).model_copy(update={"parallel": group})
    return _made(root, config, STEP_SECONDS, steps)


def users_job(root: Path, file: Path, overrides: list[str], *, shrinks: bool = False) -> DrillJob:
    """A job as its file says, with its own number of epochs, in one range.

    Args:
        shrinks: a node of its group will be lost: it goes on with one, unless the job says what is needed.
    """
    config = load_config(file, overrides)
    if shrinks and config.parallel.nodes > 1 and config.parallel.min_nodes is None:
        config = load_config(file, [*overrides, "parallel.min_nodes=1"])
    return _made(root, config, 0.0, None)


def _made(root: Path, config: JobConfig, step_seconds: float, steps: int | None) -> DrillJob:
    if config.checkpoint.bounded is not None:
        raise Invalid("a drill compares bit for bit, and bounded deltas are not exact", hint="unset bounded")
    version = ensure_data(root, config.data) if config.data else None
    folder = root / version.path if version else None
    preflight = check_job(root, config, folder)
    epochs = config.epochs if steps is None else -(-steps // preflight.steps_per_epoch)
    config = config.model_copy(update={"epochs": epochs, "epochs_per_range": epochs, "params": preflight.params})
    return DrillJob(config, folder, step_seconds, preflight.steps_per_epoch)


class Straight:
    """A straight run, in the background: `digest` waits for it.

    Args:
        root: the project's root.
        job: what is trained.
        folder: for its store; the drill removes what else is beside it.
        segments: numbers of ranks to train with, where they have changed.
    """

    def __init__(self, root: Path, job: DrillJob, folder: Path, segments: tuple[Segment, ...] = ()) -> None:
        self._root, self._job, self._folder, self._segments = root, job, folder, segments
        self._digest: str | None = None
        self._error: RetomaError | None = None
        self._thread = threading.Thread(target=self._work, name="retoma-straight", daemon=True)
        self._thread.start()

    def digest(self) -> str:
        """State digest at its end. Raises what it failed with."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._digest is not None  # noqa: S101 - one of both is set
        return self._digest

    def _work(self) -> None:
        question = {
            "config": self._job.config.model_dump(mode="json"),
            "data_folder": str(self._job.data_folder) if self._job.data_folder else None,
            "store_url": str(self._folder),
            "run": "straight",
            "segments": self._segments,
        }
        try:
            answer = ask(STRAIGHT_COMMAND, question, timeout_seconds=STRAIGHT_SECONDS, cwd=self._root)
            self._digest = str(answer["state_digest"])
            shutil.rmtree(self._folder, ignore_errors=True)
        except RetomaError as error:
            self._error = error
