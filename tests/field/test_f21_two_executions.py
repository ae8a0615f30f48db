"""F21: one run started twice at once. Duplicates are harmless: one of them is fenced, the result is the same."""

from __future__ import annotations

import threading
from pathlib import Path

import yaml

from tests.support.cuts import mnist_config, start_training, train_until, write_digits
from training.checkpoint.commit import commit
from training.checkpoint.history import read_lineage
from training.checkpoint.manifest import Manifest, encode_manifest
from training.checkpoint.store import LocalStore
from training.checkpoint.token import claim
from training.errors import Fenced

ROOT = Path(__file__).parents[2]


def test_two_processes_on_one_range_end_with_one_history_and_the_straight_result(tmp_path: Path) -> None:
    data, config = write_digits(tmp_path / "mnist"), mnist_config(epochs=6)
    straight = train_until(config, tmp_path / "straight", data)
    store = tmp_path / "twice"
    runs = [start_training(config, store, data) for _ in range(2)]
    answers = [run.answer() for run in runs]
    finished = [answer for answer in answers if answer == straight]
    assert finished, answers
    assert all(answer in (straight, "Fenced") for answer in answers), answers
    lineage = read_lineage(LocalStore(store))
    assert not lineage.problems
    assert lineage.head is not None
    assert lineage.head.manifest.state_digest == straight
    steps = [committed.manifest.position.step for committed in lineage.chain]
    assert steps == sorted(set(steps)), "a step is in the history twice"


def test_nothing_but_the_parent_and_the_automation_on_its_crash_tries_again() -> None:
    """Two owners of retries would multiply, and run the same range twice."""
    from flows.retrain import retrain
    from flows.train import train
    from flows.train_range import train_range
    from infra.automations import wanted
    from infra.settings import Settings

    assert [flow.retries for flow in (train, retrain, train_range)] == [0, 0, 0]
    deployments = yaml.safe_load((ROOT / "infra/prefect.yaml").read_text())["deployments"]
    assert not [each["name"] for each in deployments if "retries" in str(each).lower()]
    starting = [
        (each["name"], each["trigger"]["match_related"][0]["prefect.resource.name"])
        for each in wanted(Settings())
        if each["actions"][0]["type"] == "run-deployment"
    ]
    assert starting == [("retoma: train crashed", ["train"]), ("retoma: retrain crashed", ["retrain"])]


def test_publishing_the_same_checkpoint_again_is_a_no_op(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    document = Manifest(
        run="r",
        token=claim(store, "r", {}),
        sequence=0,
        kind="base",
        layout_digest="d",
        values=[],
        chunk_count=0,
        state_digest="s",
    )
    first = commit(store, document)
    assert commit(store, document) == first
    assert store.get(document.key) == encode_manifest(document)[0]


def test_of_many_that_publish_different_bytes_under_one_key_one_wins(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    token, outcomes = claim(store, "r", {}), []

    def publish(number: int) -> None:
        document = Manifest(
            run="r",
            token=token,
            sequence=0,
            kind="base",
            layout_digest="d",
            values=[number],
            chunk_count=0,
            state_digest="s",
        )
        try:
            commit(store, document)
        except Fenced:
            outcomes.append("fenced")
        else:
            outcomes.append("committed")

    threads = [threading.Thread(target=publish, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["committed"] + ["fenced"] * 7
