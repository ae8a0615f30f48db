"""The supervisor against a process that speaks the protocol and misbehaves in every way we know."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.beat import Progress
from tasks.ask import ask
from tasks.ending import Ending, count_oom_kills, oom_kill_files
from tasks.order import RangeOrder, RangeResult
from tasks.range import RangeSupervisor
from tasks.relay import LineSplitter, Relay
from tasks.supervise import Child
from training.checkpoint.end import read_ends
from training.checkpoint.history import read_lineage
from training.checkpoint.store import open_store
from training.checkpoint.token import claim, mark_run
from training.config import JobConfig, SupervisorConfig, digest_of
from training.errors import Corrupt, Diverged, Fenced, Invalid, Preempted, RetomaError, Unavailable
from training.ports import Message, Restored

ROOT = Path(__file__).parents[2]

# A training process without torch. `script` is a list of steps for each token, the last one for all later ones.
FAKE = """
import ctypes, json, os, signal, subprocess, sys, threading, time
from pathlib import Path
sys.path.insert(0, {root!r})
from training.checkpoint.document import digest
from training.checkpoint.manifest import Manifest, Position, Ref, encode_manifest
from training.checkpoint.store import open_store
from training.checkpoint.history import head_ref
from training.checkpoint.token import Seal, check_not_fenced, seal
from training.errors import KINDS
from training.guard import die_with_parent, watch_lifeline
from training.ports import *
from training.voice import Voice

out = os.fdopen(int(sys.argv[sys.argv.index("--messages") + 1]), "wb", buffering=0)
die_with_parent()
spec = RangeSpec.model_validate_json(sys.stdin.buffer.raw.readline())
voice = Voice(out, spec.config.supervisor)
signal.signal(signal.SIGTERM, voice.on_sigterm)
watch_lifeline(0)
say = voice.say
say(Pause(what="starting", allowance_seconds=spec.config.supervisor.start_seconds))
store = open_store(spec.store_url)
head = head_ref(store)
seal(store, Seal(run=spec.run, token=spec.token, head=head))
where = Position()
scripts = json.loads(Path({script!r}).read_text())
for step in scripts[min(spec.token, len(scripts)) - 1]:
    word, _, rest = step.partition(" ")
    if word == "restored":
        say(Restored(checkpoint=head, position=where, seconds=0, total_steps=100, steps_per_epoch=50))
    elif word == "beat":
        step, _, seconds = rest.partition(" ")
        at = Position(epoch=0, step=int(step))
        say(Beat(position=at, loss=1.0, samples_per_second=10.0, step_seconds=float(seconds or 0)))
    elif word == "pause":
        what, _, seconds = rest.partition(" ")
        say(Pause(what=what, allowance_seconds=float(seconds)))
    elif word == "save":
        at = int(rest)
        number = head.sequence + 1 if head else 0
        manifest = Manifest(run=spec.run, token=spec.token, sequence=number, kind="base", parent=head,
            position=Position(epoch=at // 50, step=at), layout_digest="x", values=[],
            chunk_count=0, state_digest="s")
        data, head = encode_manifest(manifest)
        assert store.put_if_absent(manifest.key, data)
        say(Saved(checkpoint=head, checkpoint_kind="base", position=manifest.position, written_bytes=10,
            state_bytes=100, stall_seconds=0.001))
    elif word == "done":
        say(Done(checkpoint=head, position=Position(epoch=spec.stop, step=100), state_digest="s"))
    elif word == "slow":
        rank, _, over = rest.partition(" ")
        say(Slow(rank=int(rank), since_step=4, over=bool(over), excess_seconds=0.1, step_seconds=0.3))
    elif word == "profiled":
        path = Path(spec.profile_folder) / f"rank-{{rest}}.json.gz"
        path.touch()
        say(Profiled(rank=int(rest), path=str(path)))
    elif word == "fail":
        kind, _, message = rest.partition(" ")
        message, _, report = message.partition(" | ")
        say(Failed(error=kind, message=message, hint="look", report=report or None))
        sys.exit(KINDS[kind].exit_code if kind in KINDS else 1)
    elif word == "garbage":
        out.write(b'{{"kind": "boast"}}\\n' + b"\\xff" * 100 + b"\\n")
    elif word == "print":
        print(rest, flush=True)
    elif word == "kill":
        os.kill(os.getpid(), signal.Signals[rest])
    elif word == "ignore":
        signal.signal(signal.Signals[rest], signal.SIG_IGN)
    elif word == "exit":
        os._exit(int(rest))
    elif word == "grandchild":
        Path(rest).write_text(str(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid))
    elif word == "pid":
        Path(rest + ".tmp").write_text(str(os.getpid()))
        os.replace(rest + ".tmp", rest)
    elif word == "sleep":
        time.sleep(float(rest))
    elif word == "sleep_holding_the_lock":
        ctypes.PyDLL(None).sleep(int(rest))
"""


class Notes:
    """A publisher that remembers."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.ended: list[tuple[int, str, str]] = []
        self.notified = 0
        self.profiles: list[str] = []

    def attempt_started(self, token: int, start: int, stop: int, who: Mapping[str, Any]) -> None:
        self.started.append(token)

    def attempt_ended(self, token: int, status: str, reason: str) -> None:
        self.ended.append((token, status, reason))

    def notify(self) -> None:
        self.notified += 1

    def profiled(self, path: str) -> None:
        self.profiles.append(path)


class Bench:
    """A store, a script for the fake process, and what came out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = open_store(folder / "store")
        self.notes = Notes()
        self.progress: list[Progress] = []
        self.fake = folder / "fake.py"
        self.config = JobConfig(job="some.module:Job", epochs=2)

    def command(self, *scripts: list[str]) -> list[str]:
        (self.folder / "script.json").write_text(json.dumps(scripts))
        code = FAKE.format(root=str(ROOT), script=str(self.folder / "script.json"))
        self.fake.write_text(code)
        return [sys.executable, str(self.fake)]

    def order(self, stop: int = 2) -> RangeOrder:
        return RangeOrder(
            run="r",
            start=0,
            stop=stop,
            attempt=1,
            config=self.config,
            requested=digest_of(self.config.identity()),
            store_url=str(self.folder / "store"),
        )

    def run(self, *scripts: list[str], registry: Any = None, stop: int = 2) -> RangeResult:
        return RangeSupervisor(
            order=self.order(stop),
            root=self.folder,
            flow_run_id="f",
            registry=registry,
            publisher=self.notes,
            on_progress=self.progress.append,
            logger=logging.getLogger("test"),
            command=self.command(*scripts),
            profile_folder=self.folder,
        ).run()

    def supervise(self, **changes: Any) -> None:
        values = self.config.supervisor.model_dump() | changes
        self.config = self.config.model_validate(self.config.model_dump() | {"supervisor": values})


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    before = set(psutil.Process().children(recursive=True))  # other tests of this process have a fork server
    yield Bench(tmp_path)
    assert not set(psutil.Process().children(recursive=True)) - before


def test_a_range_that_goes_well_is_done_after_one_try(bench: Bench) -> None:
    result = bench.run(["restored", "beat 10", "save 50", "save 100", "done"])
    assert (result.tries, result.position.epoch, result.checkpoint.token) == (1, 2, 1)
    assert bench.notes.ended == [(1, "FINISHED", "done")]
    assert bench.notes.notified == 3
    assert bench.progress[-1].phase == "done"
    assert bench.progress[-1].checkpoint_kind == "base"


def test_a_slow_rank_is_logged_once_and_shown_until_it_is_over(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.run(["restored", "slow 1", "beat 10", "slow 1 over", "save 100", "done"])
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line == (
        "rank 1 holds up the others since step 4: of a step's 300.0 ms it needs 100.0 more than their median"
    )
    assert next(shown.slow_rank for shown in bench.progress if shown.step == 10) == 1
    assert bench.progress[-1].slow_rank is None


def test_profiles_go_to_the_publisher(bench: Bench) -> None:
    bench.run(["restored", "profiled 1", "profiled 0", "save 100", "done"])
    assert bench.notes.profiles == [str(bench.folder / f"rank-{rank}.json.gz") for rank in (1, 0)]


def test_a_range_that_the_store_has_starts_no_process_and_claims_no_token(bench: Bench) -> None:
    bench.run(["restored", "save 100", "done"])
    result = bench.run(["exit 9"])
    assert result.tries == 0
    assert result.position.epoch == 2
    assert bench.notes.started == [1]


def test_a_killed_process_is_restarted_in_place_with_a_new_token(bench: Bench) -> None:
    result = bench.run(["restored", "save 50", "kill SIGKILL"], ["restored", "save 100", "done"])
    assert result.tries == 2
    assert result.checkpoint.token == 2
    assert bench.notes.ended[0][:2] == (1, "KILLED")
    assert "SIGKILL" in bench.notes.ended[0][2]


def test_the_claim_holds_who_it_was_and_the_configuration(bench: Bench) -> None:
    bench.run(["restored", "save 100", "done"])
    claim = read_lineage(bench.store).attempts[0].claim
    assert claim is not None
    assert claim.who["range"] == [0, 2]
    assert claim.who["flow_run_id"] == "f"
    assert JobConfig.model_validate(claim.who["config"]) == bench.config


def test_without_new_checkpoints_the_budget_of_restarts_ends(bench: Bench) -> None:
    with pytest.raises(Unavailable, match="SIGKILL"):
        bench.run(["restored", "kill SIGKILL"])
    assert bench.notes.started == [1, 2]


def test_each_new_checkpoint_pays_for_another_restart(bench: Bench) -> None:
    steps = [["restored", f"save {step}", "kill SIGKILL"] for step in (10, 20, 30, 40)]
    assert bench.run(*steps, ["restored", "save 100", "done"]).tries == 5


def test_repeating_old_steps_pays_for_no_restart(bench: Bench) -> None:
    with pytest.raises(Unavailable):
        bench.run(["restored", "save 10", "kill SIGKILL"], ["restored", "save 10", "kill SIGKILL"])
    assert bench.notes.started == [1, 2]


@pytest.mark.parametrize("kind", [Fenced, Invalid, Diverged])
def test_what_would_end_the_same_way_again_is_not_tried_again(bench: Bench, kind: type[RetomaError]) -> None:
    with pytest.raises(kind, match="because") as caught:
        bench.run(["restored", f"fail {kind.__name__} because"])
    assert caught.value.hint == "look"
    assert bench.notes.started == [1]
    assert bench.notes.ended[0][1] == ("KILLED" if kind is Fenced else "FAILED")


def test_the_same_words_twice_are_a_mistake_in_the_job_and_final(bench: Bench) -> None:
    with pytest.raises(RetomaError, match="twice the same") as caught:
        bench.run(["restored", "print I was here", "fail KeyError 'lr'"])
    assert type(caught.value) is RetomaError
    assert "I was here" in str(caught.value)
    assert bench.notes.started == [1, 2]


def test_the_same_words_about_the_machine_are_worth_another_node(bench: Bench) -> None:
    with pytest.raises(Unavailable, match="OutOfMemoryError"):
        bench.run(["restored", "fail OutOfMemoryError CUDA out of memory"])


def test_damage_that_comes_back_is_final(bench: Bench) -> None:
    with pytest.raises(Corrupt, match="twice"):
        bench.run(["fail Corrupt nothing intact"])


def test_a_silent_process_is_killed_though_it_prints(bench: Bench) -> None:
    bench.supervise(silence_seconds=1.0, restarts_in_place=0)
    steps = ["restored", *["print busy", "sleep 0.3"] * 60]
    started = time.monotonic()
    with pytest.raises(Unavailable, match=r"hung: it said nothing for \d+\.\d s"):
        bench.run(steps)
    assert time.monotonic() - started < 15
    assert bench.notes.ended[0][1] == "KILLED"


@pytest.mark.parametrize("deed", ["sleep 60", "sleep_holding_the_lock 60"])
def test_a_hang_is_reported_with_its_stack_also_with_the_interpreters_lock_held(bench: Bench, deed: str) -> None:
    bench.supervise(silence_seconds=1.0, restarts_in_place=0)
    with pytest.raises(Unavailable, match="hung: it said nothing") as caught:
        bench.run(["restored", "beat 7", "print I was here", deed])
    text = str(caught.value)
    assert "I was here" in text.partition("its last lines")[2]
    assert "Thread 0x" not in text
    line = bench.fake.read_text().splitlines().index("        time.sleep(float(rest))") + 1
    line += 2 if "lock" in deed else 0
    assert f"fake.py:{line} <module>" in text
    assert bench.progress[-1].error is not None
    assert f"fake.py:{line} <module>" in bench.progress[-1].error
    end = read_ends(bench.store)[1]
    assert (end.kind, end.by, end.step) == ("Unavailable", "supervisor", 7)
    assert end.silent_seconds is not None
    assert 1.0 < end.silent_seconds < 10.0
    assert end.stack is not None
    assert f"fake.py:{line} <module>" in end.stack


def test_what_a_group_reports_of_its_ranks_is_kept_with_its_end(bench: Bench) -> None:
    bench.supervise(restarts_in_place=0)
    with pytest.raises(Unavailable, match="rank 1 made no step"):
        bench.run(["restored", "fail Unavailable rank 1 made no step | rank 0: 4 collectives begun"])
    assert read_ends(bench.store)[1].stack == "rank 0: 4 collectives begun"


def test_a_frozen_process_is_killed_and_called_so(bench: Bench) -> None:
    bench.supervise(silence_seconds=1.0, restarts_in_place=0)
    with pytest.raises(Unavailable, match=r"was frozen \(stopped by a signal\): it said nothing"):
        bench.run(["restored", "kill SIGSTOP"])
    assert read_ends(bench.store)[1].stack is None


def test_a_frozen_process_is_found_in_the_middle_of_an_announced_pause(bench: Bench) -> None:
    bench.supervise(silence_seconds=1.0, restarts_in_place=0)
    started = time.monotonic()
    with pytest.raises(Unavailable, match="was frozen"):
        bench.run(["restored", "pause evaluating 60", "kill SIGSTOP"])
    assert time.monotonic() - started < 10


def test_a_pause_that_lasts_longer_than_it_may_is_named(bench: Bench) -> None:
    bench.supervise(silence_seconds=0.5, restarts_in_place=0)
    with pytest.raises(Unavailable, match=r"hung while evaluating: it said nothing for \d+\.\d s"):
        bench.run(["restored", "pause evaluating 1", "sleep 60"])


def test_what_is_announced_or_slow_or_wakes_in_time_is_not_killed(bench: Bench) -> None:
    bench.supervise(silence_seconds=2.0, restarts_in_place=0)
    wakes = bench.folder / "pid"
    threading.Thread(target=resume_after, args=(wakes, 0.5), daemon=True).start()
    steps = ["restored", "pause evaluating 60", "sleep 2.5", "beat 1 1.0", "sleep 2.5", "save 50", "beat 2"]
    result = bench.run([*steps, f"pid {wakes}", "kill SIGSTOP", "beat 3", "save 100", "done"])
    assert result.tries == 1


def test_a_save_in_the_background_neither_ends_a_pause_nor_hides_a_hang(bench: Bench) -> None:
    bench.supervise(silence_seconds=1.0, restarts_in_place=0)
    result = bench.run(["restored", "pause evaluating 60", "save 50", "sleep 2", "save 100", "done"])
    assert result.tries == 1
    hides = ["beat 1", *["sleep 0.2", "save 150"] * 50]
    bench.config = bench.config.model_copy(update={"epochs": 4})
    with pytest.raises(Unavailable, match="hung"):
        bench.run(["exit 9"], ["restored", *hides], stop=4)


def test_the_supervisor_vouches_for_an_allowed_silence_and_never_before_the_first_message(bench: Bench) -> None:
    bench.supervise(silence_seconds=1.0)
    bench.run(["restored", "beat 1", "pause evaluating 60", "sleep 4.5", "save 100", "done"])
    before = [progress.beats for progress in bench.progress if progress.phase == "starting"]
    assert before[0] == 0, "a claim is no sign of training"
    silent = [p.beats for p in bench.progress if p.phase == "evaluating" and p.checkpoint is None]
    assert len(silent) == 2
    assert silent[1] > silent[0]


def test_sigterm_of_the_training_process_alone_is_a_preemption_and_costs_no_restart_here(bench: Bench) -> None:
    with pytest.raises(Preempted):
        bench.run(["restored", "kill SIGTERM", "sleep 60"])
    assert bench.notes.started == [1]
    assert read_ends(bench.store)[1].kind == "Preempted"


def test_attempts_without_a_last_word_get_one_from_their_successor(bench: Bench) -> None:
    mark_run(bench.store, "r")
    for _ in range(2):
        claim(bench.store, "r", {})
    bench.run(["restored", "save 100", "done"])
    ends = read_ends(bench.store)
    assert [(ends[token].kind, ends[token].by) for token in (1, 2, 3)] == [
        ("Unavailable", "successor"),
        ("Unavailable", "successor"),
        ("Done", "supervisor"),
    ]


def test_garbage_is_ignored_and_is_no_progress(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert bench.run(["garbage", "restored", "garbage", "save 100", "done"]).tries == 1
    assert caplog.text.count("is no message") == 1


def test_a_process_that_leaves_without_a_word_is_not_done(bench: Bench) -> None:
    bench.supervise(restarts_in_place=0)
    with pytest.raises(Unavailable, match="without saying that it is done"):
        bench.run(["restored", "exit 0"])


def test_a_crash_after_done_does_not_undo_it(bench: Bench) -> None:
    assert bench.run(["restored", "save 100", "done", "kill SIGSEGV"]).tries == 1


def test_loader_workers_of_a_killed_process_are_killed_too(bench: Bench) -> None:
    bench.supervise(restarts_in_place=0)
    file = bench.folder / "grandchild"
    with pytest.raises(Unavailable, match="SIGKILL"):
        bench.run(["restored", f"grandchild {file}", "kill SIGKILL"])
    grandchild = int(file.read_text())
    assert wait_for(lambda: grandchild if gone(grandchild) else None)


def test_told_to_stop_it_passes_sigterm_on_waits_and_kills(bench: Bench) -> None:
    pid_file = bench.folder / "pid"

    def stop(message: Message) -> None:
        if isinstance(message, Restored):
            raise KeyboardInterrupt

    order = bench.order()
    child = Child(
        bench.command(["ignore SIGTERM", f"pid {pid_file}", "restored", "sleep 60"]),
        spec_of(order, claim_first(bench)),
        on_message=stop,
        show=lambda _: None,
        limits=SupervisorConfig(grace_seconds=0.5),
    )
    with pytest.raises(KeyboardInterrupt):
        child.run()
    assert gone(int(pid_file.read_text()))


@pytest.mark.parametrize(
    ("number", "deed"),
    [
        (signal.SIGKILL, "sleep 60"),
        (signal.SIGKILL, "sleep_holding_the_lock 60"),
        (signal.SIGTERM, "sleep 60"),
    ],
)
def test_the_process_dies_within_two_seconds_of_its_supervisor(
    bench: Bench, number: signal.Signals, deed: str
) -> None:
    pid_file = bench.folder / "pid"
    command = bench.command(["restored", f"pid {pid_file}", deed])
    code = (
        "import logging, pathlib, sys; sys.path.insert(0, sys.argv[1])\n"
        "from tests.unit.test_supervise import Notes\n"
        "from tasks.order import RangeOrder; from tasks.range import RangeSupervisor\n"
        "RangeSupervisor(order=RangeOrder.model_validate_json(sys.argv[2]),"
        " root=pathlib.Path(sys.argv[1]), flow_run_id='f',"
        " registry=None, publisher=Notes(), on_progress=lambda p: None, logger=logging.getLogger(),"
        " command=sys.argv[3:]).run()\n"
    )
    arguments = [str(ROOT), bench.order().model_dump_json(), *command]
    with subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT) as supervisor:
        pid = wait_for(lambda: int(pid_file.read_text()) if pid_file.exists() else None)
        supervisor.send_signal(number)
        supervisor.wait(10)
        deadline = time.monotonic() + 2
        while not gone(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert gone(pid)


def test_what_mlflow_knows_is_compared_and_the_store_wins(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    class Old:
        store_url, token, sequence, digest = "elsewhere", 1, 0, "xxh3_128:0"

    class Stale:
        def newest(self, run: str) -> Old:
            return Old()

    with caplog.at_level(logging.WARNING):
        assert bench.run(["restored", "save 100", "done"], registry=Stale()).tries == 1
    assert "the store wins" in caplog.text


def test_mlflow_being_away_stops_nothing(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    class Away:
        def newest(self, run: str) -> None:
            raise Unavailable("no route")

    with caplog.at_level(logging.WARNING):
        assert bench.run(["restored", "save 100", "done"], registry=Away()).tries == 1
    assert "from the store alone" in caplog.text


def test_an_ending_names_signal_and_want_of_memory() -> None:
    assert Ending(1, -11).cause() == "was killed by SIGSEGV"
    killed = Ending(1, -9, oom_kills=1).error()
    assert "out of memory" in str(killed)
    assert "batch_size" in str(killed)
    assert "dmesg" in str(Ending(1, -9).error())
    assert "out of memory" not in str(Ending(1, -9, oom_kills=1, killed_because="said nothing").error())
    assert isinstance(Ending(1, -15).error(), Preempted)
    timer = Ending(1, 1, tail=("Timeout (0:00:08)!", "Thread 0x1 (most recent call first):"))
    assert timer.cause() == "made no progress and was ended by its own timer"


def test_memory_kills_are_counted_in_our_control_group(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/a/b\n")
    (tmp_path / "top/a/b").mkdir(parents=True)
    (tmp_path / "top/a/b/memory.events").write_text("low 0\noom 2\noom_kill 3\n")
    files = oom_kill_files(tmp_path / "own", tmp_path / "top")
    assert count_oom_kills(files) == 3
    assert count_oom_kills([]) == 0


def test_output_is_passed_on_at_a_bounded_rate_and_its_end_is_kept() -> None:
    shown: list[str] = []
    now = [0.0]
    relay = Relay(shown.append, lines_per_second=1, burst_lines=2, clock=lambda: now[0])
    for number in range(10):
        relay.line(f"line {number}".encode())
    assert shown == ["line 0", "line 1"]
    now[0] = 1.0
    relay.line(b"\xff late")
    assert shown[2:] == ["... 8 lines left out", "\N{REPLACEMENT CHARACTER} late"]
    assert relay.tail[-2:] == ("line 9", "\N{REPLACEMENT CHARACTER} late")


def test_a_line_without_end_is_cut() -> None:
    splitter = LineSplitter(limit_bytes=10)
    assert list(splitter.feed(b"ab\n\ncd")) == [b"ab"]
    assert list(splitter.feed(b"x" * 20)) == [b"cd" + b"x" * 20]
    assert list(splitter.flush()) == []


def test_a_question_is_answered_or_says_why_not() -> None:
    def answer(code: str, timeout_seconds: float = 30) -> dict[str, Any]:
        return ask([sys.executable, "-c", code], {"a": 1}, timeout_seconds=timeout_seconds)

    assert answer("import json, sys; print('log'); print(json.dumps([0]) and sys.stdin.readline())") == {"a": 1}
    with pytest.raises(Invalid, match="no such"):
        answer("""print('{"kind": "failed", "error": "Invalid", "message": "no such"}'); exit(2)""")
    with pytest.raises(Unavailable, match="exit code 7"):
        answer("exit(7)")
    with pytest.raises(Corrupt):
        answer("print('hm')")
    with pytest.raises(Unavailable, match="within"):
        answer("import time; time.sleep(60)", timeout_seconds=0.3)


def resume_after(pid_file: Path, seconds: float) -> None:
    """Wake the process of this file when it has been stopped for so long."""
    process = psutil.Process(wait_for(lambda: int(pid_file.read_text()) if pid_file.exists() else None))
    wait_for(lambda: 1 if process.status() == psutil.STATUS_STOPPED else None)
    time.sleep(seconds)
    process.resume()


def gone(pid: int) -> bool:
    """No process, or only its entry in the table."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def gone_within(pid: int, seconds: float) -> bool:
    """It ends in so long."""
    deadline = time.monotonic() + seconds
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return gone(pid)


def wait_for(look: Callable[[], int | None]) -> int:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if (found := look()) is not None:
            return found
        time.sleep(0.02)
    raise AssertionError("it did not happen")


def claim_first(bench: Bench) -> int:
    mark_run(bench.store, "r")
    return 1


def spec_of(order: RangeOrder, token: int) -> str:
    fields = {"run": order.run, "start": 0, "stop": 2, "token": token, "store_url": order.store_url}
    return json.dumps({**fields, "config": order.config.model_dump(mode="json")})
