"""Publishing when MLflow is away, and what is written for people."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from unittest import mock
from xml.etree import ElementTree

import pytest

from infra.mlflow_lineage_page import lineage_page, lineage_table
from infra.mlflow_metrics import points_of
from infra.mlflow_registry import MlflowRegistry
from infra.mlflow_text import checkpoint_name, cut, milliseconds
from tasks.publish import Publisher, publish
from tasks.register import _choose, pointer_of
from tests.support.stores import RunBuilder, interrupted_run
from training.checkpoint.history import read_lineage
from training.checkpoint.store import MemoryStore, open_store
from training.checkpoint.token import Skipped
from training.config import JobConfig
from training.errors import Diverged, Invalid, Unavailable

CONFIG = JobConfig(job="training.jobs.mnist_cnn:MnistCnn")


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """The registry sets MLflow's variables; they must not reach other tests."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def refusing() -> Iterator[str]:
    """An address where nobody listens, and nobody else can."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def mute() -> Iterator[str]:
    """A server that accepts and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(64)
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def foreign() -> Iterator[str]:
    """A server that is not MLflow."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(64)

        def answer() -> None:
            while True:
                try:
                    peer, _ = server.accept()
                except OSError:
                    return
                with peer:
                    peer.recv(65536)
                    peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    thread.join(5)


def test_building_a_registry_makes_no_traffic_and_does_not_import_mlflow_or_torch() -> None:
    code = (
        "import sys\n"
        "from infra.mlflow_registry import MlflowRegistry\n"
        "from tasks.publish import Publisher\n"
        "import tasks.register\n"
        "MlflowRegistry('http://192.0.2.1:1')\n"
        "assert not {'mlflow', 'torch', 'prefect'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_address_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(Invalid, match="RETOMA_MLFLOW_URL"):
        MlflowRegistry("sqlite:///mlflow.db")


def test_a_run_id_that_mlflow_cannot_quote_is_refused_before_any_search(refusing: str) -> None:
    registry = MlflowRegistry(refusing)
    with (
        mock.patch.object(registry.runs, "experiment_id", return_value="1"),
        pytest.raises(Invalid, match="may hold only"),
    ):
        registry.newest("it's")


def test_a_server_that_refuses_costs_less_than_three_seconds(refusing: str) -> None:
    registry = MlflowRegistry(refusing, timeout_seconds=5)
    assert registry.connection.client is not None  # the import of MLflow is no waiting
    started = time.monotonic()
    with pytest.raises(Unavailable, match="did not answer"):
        registry.newest("run-1")
    assert time.monotonic() - started < 3


def test_a_mute_server_costs_about_twice_the_timeout(mute: str) -> None:
    registry = MlflowRegistry(mute, timeout_seconds=1)
    assert registry.connection.client is not None
    started = time.monotonic()
    with pytest.raises(Unavailable):
        registry.open_run("run-1", CONFIG, {}, "memory://x")
    assert 0.9 < time.monotonic() - started < 6


def test_a_server_that_is_not_mlflow_is_named(foreign: str) -> None:
    with pytest.raises((Invalid, Unavailable)) as raised:
        MlflowRegistry(foreign, timeout_seconds=2).newest("run-1")
    assert foreign in str(raised.value)
    assert raised.value.hint


@pytest.mark.parametrize("server", ["refusing", "mute"])
def test_publishing_never_holds_up_a_training_and_says_what_is_missing(
    server: str, request: pytest.FixtureRequest
) -> None:
    url = f"memory://never-holds-up-{server}"
    builder = RunBuilder(open_store(url))
    registry = MlflowRegistry(request.getfixturevalue(server), timeout_seconds=1)
    publisher = Publisher(url, registry, "run-1", between_seconds=0)
    publisher.start()
    token = builder.attempt(0, 1)
    slowest = 0.0
    for step in range(1, 4):
        builder.commit(token, step, "base" if step == 1 else "delta")
        started = time.monotonic()
        publisher.attempt_started(token, 0, 1, {"host": "node-1"})
        publisher.notify()
        publisher.attempt_ended(token, "FAILED", "as an example")
        slowest = max(slowest, time.monotonic() - started)
    report = publisher.close(timeout_seconds=20)
    assert slowest < 0.5
    assert report.missing == ("000001/00000000", "000001/00000001", "000001/00000002")
    assert report.total == 0
    assert report.error is not None
    assert "did not answer" in report.error


def test_closing_is_bounded_even_while_a_request_hangs(mute: str) -> None:
    url = "memory://closing-is-bounded"
    interrupted_run(open_store(url))
    publisher = Publisher(url, MlflowRegistry(mute, timeout_seconds=2), "run-1")
    publisher.start()
    publisher.notify()
    started = time.monotonic()
    report = publisher.close(timeout_seconds=0.2)
    assert time.monotonic() - started < 2
    assert len(report.missing) == 6
    publisher._thread.join(30)


def test_without_a_registry_nothing_happens() -> None:
    publisher = Publisher("memory://nowhere", None, "run-1")
    publisher.start()
    publisher.notify()
    publisher.attempt_ended(1, "FINISHED")
    assert publisher.close().error == "no MLflow is configured"


def test_a_store_that_is_no_run_yet_publishes_nothing_but_needs_mlflow(refusing: str) -> None:
    with pytest.raises(Unavailable):
        publish(MemoryStore(), MlflowRegistry(refusing), "run-1")


def test_a_point_has_the_same_time_whoever_publishes_it() -> None:
    store = MemoryStore()
    interrupted_run(store)
    first, second = read_lineage(store), read_lineage(store)
    for one, other in zip(first.chain, second.chain, strict=True):
        assert points_of(one) == points_of(other)
        assert all(point.timestamp == milliseconds(one.manifest.writer.created) > 0 for point in points_of(one))


def test_names_sort_by_age_within_a_kind() -> None:
    store = MemoryStore()
    interrupted_run(store)
    names = [checkpoint_name(c) for c in read_lineage(store).chain if c.manifest.kind == "delta"]
    assert names == sorted(names)
    assert names[-1] == "delta-000003-00000005"


def test_long_text_is_cut_visibly() -> None:
    assert cut("x" * 10, 10) == "x" * 10
    assert cut("x" * 11, 10) == "xxxxxxx..."
    assert milliseconds("no time") == 0


def test_the_lineage_page_is_whole_markup_without_scripts_and_draws_every_checkpoint() -> None:
    store = MemoryStore()
    builder = interrupted_run(store)
    bad = builder.claim(2, 4, host="<script>alert(1)</script>")
    builder.seal(bad, builder.committed[3, 4], (Skipped(key="manifests/000003/00000005.json", reason="a < b & c"),))
    lineage = read_lineage(store)
    page = lineage_page("run-1", "memory://x", lineage)
    assert "<script" not in page
    picture = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + len("</svg>")])  # noqa: S314
    kinds = [kind for n in picture.iter() if (kind := n.get("class", "")) in ("base", "delta", "from", "head")]
    assert sorted(kinds) == ["base", "base", "delta", "delta", "delta", "from", "from", "from", "head"]
    assert "a &lt; b &amp; c" in page
    assert len(lineage_table(lineage)["data"]) == len(lineage.chain) == 5


def test_the_lineage_page_of_a_run_without_checkpoints_says_so() -> None:
    store = MemoryStore()
    RunBuilder(store).claim(0, 1)
    page = lineage_page("run-1", "memory://x", read_lineage(store))
    assert "no checkpoint yet" in page
    assert "never started" in page


def test_the_deciding_metric_is_the_accuracy_or_the_first_loss() -> None:
    assert _choose({"val_loss": 1.0, "accuracy": 0.5}, None) == "accuracy"
    assert _choose({"score": 1.0, "val_loss": 1.0, "bits_per_char": 0.5}, None) == "val_loss"
    assert _choose({"score": 1.0}, None) == "score"
    with pytest.raises(Invalid, match="no metric 'f1'"):
        _choose({"score": 1.0}, "f1")
    with pytest.raises(Invalid, match="there are: none"):
        _choose({}, None)
    with pytest.raises(Diverged):
        _choose({"val_loss": float("nan")}, None)


def test_a_checkpoint_without_a_job_is_no_model() -> None:
    store = MemoryStore()
    builder = RunBuilder(store, job={"name": "library use"})
    token = builder.attempt(0, 1)
    with pytest.raises(Invalid, match="does not name its job"):
        pointer_of(builder.commit(token, 1, "base"), store.url)
