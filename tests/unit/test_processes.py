import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from infra.processes import ProcessTable, is_alive, is_frozen, stop

SLEEP = "import time; time.sleep(60)"
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).wait()"


@pytest.fixture
def table(tmp_path: Path) -> Iterator[ProcessTable]:
    table = ProcessTable(tmp_path)
    yield table
    stop(table.members(), 0)
    assert table.members() == []


def start(table: ProcessTable, name: str, code: str, cwd: Path) -> psutil.Process:
    table.start(name, [sys.executable, "-c", code], {}, cwd)
    found = table.find(name)
    assert found
    return found[1]


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_started_process_is_found_and_is_nobodys_child(table: ProcessTable, tmp_path: Path) -> None:
    process = start(table, "one", SLEEP, tmp_path)
    assert process not in psutil.Process().children(recursive=True)
    assert [found.pid for found in table.members("one")] == [process.pid]
    assert table.members("other") == []
    assert stop([process], 5) == []
    assert table.find("one") is None


def test_a_child_that_outlives_its_parent_is_found(table: ProcessTable, tmp_path: Path) -> None:
    parent = start(table, "one", PARENT, tmp_path)
    eventually(lambda: len(table.members("one")) == 2)
    parent.kill()
    eventually(lambda: table.find("one") is None)
    assert len(table.members("one")) == 1


def test_the_process_of_another_folder_is_not_ours(table: ProcessTable, tmp_path: Path) -> None:
    start(table, "one", SLEEP, tmp_path)
    assert ProcessTable(tmp_path / "other").members() == []


def test_a_pid_file_of_a_reused_pid_finds_nothing(table: ProcessTable, tmp_path: Path) -> None:
    process = start(table, "one", SLEEP, tmp_path)
    pid_file = tmp_path / "pids" / "one.json"
    stranger = psutil.Process().pid
    pid_file.write_text(pid_file.read_text().replace(str(process.pid), str(stranger)))
    assert table.find("one") is None


def test_a_frozen_process_takes_the_polite_signal(table: ProcessTable, tmp_path: Path) -> None:
    note = tmp_path / "note"
    code = (
        "import signal, sys, time, pathlib;"
        "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path('note').write_text('bye'), sys.exit()));"
        "pathlib.Path('ready').touch(); time.sleep(60)"
    )
    process = start(table, "one", code, tmp_path)
    eventually((tmp_path / "ready").exists)
    process.suspend()
    eventually(lambda: is_frozen(process))
    assert stop([process], 10) == []
    assert note.read_text() == "bye"


def test_what_ignores_the_polite_signal_is_killed(table: ProcessTable, tmp_path: Path) -> None:
    code = "import signal, time, pathlib; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    process = start(table, "one", code + "pathlib.Path('ready').touch(); time.sleep(60)", tmp_path)
    eventually((tmp_path / "ready").exists)
    assert stop([process], 0.1) == []
    assert not is_alive(process)


def test_signals_ignored_by_the_caller_are_not_ignored_by_the_process(table: ProcessTable, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
        table.start("one", [sys.executable, "-c", code], {}, tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    eventually(lambda: table.tail("one") != "")
    assert table.tail("one") == "True"


def test_the_tail_is_of_the_newest_process_only(table: ProcessTable, tmp_path: Path) -> None:
    for word in ("first", "second"):
        table.start("one", [sys.executable, "-c", f"print('{word}')"], {}, tmp_path)
        eventually(lambda word=word: word in table.log("one").read_text())  # type: ignore[misc]
    assert table.tail("one") == "second"
    assert table.log("one").read_text() == "first\nsecond\n"


def test_a_process_in_the_moment_of_becoming_another_program_is_found(
    table: ProcessTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start(table, "one", SLEEP, tmp_path)
    truth = psutil.Process.environ
    empty: Iterator[dict[str, str]] = iter([{}, {}])  # what the kernel shows during execve
    monkeypatch.setattr(psutil.Process, "environ", lambda self: next(empty, None) or truth(self))
    found = table.find("one")
    assert found
    assert found[1].pid == process.pid
    empty = iter([{}])
    assert process.pid in [member.pid for member in table.members("one")]


def test_processes_started_one_after_the_other_are_found_at_once(table: ProcessTable, tmp_path: Path) -> None:
    for number in range(30):
        start(table, f"p{number}", SLEEP, tmp_path)
