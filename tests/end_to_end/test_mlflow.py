"""MLflow, as a real server sees it: lineage, idempotence, repair from the store, and the registered model."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import requests
import torch

from infra.mlflow_registry import MlflowRegistry, RegistryPointer
from infra.settings import TELEMETRY_OFF
from tasks.publish import Publisher, publish
from tasks.reconcile import Reconciler
from tasks.register import register_final
from tests.support.stores import DATA, GROUP_METRICS, JOB, RunBuilder, interrupted_run, run_of_two_ranks
from training.checkpoint.care.collect import collect
from training.checkpoint.checkpointer import IncrementalCheckpointer
from training.checkpoint.manifest import Position, manifest_key
from training.checkpoint.store import LocalStore
from training.checkpoint.token import Skipped
from training.config import JobConfig
from training.errors import Invalid, Unavailable
from training.job import load_job
from training.state import model_state

pytestmark = [pytest.mark.end_to_end, pytest.mark.xdist_group("mlflow")]

READY_SECONDS = 90.0
CONFIG = JobConfig(job="training.jobs.mnist_cnn:MnistCnn", epochs=4, epochs_per_range=2, params={"channels": 2})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of an MLflow server of our own."""
    folder, port = tmp_path_factory.mktemp("mlflow"), free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    command += ["--artifacts-destination", f"{folder}/artifacts"]
    environment = {**os.environ, **TELEMETRY_OFF, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(url, process, folder / "log")
        yield url
    finally:
        os.killpg(process.pid, 9)  # the server and its worker: the group that we started
        process.wait()


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(requests.RequestException):
            if requests.get(f"{url}/health", timeout=2).ok:
                return
        time.sleep(0.2)
    pytest.fail(f"the MLflow server did not start:\n{log.read_text()[-3000:]}")


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """The registry sets MLflow's variables; they must not reach other tests."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def registry(server: str, request: pytest.FixtureRequest) -> MlflowRegistry:
    """An experiment of the test's own."""
    return MlflowRegistry(server, experiment=request.node.name, timeout_seconds=20)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def client(registry: MlflowRegistry) -> Any:
    return registry.connection.client


def runs_by_token(registry: MlflowRegistry) -> dict[str, Any]:
    found = client(registry).search_runs([registry.runs.experiment_id()])
    return {run.data.tags.get("retoma.token", "parent"): client(registry).get_run(run.info.run_id) for run in found}


def models(registry: MlflowRegistry) -> dict[str, Any]:
    found = client(registry).search_logged_models([registry.runs.experiment_id()], max_results=1000)
    assert len({model.name for model in found}) == len(found)
    return {model.name: model for model in found}


def metric_steps(registry: MlflowRegistry, run: Any) -> dict[str, list[int]]:
    return {
        key: [metric.step for metric in client(registry).get_metric_history(run.info.run_id, key)]
        for key in run.data.metrics
    }


def everything(registry: MlflowRegistry) -> dict[str, Any]:
    """All that a second publishing must not change."""
    runs = runs_by_token(registry)
    return {
        "runs": {key: (r.info.run_id, r.info.status, r.data.tags, r.data.params) for key, r in runs.items()},
        "metrics": {key: metric_steps(registry, run) for key, run in runs.items()},
        "outputs": {key: sorted(o.model_id for o in run.outputs.model_outputs) for key, run in runs.items()},
        "models": {name: (m.model_id, str(m.status), m.params, m.tags) for name, m in models(registry).items()},
    }


def test_lineage_shows_attempts_checkpoints_and_what_each_attempt_was_restored_from(
    registry: MlflowRegistry, store: LocalStore
) -> None:
    builder = interrupted_run(store)
    parent_id = registry.open_run("run-1", CONFIG, DATA, store.url)
    report = publish(store, registry, "run-1", final=True)
    registry.close_run("run-1", "FINISHED")

    assert (report.registered, report.total, report.missing) == (6, 6, ())
    runs, found = runs_by_token(registry), models(registry)
    assert {key: run.info.status for key, run in runs.items()} == {
        "parent": "FINISHED",
        "1": "KILLED",
        "2": "FINISHED",
        "3": "FINISHED",
    }
    assert all(runs[t].data.tags["mlflow.parentRunId"] == parent_id for t in "123")
    assert sorted(found) == [
        "base-000001-00000000",
        "base-000003-00000004",
        "delta-000001-00000001",
        "delta-000001-00000002",
        "delta-000002-00000003",
        "delta-000003-00000005",
    ]
    newest = builder.committed[3, 5]
    params = found["delta-000003-00000005"].params
    assert params["digest"] == newest.ref.digest
    assert params["parent"] == "000003/00000004"
    assert (params["step"], params["epoch"], params["ratio"], params["store"]) == ("40", "4", "0.3400", store.url)
    inputs = {token: [i.model_id for i in runs[token].inputs.model_inputs] for token in "123"}
    assert inputs == {
        "1": [],
        "2": [found["delta-000001-00000002"].model_id],
        "3": [found["delta-000002-00000003"].model_id],
    }
    outputs = {(o.model_id, o.step) for o in runs["2"].outputs.model_outputs}
    assert outputs == {(found["delta-000002-00000003"].model_id, 20)}
    (dataset,) = runs["parent"].inputs.dataset_inputs
    assert (dataset.dataset.name, dataset.dataset.digest) == ("data/mnist", "0123456789abcdef0123456789abcdef.dir")
    assert runs["parent"].data.params["params.channels"] == "2"
    names = {file.path for file in client(registry).list_artifacts(parent_id)}
    assert names == {"config.yaml", "lineage.html", "lineage.json"}


def test_a_group_has_metrics_of_its_ranks_and_its_efficiency_against_one_rank_alone(
    registry: MlflowRegistry, store: LocalStore, tmp_path: Path
) -> None:
    job = JOB | {"digest": "sha256:1"}
    alone = RunBuilder(LocalStore(tmp_path / "alone"), "alone", job)
    token = alone.attempt(0, 2)
    for step, speed in ((5, 20.0), (10, 100.0), (15, 1000.0)):
        alone.commit(token, step, "base", {step: {"train/samples_per_second": speed}})
    run_of_two_ranks(store, "before", job)  # nobody has trained it alone yet
    publish(store, registry, "before")
    publish(alone.store, registry, "alone")
    group = LocalStore(tmp_path / "group")
    run_of_two_ranks(group, "group", job)
    publish(group, registry, "group")
    before, parent = registry.runs.parent("before"), registry.runs.parent("group")
    assert before is not None
    assert parent is not None
    assert "group/scaling_efficiency" not in before.steps
    metrics = client(registry).get_run(parent.id).data.metrics
    assert metrics.items() >= {**GROUP_METRICS, "rank/0/written_bytes": 200, "rank/1/written_bytes": 140}.items()
    history = client(registry).get_metric_history(parent.id, "group/scaling_efficiency")
    assert [(metric.step, metric.value) for metric in history] == [(step, 0.75) for step in (5, 10, 15)]


def test_profiles_become_artifacts_of_the_run(registry: MlflowRegistry, store: LocalStore, tmp_path: Path) -> None:
    interrupted_run(store)
    publisher = Publisher(store.url, registry, "run-1")
    publisher.start()
    for rank in range(2):
        (tmp_path / f"rank-{rank}.json.gz").write_bytes(b"a trace")
        publisher.profiled(str(tmp_path / f"rank-{rank}.json.gz"))
    assert publisher.close().error is None
    parent = registry.runs.parent("run-1")
    assert parent is not None
    names = [file.path for file in client(registry).list_artifacts(parent.id, "profile")]
    assert names == ["profile/rank-0.json.gz", "profile/rank-1.json.gz"]


def test_f24_publishing_twice_changes_nothing(registry: MlflowRegistry, store: LocalStore) -> None:
    interrupted_run(store)
    registry.open_run("run-1", CONFIG, DATA, store.url)
    publish(store, registry, "run-1", final=True)
    before = everything(registry)
    registry.open_run("run-1", CONFIG, DATA, str(store.folder))
    assert publish(store, registry, "run-1", final=True).registered == 0
    after = everything(registry)
    reopened = after["runs"]["parent"]
    assert reopened[1] == "RUNNING"
    assert after == before


def test_f26_a_resumed_run_has_one_parent_parameters_once_and_no_metric_step_twice(
    registry: MlflowRegistry, store: LocalStore
) -> None:
    builder = RunBuilder(store)
    first = builder.attempt(0, 2)
    builder.commit(first, 5, "base", metrics={3: {"train/loss": 3.0}, 5: {"train/loss": 2.5}})
    kept = builder.head
    builder.commit(first, 10, metrics={8: {"train/loss": 2.0}})
    parent_id = registry.open_run("run-1", CONFIG, DATA, store.url)
    publish(store, registry, "run-1")
    # the next attempt finds the newest checkpoint damaged, and trains the same steps again, later
    second = builder.claim(0, 2)
    key = manifest_key(first, 1)
    builder.seal(second, kept, (Skipped(key=key, reason="pack has a flipped bit"),))
    builder.commit(second, 10, metrics={8: {"train/loss": 2.0}, 10: {"train/loss": 1.5}})
    changed = CONFIG.model_copy(update={"attempts_per_range": 9})
    assert registry.open_run("run-1", changed, DATA, store.url) == parent_id
    publish(store, registry, "run-1")
    publish(store, registry, "run-1", final=True)

    runs = runs_by_token(registry)
    assert sorted(runs) == ["1", "2", "parent"]
    for run in runs.values():
        for steps in metric_steps(registry, run).values():
            assert max(Counter(steps).values()) == 1
    assert metric_steps(registry, runs["parent"])["train/loss"] == [3, 5, 8, 10]
    assert metric_steps(registry, runs["2"])["train/loss"] == [8, 10]
    assert runs["parent"].data.params["attempts_per_range"] == "5"
    assert "flipped bit" in runs["2"].data.tags["retoma.skipped"]
    void = models(registry)["delta-000001-00000001"].tags["retoma.void"]
    assert "flipped bit" in void
    newest = registry.newest("run-1")
    assert newest is not None
    assert (newest.token, newest.sequence) == (2, 1)


@pytest.mark.parametrize("lost", ["request", "answer"])
def test_f24_a_registration_cut_after_any_request_is_completed_by_the_next(
    registry: MlflowRegistry, store: LocalStore, lost: str
) -> None:
    interrupted_run(store)
    real, cuts = client(registry), 0
    while True:
        with mock.patch.object(registry.connection, "_client", Cut(real, 1 + cuts % 3, lost)):
            try:
                publish(store, registry, "run-1", final=True)
            except ConnectionError:
                cuts += 1
                assert cuts < 200
                continue
        break
    assert cuts > 15
    result = everything(registry)
    assert sorted(result["runs"]) == ["1", "2", "3", "parent"]
    assert {status for _, status, _, _ in result["models"].values()} == {"READY"}
    assert len(result["models"]) == 6
    for metrics in result["metrics"].values():
        assert all(max(Counter(steps).values()) == 1 for steps in metrics.values())


class Cut:
    """MLflow's client for a few writes; of the last one the request is lost, or only the answer."""

    def __init__(self, real: Any, last: int, lost: str) -> None:
        self._real, self._left, self._lost = real, last + (lost == "request"), lost

    def __getattr__(self, name: str) -> Any:
        def ask(*args: Any, **values: Any) -> Any:
            if name.startswith(("get", "search", "list")):
                return getattr(self._real, name)(*args, **values)
            self._left -= 1
            if self._left < 0 or (self._left == 0 and self._lost == "request"):
                raise ConnectionError(name)
            answer = getattr(self._real, name)(*args, **values)
            if self._left == 0:
                raise ConnectionError(name)
            return answer

        return ask


def test_two_publishers_at_once_make_one_entry_for_each_thing(server: str, store: LocalStore) -> None:
    interrupted_run(store)
    registries = [MlflowRegistry(server, "two-at-once", timeout_seconds=20) for _ in range(2)]
    publishers = [Publisher(store.url, registry, "run-1", between_seconds=0) for registry in registries]
    for publisher in publishers:
        publisher.start()
        publisher.notify()
    reports = [publisher.close(60) for publisher in publishers]
    # one of two that race may be refused once; what it could not do, the other did
    publish(store, registries[0], "run-1", final=True)
    assert all(report.run == "run-1" for report in reports)
    result = everything(registries[0])
    assert sorted(result["runs"]) == ["1", "2", "3", "parent"]
    assert len(result["models"]) == 6
    for metrics in result["metrics"].values():
        assert all(max(Counter(steps).values()) == 1 for steps in metrics.values())


def test_f24_an_entry_with_nothing_behind_it_is_found_and_never_resumed_from(
    registry: MlflowRegistry, store: LocalStore
) -> None:
    builder = interrupted_run(store)
    publish(store, registry, "run-1")
    store.delete(manifest_key(3, 5))
    publish(store, registry, "run-1")
    assert "no longer in the store" in models(registry)["delta-000003-00000005"].tags["retoma.void"]
    expected = builder.committed[3, 4]
    assert registry.newest("run-1") == RegistryPointer(
        store_url=store.url, token=3, sequence=4, digest=expected.ref.digest, step=30
    )


def test_f24_what_a_collection_removed_is_marked_and_no_metric_is_lost(
    registry: MlflowRegistry, store: LocalStore
) -> None:
    builder = interrupted_run(store)
    reconciler = Reconciler(store, registry, "run-1")
    reconciler.reconcile()
    before = everything(registry)
    head = builder.head
    assert head is not None
    builder.commit(head.ref.token, 90, kind="base")
    report = collect(store, keep=1, grace_seconds=0.0, running=False)
    assert report.collected, "nothing was collected: the test shows nothing"
    found = reconciler.reconcile()
    assert not found.missing
    marked = {name for name, model in models(registry).items() if "retoma.void" in model.tags}
    gone = {f"{token:06d}-{sequence:08d}" for token, sequence in report.collected}
    assert {name.partition("-")[2] for name in marked} >= gone
    assert "its bytes are gone" in models(registry)[f"base-{min(gone)}"].tags["retoma.void"]
    assert all(steps for steps in everything(registry)["metrics"]["parent"].values())
    assert everything(registry)["metrics"]["parent"].keys() >= before["metrics"]["parent"].keys()


def test_f24_an_entry_for_other_bytes_is_replaced(
    registry: MlflowRegistry, store: LocalStore, tmp_path: Path
) -> None:
    interrupted_run(store)
    publish(store, registry, "run-1")
    other = RunBuilder(LocalStore(tmp_path / "other"))
    token = other.attempt(0, 2)
    other.commit(token, 7, "base")
    publish(other.store, registry, "run-1")
    model = models(registry)["base-000001-00000000"]
    assert other.head is not None
    assert (model.params["digest"], str(model.status)) == (other.head.ref.digest, "READY")


def test_a_checkpoint_that_a_starting_attempt_may_leave_out_waits_for_its_seal(
    registry: MlflowRegistry, store: LocalStore
) -> None:
    builder = RunBuilder(store)
    first = builder.attempt(0, 2)
    builder.commit(first, 5, "base")
    reconciler = Reconciler(store, registry, "run-1")
    reconciler.reconcile()
    builder.commit(first, 10)
    head = builder.head
    second = builder.claim(0, 2)
    assert reconciler.reconcile().missing == (f"{first:06d}/{1:08d}",)
    builder.seal(second, head)
    assert reconciler.reconcile().missing == ()
    assert runs_by_token(registry)["1"].info.status == "KILLED"


def test_the_publisher_keeps_up_with_commits_and_tells_how_attempts_ended(
    registry: MlflowRegistry, store: LocalStore
) -> None:
    builder = RunBuilder(store)
    publisher = Publisher(store.url, registry, "run-1", config=CONFIG, data_version=DATA, between_seconds=0)
    publisher.start()
    token = builder.attempt(0, 1)
    publisher.attempt_started(token, 0, 1, {"flow_run_id": "flow-7"})
    for step in range(1, 6):
        builder.commit(token, step, "base" if step == 1 else "delta")
        publisher.notify()
    publisher.attempt_ended(token, "FAILED", "out of memory")
    report = publisher.close(60)
    assert (report.total, report.missing, report.error) == (5, (), None)
    run = runs_by_token(registry)["1"]
    assert (run.info.status, run.data.tags["retoma.reason"]) == ("FAILED", "out of memory")
    assert run.data.tags["retoma.flow_run_id"] == "flow-7"
    assert runs_by_token(registry)["parent"].data.params["epochs"] == "4"


def test_over_long_and_odd_values_are_cut_and_never_block_a_registration(
    registry: MlflowRegistry, store: LocalStore
) -> None:
    builder = RunBuilder(store)
    token = builder.attempt(0, 1, command="x" * 20_000)
    builder.commit(token, 5, "base", metrics={5: {"acc@1 [%]": 0.5, "m" * 400: 1.0}})
    config = CONFIG.model_copy(update={"params": {"text": "y" * 9_000}})
    registry.open_run("run-1", config, {**DATA, "digest": "z" * 80}, store.url)
    assert publish(store, registry, "run-1").missing == ()
    runs = runs_by_token(registry)
    assert "acc_1 ___" in runs["parent"].data.metrics
    assert runs["parent"].data.params["params.text"].endswith("...")


def test_an_unknown_run_and_a_deleted_experiment_are_named(registry: MlflowRegistry, store: LocalStore) -> None:
    assert registry.newest("nobody") is None
    assert registry.run_url("nobody") is None
    with pytest.raises(Invalid, match="no run 'nobody'"):
        registry.close_run("nobody", "FINISHED")
    experiment = registry.runs.experiment_id()
    client(registry).delete_experiment(experiment)
    again = MlflowRegistry(registry.connection.url, "test_an_unknown_run_and_a_deleted_experiment_are_named")
    with pytest.raises(Invalid, match="was deleted"):
        again.open_run("run-1", CONFIG, DATA, store.url)


def test_a_server_that_is_killed_and_back_gets_everything(tmp_path: Path, server: str, store: LocalStore) -> None:
    del tmp_path
    interrupted_run(store)
    port = free_port()
    away = MlflowRegistry(f"http://127.0.0.1:{port}", "away", timeout_seconds=2)
    with pytest.raises(Unavailable):
        publish(store, away, "run-1")
    here = MlflowRegistry(server, "away", timeout_seconds=20)
    assert publish(store, here, "run-1").missing == ()


def test_register_final_points_the_aliases_at_the_head_and_keeps_the_better_champion(
    registry: MlflowRegistry, tmp_path: Path
) -> None:
    numbers = {}
    for run, accuracy in (("good", 0.9), ("bad", 0.8), ("better", 0.95)):
        store = LocalStore(tmp_path / run)
        interrupted_run(store, run)
        numbers[run] = register_final(store.url, registry, run, "digits", {"accuracy": accuracy, "val_loss": 1.0})
        assert (
            register_final(store.url, registry, run, "digits", {"accuracy": accuracy, "val_loss": 1.0})
            == numbers[run]
        )
        champion = registry.models.with_alias("digits", "champion")
        candidate = registry.models.with_alias("digits", "candidate")
        assert champion is not None
        assert candidate is not None
        assert candidate.number == numbers[run]
        assert champion.number == numbers["good" if run != "better" else "better"]
    assert len(registry.models.versions("digits")) == 3
    # registering an old run again moves nothing back
    register_final(LocalStore(tmp_path / "bad").url, registry, "bad", "digits", {"accuracy": 0.8, "val_loss": 1.0})
    candidate = registry.models.with_alias("digits", "candidate")
    assert candidate is not None
    assert candidate.number == numbers["better"]


def test_the_champion_loads_from_the_store_without_pickle(registry: MlflowRegistry, store: LocalStore) -> None:
    params = {"channels": 2, "hidden": 8}
    job = load_job("training.jobs.mnist_cnn:MnistCnn", params, None)
    torch.manual_seed(7)
    model = job.model()
    identity = {"job": "training.jobs.mnist_cnn:MnistCnn", "params": params}
    described = {"name": "mnist-cnn", "identity": identity}
    with IncrementalCheckpointer(store, run="run-1", job=described, data=DATA) as checkpointer:
        checkpointer.restore()
        for step in (1, 2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.25)
            checkpointer.save({"model": model_state(model)}, position=Position(epoch=step, step=step))
        checkpointer.wait()
    number = register_final(store.url, registry, "run-1", "digits-served", {"accuracy": 0.5})
    digits = np.random.default_rng(0).random((3, 1, 28, 28), np.float32)
    np.save(store.folder / "digits.npy", digits)
    with torch.inference_mode():
        expected = model.eval()(torch.from_numpy(digits)).numpy()

    code = (
        "import sys, numpy, mlflow.pyfunc\n"
        "model = mlflow.pyfunc.load_model('models:/digits-served@champion')\n"
        "numpy.save(sys.argv[2], model.predict(numpy.load(sys.argv[1])))\n"
    )
    files = [str(store.folder / "digits.npy"), str(store.folder / "answer.npy")]
    environment = {
        **os.environ,
        "MLFLOW_TRACKING_URI": registry.connection.url,
        "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
        "TMPDIR": str(store.folder),  # MLflow leaves its download there
    }
    subprocess.run([sys.executable, "-c", code, *files], check=True, env=environment, timeout=120)
    assert number == "1"
    np.testing.assert_array_equal(np.load(files[1]), expected)


def test_f27_every_address_is_absolute_and_names_no_host(registry: MlflowRegistry, store: LocalStore) -> None:
    interrupted_run(store)
    registry.open_run("run-1", CONFIG, DATA, os.path.relpath(store.folder))
    register_final(store.url, registry, "run-1", "digits-f27", {"accuracy": 0.5})
    addresses = {runs_by_token(registry)["parent"].data.tags["retoma.store"]}
    addresses |= {model.params["store"] for model in models(registry).values()}
    addresses |= {version.tags["retoma.store"] for version in registry.models.versions("digits-f27")}
    assert addresses == {store.folder.as_uri()}
    assert store.folder.as_uri().startswith("file:///")
