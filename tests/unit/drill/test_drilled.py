"""The drilled job: the numbers of the job inside, a line for each step, and hangs on order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.cuts import mnist_config, write_digits
from training.checkpoint.store import MemoryStore
from training.config import JobConfig
from training.session import train_range

ROOT = Path(__file__).parents[3]


def drilled(config: JobConfig, folder: Path, step_seconds: float = 0.0) -> JobConfig:
    params = {"job": config.job, "params": config.params, "folder": str(folder), "step_seconds": step_seconds}
    return config.model_copy(update={"job": "training.jobs.drilled:Drilled", "params": params})


def test_the_numbers_are_those_of_the_job_inside(tmp_path: Path) -> None:
    digits = write_digits(tmp_path / "digits")
    config = mnist_config(epochs=1)
    straight = train_range(config, MemoryStore("a"), "run", data_folder=digits)
    inside = train_range(drilled(config, tmp_path), MemoryStore("b"), "run", data_folder=digits)
    assert inside.state_digest == straight.state_digest
    lines = (tmp_path / "steps" / str(os.getpid())).read_text().splitlines()
    assert len(lines) == straight.position.step
    assert [float(line) for line in lines] == sorted(float(line) for line in lines)


HANG = """
import sys
from pathlib import Path
from tests.support.cuts import mnist_config
from tests.unit.drill.test_drilled import drilled
from training.checkpoint.store import MemoryStore
from training.session import train_range
folder = Path(sys.argv[1])
train_range(drilled(mnist_config(epochs=50), folder, 0.02), MemoryStore("a"), "run", data_folder=folder / "digits")
"""


@pytest.mark.parametrize("kind", ["hang", "hang-gil"])
def test_it_hangs_on_order_and_signals_do_not_wake_it(tmp_path: Path, kind: str) -> None:
    write_digits(tmp_path / "digits")
    process = subprocess.Popen([sys.executable, "-c", HANG, str(tmp_path)], cwd=ROOT)
    try:
        steps = tmp_path / "steps" / str(process.pid)
        wait_until(lambda: steps.exists() and len(steps.read_text().splitlines()) > 3)
        (tmp_path / "orders").mkdir()
        (tmp_path / "orders" / f"{process.pid}.{kind}").touch()
        wait_until((tmp_path / "orders" / f"{process.pid}.{kind}.begun").exists)
        process.send_signal(signal.SIGCONT)
        done = steps.read_text()
        time.sleep(0.7)
        assert steps.read_text() == done
        assert process.poll() is None
        assert psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING
    finally:
        process.kill()
        process.wait(10)


def wait_until(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
