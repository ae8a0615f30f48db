"""F18: the preemption save never fires. Here SIGTERM ends in a committed state, or leaves the last one valid."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tasks.order import finished
from tasks.supervise import Child
from tests.support.staged import STEPS_PER_EPOCH, staged_config
from training.checkpoint.history import read_lineage
from training.checkpoint.manifest import Position
from training.checkpoint.store import LocalStore, MemoryStore
from training.checkpoint.token import claim, mark_run
from training.config import JobConfig
from training.errors import Preempted
from training.ports import EVALUATION_DUE, Beat, Failed, Message, RangeSpec, decode_message
from training.session import train_range

COMMAND = (sys.executable, "-m", "training.process")
EXEC = ("sh", "-c", 'exec "$@"', "sh")
SHELL_THAT_STAYS = ("sh", "-c", '"$@"; exit $?', "sh")
ROOT = Path(__file__).parents[2]


class Scene:
    """A run in a folder, and at most one training process at it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, LocalStore(folder / "store")
        self.config = staged_config(folder)
        self._process: subprocess.Popen[bytes] | None = None

    def slow(self, **seconds: float) -> None:
        for name, value in seconds.items():
            (self.folder / f"slow-{name}").write_text(str(value))

    def fast(self) -> None:
        for file in self.folder.glob("slow-*"):
            file.unlink()

    def spec(self) -> str:
        mark_run(self.store, "r")
        token = claim(self.store, "r", {})
        spec = RangeSpec(run="r", start=0, stop=2, token=token, store_url=self.store.url, config=self.config)
        return spec.model_dump_json()

    def start(self, launcher: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        reading, writing = os.pipe()
        self._process = subprocess.Popen(
            [*launcher, *COMMAND, "--messages", str(writing)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[writing],
            cwd=ROOT,
        )
        os.close(writing)
        self._messages = os.fdopen(reading, "rb")
        assert self._process.stdin is not None
        self._process.stdin.write(self.spec().encode() + b"\n")
        self._process.stdin.flush()
        return self._process

    def messages(self) -> Iterator[Message]:
        return map(decode_message, self._messages)

    def reaches(self, stage: str) -> None:
        """Wait until it is in the middle of this."""
        deadline = time.monotonic() + 60
        while not (self.folder / f"in-{stage}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def ends_preempted(self, within_seconds: float) -> str:
        """Its exit code, its last word, and the time that it took. Returns the word."""
        assert self._process is not None
        asked = time.monotonic()
        last = list(self.messages())[-1]
        assert self._process.wait(10) == Preempted.exit_code
        assert time.monotonic() - asked < within_seconds
        assert isinstance(last, Failed)
        assert last.error == "Preempted"
        return last.message

    def position(self) -> Position | None:
        head = read_lineage(self.store).head
        return head.manifest.position if head else None

    def goes_on_like_the_straight_run(self) -> None:
        """The next attempt ends with the same bits, and with each step's metrics once."""
        self.fast()
        done = train_range(self.config, self.store, "r")
        assert done.state_digest == straight(self.config)
        lineage = read_lineage(self.store)
        assert not lineage.problems
        points = [point for committed in lineage.chain for point in committed.manifest.metrics]
        assert [p.step for p in points if "train/loss" in p.values] == list(range(1, 2 * STEPS_PER_EPOCH + 1))
        assert [p.step for p in points if "eval/one" in p.values] == [STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH]

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._messages.close()
            if self._process.stdin is not None:
                self._process.stdin.close()


def straight(config: JobConfig) -> str:
    return train_range(config, MemoryStore(), "straight").state_digest


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.close()


def at_a_beat(scene: Scene, step: int) -> None:
    next(m for m in scene.messages() if isinstance(m, Beat) and m.position.step >= step)


@pytest.mark.parametrize("launcher", [(), EXEC], ids=["direct", "exec"])
def test_sigterm_in_a_step_twice_commits_that_step(scene: Scene, launcher: tuple[str, ...]) -> None:
    scene.slow(step=0.4)
    process = scene.start(launcher)
    at_a_beat(scene, 3)
    time.sleep(0.1)
    process.terminate()
    time.sleep(0.1)
    process.terminate()
    assert "step 4 is committed" in scene.ends_preempted(within_seconds=5)
    position = scene.position()
    assert position is not None
    assert position.step == 4
    scene.goes_on_like_the_straight_run()


def test_sigterm_in_an_evaluation_gives_it_up_and_the_next_attempt_makes_up_for_it(scene: Scene) -> None:
    scene.slow(evaluation=60)
    process = scene.start()
    scene.reaches("evaluation")
    process.terminate()
    scene.ends_preempted(within_seconds=5)
    head = read_lineage(scene.store).head
    assert head is not None
    assert (head.manifest.position.epoch, head.manifest.position.step) == (1, STEPS_PER_EPOCH)
    assert head.manifest.meta[EVALUATION_DUE] is True
    assert finished(scene.store, "r", 1) is None, "a range is not done without its evaluation"
    scene.goes_on_like_the_straight_run()
    assert finished(scene.store, "r", 2) is not None


def test_a_sigterm_that_is_lost_in_the_interpreter_is_said_again(scene: Scene) -> None:
    scene.slow(evaluation=60)
    (scene.folder / "deaf").touch()
    process = scene.start()
    scene.reaches("evaluation")
    process.terminate()
    scene.ends_preempted(within_seconds=8)
    assert not (scene.folder / "deaf").exists()
    scene.goes_on_like_the_straight_run()


def test_sigterm_in_an_upload_commits_what_came_after_it_too(scene: Scene) -> None:
    scene.slow(upload=1, step=0.1)
    process = scene.start()
    scene.reaches("upload")
    process.terminate()
    message = scene.ends_preempted(within_seconds=8)
    position = scene.position()
    assert position is not None
    assert f"step {position.step} is committed" in message
    scene.goes_on_like_the_straight_run()


def test_sigterm_in_a_restore_leaves_at_once(scene: Scene) -> None:
    train_range(staged_config(scene.folder), scene.store, "r", stop=1)
    before = scene.position()
    scene.slow(restore=60)
    process = scene.start()
    scene.reaches("restore")
    process.terminate()
    assert "before the first step" in scene.ends_preempted(within_seconds=3)
    scene.fast()
    assert scene.position() == before
    scene.goes_on_like_the_straight_run()


def test_sigkill_two_seconds_after_sigterm_leaves_the_last_checkpoint(scene: Scene) -> None:
    scene.slow(step=0.1)
    process = scene.start()
    at_a_beat(scene, 5)
    scene.slow(upload=60)
    scene.reaches("upload")
    before = scene.position()
    process.terminate()
    time.sleep(2)
    assert process.poll() is None
    process.kill()
    process.wait()
    assert before is not None
    assert scene.position() == before
    scene.goes_on_like_the_straight_run()


def test_a_shell_that_stays_in_between_swallows_no_wish_of_the_supervisor(scene: Scene) -> None:
    scene.slow(step=0.1)

    def hear(message: Message) -> None:
        if isinstance(message, Beat) and message.position.step >= 3:
            raise KeyboardInterrupt

    child = Child(
        (*SHELL_THAT_STAYS, *COMMAND),
        scene.spec(),
        on_message=once(hear),
        show=lambda _: None,
        limits=scene.config.supervisor,
        cwd=ROOT,
    )
    with pytest.raises(KeyboardInterrupt):
        child.run()
    assert child.ending is not None
    assert child.ending.returncode == Preempted.exit_code
    assert child.ending.failed is not None
    assert "is committed" in child.ending.failed.message
    position = scene.position()
    assert position is not None
    assert position.step >= 3
    scene.goes_on_like_the_straight_run()


def once(hear: Callable[[Message], None]) -> Callable[[Message], None]:
    """What raises does it once, as a signal does."""
    raised = False

    def guarded(message: Message) -> None:
        nonlocal raised
        if not raised:
            try:
                hear(message)
            except BaseException:
                raised = True
                raise

    return guarded
