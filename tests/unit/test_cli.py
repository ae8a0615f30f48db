"""The command's face: what it prints and how it ends, without servers."""

from __future__ import annotations

import io
import json
import socket
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flows.cli import main
from flows.live import LineDisplay, LiveDisplay
from infra.beat import Progress
from infra.facts import to_metadata
from infra.prefect_runs import FlowRunInfo
from infra.settings import Settings
from tasks.follow import Look, Started, go_on, rival, start_or_attach, successor
from tasks.milestones import Milestone
from tasks.plan import new_run_name, refuse_other_identity, requested_digest
from tasks.runs import unfinished
from tests.support.stores import DATA, RunBuilder, interrupted_run, run_of_two_ranks
from tests.support.stores import JOB as JOB_OF_RUN
from training.checkpoint.end import End, put_end
from training.checkpoint.quarantine import Incident, put_incident
from training.checkpoint.store import open_store
from training.config import JobConfig, load_config
from training.errors import Invalid

ROOT = Path(__file__).parents[2]
JOB = ROOT / "training/jobs/mnist_cnn.yaml"


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("RETOMA_HOME", str(ROOT))
    monkeypatch.setenv("RETOMA_STATE_DIR", str(tmp_path))
    return Settings()


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["retoma", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
    printed = capsys.readouterr()
    code = caught.value.code
    assert code is None or isinstance(code, int)
    return code or 0, printed.out, printed.err


def a_run(settings: Settings, name: str = "digits-20260102-030405-abcd", **config: Any) -> RunBuilder:
    """Claimed as `retoma train` claims it."""
    builder = RunBuilder(open_store(settings.run_url(name)), name)
    job = JobConfig(job="training.jobs.mnist_cnn:MnistCnn", epochs=4, **config)
    who = {"attempt": 1, "try": 1, "config": job.model_dump(mode="json"), "requested": requested_digest(job)}
    token = builder.claim(0, 2, **who)
    builder.seal(token, None)
    builder.commit(token, 10, "base")
    builder.commit(token, 20)
    return builder


def test_looking_imports_no_server_client_and_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['retoma', '--help']; from flows.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print([name for name in ('prefect', 'mlflow', 'torch', 'dvc') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "train" in done.stdout
    assert "Exit codes" in done.stdout


def test_runs_are_listed_from_the_stores(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(settings)
    assert "digits-20260102-030405-abcd" in run_command(capsys, "runs")[1]
    code, text, _ = run_command(capsys, "runs", "--json")
    assert code == 0
    (found,) = json.loads(text)
    assert (found["epoch"], found["epochs"], found["finished"]) == (2, 4, False)
    assert (found["head"], found["attempts"]) == ("000001/00000001", 1)


def test_without_runs_the_list_says_how_to_start_one(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "retoma train" in run_command(capsys, "runs")[1]
    assert run_command(capsys, "runs", "--json")[1].strip() == "[]"


def test_show_draws_the_chain_and_the_attempts(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    interrupted_run(open_store(settings.run_url("run-1")))
    code, text, _ = run_command(capsys, "show", "run-1")
    assert code == 0
    lines = text.splitlines()
    assert [line.split()[1] for line in lines if "─ base" in line] == ["base", "base"]
    assert "34.0 %" in next(line for line in lines if "000001/00000001" in line)
    assert any("token 2" in line and "from 000001/00000002" in line for line in lines)


def test_show_as_json_holds_every_link_of_the_chain(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    interrupted_run(open_store(settings.run_url("run-1")))
    shown = json.loads(run_command(capsys, "show", "run-1", "--json")[1])
    chain = shown["chain"]
    assert [row["sequence"] for row in chain] == [0, 1, 2, 3, 4, 5]
    assert [row["parent"] for row in chain[1:]] == [row["checkpoint"] for row in chain[:-1]]
    assert [row["restored"] for row in shown["attempts"]] == [None, "000001/00000002", "000002/00000003"]
    assert shown["problems"] == []


def test_show_tells_how_attempts_ended_what_it_cost_and_what_is_quarantined(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(settings.run_url("run-1"))
    interrupted_run(store)
    reason = "said nothing for 5 s [and was killed]\nits last lines: ..."
    end = End(run="run-1", token=1, kind="Unavailable", reason=reason, by="supervisor", step=17, silent_seconds=5.5)
    put_end(store, end)
    text = "3 of 9 numbers of model/w are not finite"
    put_incident(store, Incident(run="run-1", token=1, sequence=3, name="model/w", reason=text, step=18))
    shown = run_command(capsys, "show", "run-1")[1]
    assert "Unavailable at step 17, said the supervisor, silent for 5.5 s: said nothing for 5 s [and" in shown
    assert "token 2 went on from 000001/00000002, step 15: 2 steps lost" in shown
    assert f"quarantined  000001/00000003, step 18: {text}" in shown
    told = json.loads(run_command(capsys, "show", "run-1", "--json")[1])
    assert (told["attempts"][0]["verdict"], told["attempts"][0]["lost_steps"]) == ("Unavailable", 2)
    assert told["attempts"][0]["reason"] == reason
    assert told["quarantine"][0]["name"] == "model/w"


def test_show_tells_how_ranks_share_the_work_and_which_one_held_up_the_others(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    run_of_two_ranks(open_store(settings.run_url("run-2")))
    shown = run_command(capsys, "show", "run-2")[1]
    assert "ranks  2  150 samples/s  a step takes 200.0 ms, 5 % communication" in shown
    assert "not measured: no run of the same job, epochs and params included, on one rank" in shown
    rank_0, rank_1 = (line for line in shown.splitlines() if "of a step its own" in line)
    assert rank_0.split()[1:] == "rank 0 90.0 ms of a step its own waits 50 % wrote 1.0 kB".split()
    assert rank_1.split()[1:] == "rank 1 190.0 ms of a step its own waits 0 % wrote 680 bytes".split()
    assert "slow rank 1 held up the others from step 4 until step 12: 100.0 ms more in steps of 200.0 ms" in shown
    group = json.loads(run_command(capsys, "show", "run-2", "--json")[1])["group"]
    assert (group["world_size"], group["scaling_efficiency"], group["one_rank"]) == (2, None, None)
    assert [row["written_bytes"] for row in group["ranks"]] == [1000, 680]
    assert [(each["rank"], each["until_step"]) for each in group["slow_ranks"]] == [(1, 12)]


def test_show_compares_a_group_to_the_newest_run_of_the_same_job_on_one_rank(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    job = JOB_OF_RUN | {"digest": "sha256:1"}
    for run, speed, digest in (("alone", 100.0, "sha256:1"), ("other", 7.0, "sha256:2")):
        alone = RunBuilder(open_store(settings.run_url(run)), run, job | {"digest": digest})
        token = alone.attempt(0, 2)
        for step, value in ((5, 20.0), (10, speed), (15, 1000.0)):
            alone.commit(token, step, "base", {step: {"train/samples_per_second": value}})
    run_of_two_ranks(open_store(settings.run_url("run-2")), job=job)
    group = json.loads(run_command(capsys, "show", "run-2", "--json")[1])["group"]
    assert group["one_rank"] == {"run": "alone", "samples_per_second": 100.0}
    assert group["scaling_efficiency"] == 150 / (2 * 100)
    assert (
        "scaling efficiency 75 % (one rank alone: 100 samples/s in run alone)"
        in run_command(capsys, "show", "run-2")[1]
    )


def test_show_says_nothing_of_ranks_where_there_is_one(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted_run(open_store(settings.run_url("run-1")))
    assert "ranks" not in run_command(capsys, "show", "run-1")[1]
    assert json.loads(run_command(capsys, "show", "run-1", "--json")[1])["group"] is None


def test_an_unknown_run_is_an_error_that_names_its_neighbours(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(settings)
    code, _, error = run_command(capsys, "show", "digits-20260102-030405-abce")
    assert code == Invalid.exit_code
    assert "did you mean digits-20260102-030405-abcd?" in error
    assert "retoma runs" in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "no/such.yaml"], "no job file"),
        (["train", str(JOB), "--set", "epochz=3"], "did you mean 'epochs'?"),
        (["train", str(JOB), "--set", "epochs"], "key=value"),
        (["train", str(JOB), "--set", "epochs=0"], "epochs"),
    ],
)
def test_a_wrong_configuration_ends_before_anything_is_started(
    settings: Settings, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    code, _, error = run_command(capsys, *arguments)
    assert code == Invalid.exit_code
    assert words in error
    assert not list(settings.state_dir.iterdir())


class Server:
    """Remembers what was started; nothing is alive unless it is told so."""

    def __init__(self, *alive: FlowRunInfo) -> None:
        self.alive = list(alive)
        self.started: list[dict[str, Any]] = []
        self.superseded: list[str] = []
        self.metadata: dict[str, str] = {}

    def live_with_tag(self, tag: str) -> list[FlowRunInfo]:
        return [run for run in self.alive if tag in run.tags and run.live]

    def newest_of(self, flows: Iterable[str]) -> list[FlowRunInfo]:
        return self.alive

    def start(self, deployment: str, parameters: dict[str, Any], **rest: Any) -> FlowRunInfo:
        self.started.append(parameters)
        return FlowRunInfo(id="f", name=rest["name"], state="SCHEDULED", parameters=parameters, tags=rest["tags"])

    def supersede(self, flow_run_id: str, message: str) -> None:
        self.superseded.append(flow_run_id)

    def latest_metadata(self, key: str) -> dict[str, str]:
        return self.metadata


def begin(settings: Settings, server: Server, config: JobConfig, **rest: Any) -> Any:
    return start_or_attach(settings, server, JOB, [], config, **rest)  # type: ignore[arg-type]


def test_an_unfinished_run_of_the_same_job_is_resumed(settings: Settings) -> None:
    a_run(settings)
    config = JobConfig(job="training.jobs.mnist_cnn:MnistCnn", epochs=4)
    server = Server()
    started = begin(settings, server, config)
    assert (started.how, started.run) == ("resumed", "digits-20260102-030405-abcd")
    assert server.started[0]["job"] == "training/jobs/mnist_cnn.yaml", "as any machine finds it"


@pytest.mark.parametrize("changes", [{"seed": 1}, {"params": {"hidden": 8}}, {"epochs": 5}])
def test_another_training_starts_a_new_run(settings: Settings, changes: dict[str, Any]) -> None:
    a_run(settings)
    config = JobConfig.model_validate({"job": "training.jobs.mnist_cnn:MnistCnn", "epochs": 4, **changes})
    started = begin(settings, Server(), config)
    assert started.how == "new"
    assert started.run.startswith("mnist-cnn-")


def test_a_finished_run_is_not_gone_on_with_unless_it_is_named(settings: Settings) -> None:
    builder = a_run(settings)
    builder.commit(1, 40)
    config = JobConfig(job="training.jobs.mnist_cnn:MnistCnn", epochs=4)
    assert unfinished(settings, requested_digest(config)) is None
    assert begin(settings, Server(), config).how == "new"
    started = begin(settings, Server(), config, run=builder.run)
    assert (started.how, started.run) == ("resumed", builder.run)


def test_a_name_of_which_there_is_no_run_starts_a_new_one(settings: Settings) -> None:
    assert begin(settings, Server(), load_config(JOB), run="digits").how == "new"


def test_new_means_new_though_there_is_an_unfinished_run(settings: Settings) -> None:
    builder = a_run(settings)
    config = JobConfig(job="training.jobs.mnist_cnn:MnistCnn", epochs=4)
    assert begin(settings, Server(), config, new=True).run != builder.run


def test_a_living_run_is_attached_to_and_nothing_is_started(settings: Settings) -> None:
    config = load_config(JOB)
    first = Server()
    started = begin(settings, first, config)
    alive = started.flow_run.model_copy(update={"state": "RUNNING"})
    child = FlowRunInfo(id="c", name="c", state="RUNNING", tags=alive.tags, parameters={"order": {}})
    server = Server(child, alive)
    for again in (begin(settings, server, config), begin(settings, server, config, run=started.run)):
        assert (again.how, again.run, again.flow_run.id) == ("attached", started.run, alive.id)
    assert server.started == []


def parent(id_: str, state: str = "RUNNING", **parameters: Any) -> FlowRunInfo:
    return FlowRunInfo(id=id_, name="r", state=state, parameters={"run": "r", **parameters})


def test_a_parent_that_the_server_has_just_made_is_found_without_any_tag(settings: Settings) -> None:
    server = Server(parent("2", "SCHEDULED", generation=1), parent("1", "CRASHED"))
    started = begin(settings, server, load_config(JOB), run="r")
    assert (started.how, started.flow_run.id) == ("attached", "2")


def test_a_parent_whose_process_is_gone_is_replaced_at_once_by_the_command_alone(settings: Settings) -> None:
    server = Server(parent("1"))
    gone = Milestone(run="r", phase="training", host=socket.gethostname(), pid=1, pid_started=1.0, flow_run_id="1")
    server.metadata = to_metadata(gone)
    assert begin(settings, server, load_config(JOB), run="r").flow_run.id == "f"
    assert server.superseded == ["1"]


def test_the_successor_of_a_crashed_parent_is_the_next_generation_of_the_same_run() -> None:
    crashed = Started(run="r", flow_run=parent("1", "CRASHED", generation=1), how="new")
    other = parent("x", generation=2).model_copy(update={"parameters": {"run": "another", "generation": 2}})
    runs, now = Server(other, parent("1", "CRASHED", generation=1), parent("0", generation=0)), [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] == 5.0:
            runs.alive.insert(0, parent("2", "FAILED", generation=2))

    def find() -> Started | None:
        return successor(runs, crashed, sleep=sleep, clock=lambda: now[0])  # type: ignore[arg-type]

    found = find()
    assert found is not None
    assert found.flow_run.id == "2"
    runs.alive.pop(0)
    assert find() is None, "a server without automations: no waiting for ever"
    assert now[0] < 60


def test_where_the_server_has_no_successor_the_command_starts_one_and_not_for_ever(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.follow.SUCCESSOR_SECONDS", 0.0)
    monkeypatch.setattr("tasks.follow.LOOK_SECONDS", 0.0)
    server, crashed = Server(), Started(run="r", flow_run=parent("1", "CRASHED", job="a.yaml"), how="new")
    assert go_on(settings, server, crashed) is not None  # type: ignore[arg-type]
    assert server.started == [{"run": "r", "job": "a.yaml", "generation": 1}]
    often = crashed.model_copy(update={"flow_run": parent("1", "CRASHED", generation=settings.parent_generations)})
    assert go_on(settings, server, often) is None  # type: ignore[arg-type]


def test_of_two_parents_of_a_run_the_one_that_came_first_goes_on() -> None:
    def at(id_: str, minute: int, state: str = "RUNNING") -> FlowRunInfo:
        made = datetime(2026, 1, 2, 3, minute, tzinfo=UTC)
        return parent(id_, state).model_copy(update={"created": made})

    runs: Any = Server(at("c", 3), at("b", 2), at("a", 1, "CRASHED"), at("z", 0, "CANCELLING"))
    assert rival(runs, "r", "b") is None
    found = rival(runs, "r", "c")
    assert found is not None
    assert found.id == "b"


def test_a_name_that_cannot_be_a_folder_is_refused(settings: Settings) -> None:
    with pytest.raises(Invalid, match="run name"):
        begin(settings, Server(), load_config(JOB), run="../escape")


def test_run_names_tell_job_and_time_and_differ() -> None:
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    config = load_config(JOB)
    assert new_run_name(config, now, "abcd") == "mnist-cnn-20260102-030405-abcd"
    assert len({new_run_name(config, now) for _ in range(20)}) > 1


def test_a_run_is_not_continued_as_another_training_or_on_other_data(settings: Settings) -> None:
    store = a_run(settings).store
    same = JobConfig(job="training.jobs.mnist_cnn:MnistCnn", params={})
    digest = str(DATA["digest"])
    with pytest.raises(Invalid, match="job was"):
        refuse_other_identity(store, JobConfig(job="other.module:Job"), "r", digest)
    with pytest.raises(Invalid, match="data digest was"):
        refuse_other_identity(store, same, "r", "md5:another")


def look(**changes: Any) -> Look:
    process = {"host": "h", "pid": 1, "pid_started": 1.0, "flow_run_id": "f"}
    progress = Progress(
        run="r", start=2, stop=4, epochs=6, attempt=2, phase="training", tries=1, token=3, epoch=2, step=130,
        total_steps=378, loss=0.25, samples_per_second=1234.0, checkpoint="000003/00000007",
        checkpoint_kind="delta", written_bytes=250, state_bytes=1000, stall_seconds=0.0015, **process,
    )  # fmt: skip
    milestone = Milestone(run="r", phase="training", ranges=3, **process)
    values = {
        "flow_run": FlowRunInfo(id="f", name="r", state="RUNNING"),
        "milestone": milestone,
        "progress": progress,
        "waiting": False,
    }
    return Look.model_validate({**values, **changes})


def test_lines_tell_everything_and_do_not_repeat_themselves() -> None:
    output, now = io.StringIO(), [0.0]
    display = LineDisplay(Console(file=output, width=300), clock=lambda: now[0])
    with display:
        display.show(look())
        display.show(look())
        now[0] = 10.0
        display.show(look())  # nothing new for longer than a line may be held back
        display.show(look(progress=None, waiting=True))
    first, second = output.getvalue().splitlines()
    for words in ("range 2 of 3", "attempt 2", "step 130/378", "loss 0.2500", "1,234 samples/s", "delta", "25.0 %"):
        assert words in first
    assert "stall 1.5 ms" in first
    assert second == "waiting for a worker of pool gpu"


def test_the_panel_of_a_terminal_shows_the_same_facts() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=120, height=40)
    display = LiveDisplay(console)
    with display:
        display.show(look(milestone=None, progress=None))
        display.show(look())
    for words in ("range 2 of 3", "step 130 of 378", "0.2500", "1,234 samples/s", "25.0 %", "stall 1.5 ms"):
        assert words in output.getvalue()
