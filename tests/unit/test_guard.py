"""What ends a training process when nobody else can: its own timer, its parent's death, a newer token."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.staged import staged_config
from tests.unit.test_supervise import Bench, claim_first, gone, spec_of, wait_for
from training.checkpoint.history import read_lineage
from training.checkpoint.store import LocalStore
from training.checkpoint.token import claim, mark_run
from training.errors import Fenced
from training.ports import RangeSpec

ROOT = Path(__file__).parents[2]
TRAINING = [sys.executable, "-m", "training.process"]


class Orphan:
    """A process with nobody who judges it: its supervisor is frozen, or as good as that."""

    def __init__(self, command: list[str], spec: str) -> None:
        self._reading, writing = os.pipe()
        self.process = subprocess.Popen(
            [*command, "--messages", str(writing)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[writing],
            cwd=ROOT,
        )
        os.close(writing)
        assert self.process.stdin is not None
        self.process.stdin.write(spec.encode() + b"\n")
        self.process.stdin.flush()

    def hears(self, kind: str) -> None:
        """Wait for a message of this kind."""
        heard = b""
        while f'"kind":"{kind}"'.encode() not in heard:
            heard += os.read(self._reading, 4096)

    def ends(self, within_seconds: float) -> tuple[int, str]:
        assert self.process.stdout is not None
        assert self.process.wait(within_seconds) is not None
        return self.process.returncode, self.process.stdout.read().decode()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._reading)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


@pytest.fixture
def orphans() -> Iterator[list[Orphan]]:
    started: list[Orphan] = []
    yield started
    for orphan in started:
        orphan.close()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def start_fake(bench: Bench, orphans: list[Orphan], *steps: str) -> Orphan:
    bench.supervise(silence_seconds=0.5)
    orphan = Orphan(bench.command([*steps]), spec_of(bench.order(), claim_first(bench)))
    orphans.append(orphan)
    return orphan


@pytest.mark.parametrize("deed", ["sleep 60", "sleep_holding_the_lock 60"])
def test_a_hang_that_nobody_judges_ends_by_itself_with_its_stack_in_the_log(
    bench: Bench, orphans: list[Orphan], deed: str
) -> None:
    orphan = start_fake(bench, orphans, "restored", "beat 1", deed)
    orphan.hears("beat")
    time.sleep(1.5)
    assert orphan.process.poll() is None, "the supervisor comes first"
    code, output = orphan.ends(10.0)
    assert code == 1
    assert "Timeout (" in output
    assert "fake.py" in output


def test_a_full_log_that_nobody_reads_does_not_keep_it_alive(bench: Bench, orphans: list[Orphan]) -> None:
    orphan = start_fake(bench, orphans, "restored", *["print " + "x" * 1000] * 100)
    orphan.hears("restored")
    assert orphan.process.wait(15.0) == 1


def test_a_zombie_ends_when_it_wakes(bench: Bench, orphans: list[Orphan]) -> None:
    orphan = start_fake(bench, orphans, "restored", *["beat 1", "sleep 0.1"] * 600)
    orphan.hears("beat")
    orphan.process.send_signal(signal.SIGSTOP)
    time.sleep(4.0)
    orphan.process.send_signal(signal.SIGCONT)
    assert orphan.process.wait(2.0) == 1


def test_a_worker_whose_parent_died_before_the_kernel_was_asked_ends_at_once() -> None:
    code = "from training.guard import die_with_parent; import os; die_with_parent(1 + os.getppid()); print('no')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, check=False)
    assert done.returncode == 128 + signal.SIGKILL
    assert done.stdout == b""


def real_spec(folder: Path, **changes: int) -> str:
    store = LocalStore(folder / "store")
    mark_run(store, "r")
    token = claim(store, "r", {})
    config = staged_config(folder, epochs=1000, **changes)
    (folder / "slow-step").write_text("0.05")
    return RangeSpec(run="r", start=0, stop=1000, token=token, store_url=store.url, config=config).model_dump_json()


def test_loader_workers_die_with_a_training_process_that_is_killed(tmp_path: Path, orphans: list[Orphan]) -> None:
    orphans.append(Orphan(TRAINING, real_spec(tmp_path, loader_workers=2)))
    orphans[0].hears("beat")
    training = psutil.Process(orphans[0].process.pid)
    wait_for(lambda: 1 if len(training.children()) == 2 else None)
    workers = [child.pid for child in training.children()]
    training.kill()
    deadline = time.monotonic() + 2.0
    while not all(gone(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_fenced_process_says_so_in_one_line_and_ends_with_its_code(tmp_path: Path, orphans: list[Orphan]) -> None:
    orphans.append(Orphan(TRAINING, real_spec(tmp_path)))
    orphans[0].hears("saved")
    store = LocalStore(tmp_path / "store")
    claim(store, "r", {})
    code, output = orphans[0].ends(5.0)
    assert code == Fenced.exit_code
    assert "token 1 is fenced" in output
    assert "Traceback" not in output
    assert not read_lineage(store).problems
