import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from infra.processes import ProcessTable, is_alive
from infra.servers import ask
from infra.settings import Settings
from infra.stack import StackStatus, down, status, up
from training.errors import Invalid, Unavailable

NAMES = ["prefect", "mlflow", "worker-cpu", "worker-gpu"]

FLOW = """
import os, subprocess, sys, time
from pathlib import Path
from prefect import flow

@flow
def sleeper(note: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    Path(note).with_suffix(".draft").write_text(f"{os.getcwd()} {child.pid}")
    Path(note).with_suffix(".draft").rename(note)
    child.wait()
"""

PREFECT_FILE = """
name: tests
pull:
  - prefect.deployments.steps.set_working_directory: {directory: "%s"}
deployments:
  - name: cpu
    entrypoint: sleeper.py:sleeper
    work_pool: {name: cpu, job_variables: {command: python -m prefect.engine}}
"""


def pids(found: StackStatus) -> dict[str, int | None]:
    return {process.name: process.pid for process in found.processes}


def states(found: StackStatus) -> dict[str, str]:
    return {process.name: process.state for process in found.processes}


def retoma(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def eventually(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not true after {seconds} s"
        time.sleep(0.05)


def kill(settings: Settings, name: str) -> None:
    found = ProcessTable(settings.state_dir).find(name)
    assert found
    found[1].kill()
    eventually(lambda: ProcessTable(settings.state_dir).find(name) is None)


def alive(pid: int | None) -> bool:
    try:
        return is_alive(psutil.Process(pid or 0))
    except psutil.Error:
        return False


def mentions(folder: Path) -> list[int]:
    """Living processes with the folder in their command line or environment, whoever started them."""
    found = []
    for process in psutil.process_iter():
        try:
            text = " ".join([*process.cmdline(), *process.environ().values()])
        except (psutil.Error, OSError):
            continue
        if str(folder) in text and process.pid not in (os.getpid(), os.getppid()):
            found.append(process.pid)
    return found


def test_up_twice_is_one_stack(stack: Settings) -> None:
    before = status(stack)
    assert before.healthy
    assert list(states(before)) == NAMES
    assert up(stack) == before
    assert pids(status(stack)) == pids(before)


def test_servers_listen_on_loopback_only(stack: Settings) -> None:
    listening = {
        (connection.laddr.ip, connection.laddr.port)
        for process in ProcessTable(stack.state_dir).members()
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    ports = stack.ports()
    assert ports
    assert listening == {("127.0.0.1", ports.prefect), ("127.0.0.1", ports.mlflow)}


def test_a_killed_worker_is_seen_and_comes_back_alone(stack: Settings) -> None:
    before = pids(status(stack))
    kill(stack, "worker-gpu")
    hurt = status(stack)
    assert not hurt.healthy
    assert states(hurt) == dict.fromkeys(NAMES, "ready") | {"worker-gpu": "stopped"}
    shown = retoma("status", "--json")
    assert shown.returncode == Unavailable.exit_code
    assert json.loads(shown.stdout)["healthy"] is False
    assert "retoma up" in shown.stderr

    after = pids(up(stack))
    assert after["worker-gpu"] not in (None, before["worker-gpu"])
    assert after | {"worker-gpu": 0} == before | {"worker-gpu": 0}


def test_a_frozen_worker_is_seen_and_replaced(stack: Settings) -> None:
    before = pids(status(stack))
    os.kill(before["worker-cpu"] or 0, signal.SIGSTOP)
    eventually(lambda: states(status(stack))["worker-cpu"] == "not ready")
    assert up(stack).healthy
    assert not alive(before["worker-cpu"])


def test_a_killed_mlflow_server_is_seen_and_comes_back_with_its_data(stack: Settings) -> None:
    ports = stack.ports()
    assert ports
    created = ask(ports.mlflow, "POST", "/api/2.0/mlflow/experiments/create", {"name": "kept"})
    kill(stack, "mlflow")  # its own child still holds the port
    assert states(status(stack))["mlflow"] == "stopped"

    assert up(stack).healthy
    assert stack.ports() == ports
    path = f"/api/2.0/mlflow/experiments/get?experiment_id={created['experiment_id']}"
    assert ask(ports.mlflow, "GET", path)["experiment"]["name"] == "kept"


def test_down_stops_what_a_flow_started_and_the_run_is_crashed(stack: Settings, tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(FLOW)
    (tmp_path / "prefect.yaml").write_text(PREFECT_FILE % tmp_path)
    note = tmp_path / "note"
    for arguments in (
        ("--no-prompt", "deploy", "--all"),
        ("deployment", "run", "sleeper/cpu", "--param", f"note={json.dumps(str(note))}"),
    ):
        subprocess.run(
            [sys.executable, "-m", "prefect", *arguments],
            cwd=tmp_path,
            env=stack.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=60,
        )
    eventually(note.exists)
    folder, pid = note.read_text().split()
    assert folder == str(tmp_path)
    assert alive(int(pid))

    kill(stack, "mlflow")  # down works on a stack that is half dead
    assert down(stack) >= 6
    assert not alive(int(pid))
    assert mentions(stack.state_dir) == []
    assert states(status(stack)) == dict.fromkeys(NAMES, "stopped")
    assert down(stack) == 0

    up(stack)
    ports = stack.ports()
    assert ports
    runs = ask(ports.prefect, "POST", "/api/flow_runs/filter", {"flows": {"name": {"any_": ["sleeper"]}}})
    assert [run["state_type"] for run in runs] == ["CRASHED"]


def test_two_concurrent_ups_make_one_stack(stack: Settings) -> None:
    down(stack)
    commands = [
        subprocess.Popen([sys.executable, "-m", "flows.cli", "up"], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    shown = [command.communicate(timeout=150)[0] for command in commands]
    assert [command.returncode for command in commands] == [0, 0]
    assert all("?workflowType=machine_learning" in text for text in shown)
    assert all("elemetry" in text for text in shown)
    workers = [p for p in ProcessTable(stack.state_dir).members() if "infra.worker" in p.cmdline()]
    assert len(workers) == 2


def test_a_server_that_dies_at_start_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path)
    (tmp_path / "prefect").mkdir()
    (tmp_path / "prefect" / "prefect.db").write_text("this is no database, " * 100)
    try:
        with pytest.raises(Unavailable, match=r"prefect died; the end of .*prefect.log:\n(.*\n)*.*database"):
            up(settings)
    finally:
        down(settings)
    assert mentions(tmp_path) == []


def test_with_both_servers_elsewhere_there_is_nothing_to_start(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path, prefect_api_url="http://a/api", mlflow_url="http://b")
    with pytest.raises(Invalid, match="nothing to start"):
        up(settings)
    assert list(tmp_path.iterdir()) == []
