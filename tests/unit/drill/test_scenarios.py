"""Scenarios: chosen by name, repeatable by seed, refused where they are impossible."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from infra.settings import Settings
from tasks.drill.faults import flip_newest_byte
from tasks.drill.rig import Rig
from tasks.drill.scenarios import Scenario, about, chosen
from tests.unit.test_cli_files import a_state
from training.checkpoint import IncrementalCheckpointer
from training.checkpoint.restore import restore_newest
from training.checkpoint.store import LocalStore
from training.errors import Invalid

ROOT = Path(__file__).parents[3]


def rig(tmp_path: Path, own: bool = True) -> Rig:
    return Rig(Settings(home=ROOT, state_dir=tmp_path), tmp_path, own=own)


def test_every_scenario_of_the_issue_is_there() -> None:
    wanted = "kill-train kill-flow kill-parent freeze-train freeze-tree hang hang-gil partition-prefect"
    wanted += " partition-store partition-both slow-disk full-disk corrupt-object restart-prefect restart-mlflow"
    assert set(wanted.split()) | {"kill-pending", "random"} <= set(about())
    assert chosen(["all"]) == list(about())
    assert chosen([]) == ["kill-train+freeze-train+hang-gil+kill-flow"]


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(Invalid, match="no scenario kill-tran") as caught:
        chosen(["kill-tran"])
    assert "kill-train" in str(caught.value.hint)
    with pytest.raises(Invalid, match="no scenario random"):
        chosen(["kill-train+random"])


def test_faults_that_are_joined_are_made_one_after_the_other_in_one_training(tmp_path: Path) -> None:
    scenario = Scenario("kill-flow+hang", trials=2)
    made = [planned.fault.name for planned in scenario.plan(rig(tmp_path), 0.1)]
    assert made == ["kill-flow", "hang", "kill-flow", "hang"]
    assert scenario.steps > Scenario("kill-flow").steps
    assert "+" not in scenario.run_name
    assert Scenario("hang+freeze-tree").why_not(rig(tmp_path, own=False)) is not None


def test_the_same_seed_makes_the_same_moments(tmp_path: Path) -> None:
    def moments(seed: int) -> list[tuple[str, float]]:
        scenario = Scenario("random", minutes=60, mean_seconds=1.0, seed=seed)
        plan = scenario.plan(rig(tmp_path), 0.1)
        return [(planned.fault.name, planned.wait_seconds) for planned in itertools.islice(plan, 20)]

    assert moments(1) == moments(1)
    assert moments(1) != moments(2)
    assert len({name for name, _ in moments(1)}) > 3
    once = [planned.wait_seconds for planned in Scenario("hang", trials=5, seed=3).plan(rig(tmp_path), 0.1)]
    assert len(set(once)) == 5


def test_what_is_impossible_here_is_said_and_not_drawn(tmp_path: Path) -> None:
    assert "--s3" in str(Scenario("partition-store").why_not(rig(tmp_path)))
    assert Scenario("partition-prefect").why_not(rig(tmp_path)) is None
    assert Scenario("partition-prefect").why_not(rig(tmp_path, own=False)) is not None
    plan = Scenario("random", minutes=60, mean_seconds=0.1).plan(rig(tmp_path, own=False), 0.1)
    drawn = {planned.fault.name for planned in itertools.islice(plan, 100)}
    assert drawn == {"kill-train", "freeze-train", "hang", "hang-gil", "kill-flow"}


def test_a_flipped_byte_costs_the_newest_checkpoint_and_no_other(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    with IncrementalCheckpointer(store, run="run") as checkpointer:
        for seed in range(3):
            checkpointer.save(a_state(seed))
    flip_newest_byte(store, "run")
    restored = restore_newest(store, "run")
    assert restored is not None
    assert restored.checkpoint.ref.sequence == 1
    assert len(restored.skipped) == 1
