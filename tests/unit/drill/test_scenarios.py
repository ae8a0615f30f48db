"""Scenarios: chosen by name, repeatable by seed, refused where they are impossible."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from infra.settings import Settings
from tasks.drill.faults import flip_newest_byte
from tasks.drill.job import BUILT_IN, users_job
from tasks.drill.rig import NODES, Node, Rig
from tasks.drill.run import _jobs
from tasks.drill.scenarios import OVER_NODES, Scenario, about, chosen
from tasks.drill.wires import Wires
from tests.unit.test_cli_files import a_state
from training.checkpoint import IncrementalCheckpointer
from training.checkpoint.restore import restore_newest
from training.checkpoint.store import LocalStore
from training.errors import Invalid
from training.parallel.config import ParallelConfig

ROOT = Path(__file__).parents[3]


def rig(tmp_path: Path, own: bool = True) -> Rig:
    return Rig(Settings(home=ROOT, state_dir=tmp_path), tmp_path, own=own)


def test_every_scenario_of_the_issue_is_there() -> None:
    wanted = "kill-train kill-flow kill-parent freeze-train freeze-tree hang hang-gil partition-prefect"
    wanted += " partition-store partition-both slow-disk full-disk corrupt-object restart-prefect restart-mlflow"
    wanted += " kill-rank freeze-rank hang-rank lose-node shrink-grow cut-rank freeze-node"
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


def test_a_scenario_chooses_the_group_that_it_needs() -> None:
    assert Scenario("kill-train").group == ParallelConfig()
    assert Scenario("kill-rank").group == ParallelConfig(world=2)
    for name in ("lose-node", "shrink-grow", "cut-rank", "freeze-node", "kill-rank+lose-node"):
        assert Scenario(name).group == OVER_NODES
        assert Scenario(name).shrinks
    assert not Scenario("kill-rank").shrinks
    assert OVER_NODES.fewest_nodes < OVER_NODES.nodes


def rig_of_nodes(tmp_path: Path) -> Rig:
    """Whose nodes share the loopback."""
    made = rig(tmp_path)
    nothing: Any = None
    made.nodes = {name: Node(name, Wires({}), nothing, nothing) for name in NODES}
    return made


@pytest.mark.parametrize(
    ("name", "group", "reason"),
    [
        ("lose-node", {}, "--set parallel.world=2 --set parallel.nodes=2"),
        ("lose-node", {"world": 2}, "--set parallel.world=2 --set parallel.nodes=2"),
        ("lose-node", {"world": 3, "nodes": 3, "min_nodes": 1}, "a drill has 2 nodes"),
        ("kill-rank", {"world": 3, "nodes": 3}, "a drill has 2 nodes"),
        ("shrink-grow", {"world": 2, "nodes": 2}, "--set parallel.min_nodes=1"),
        ("kill-node", {"world": 2, "nodes": 2}, "none is free to take the range"),
        ("kill-pending", {"world": 2, "nodes": 2}, "none is free to take the range"),
        ("kill-node+lose-node", {"world": 2, "nodes": 2, "min_nodes": 1}, "none is free to take the range"),
        ("cut-rank", {"world": 2, "nodes": 2, "min_nodes": 1}, "needs network namespaces"),
        ("lose-node", {"world": 4, "nodes": 2, "min_nodes": 1}, None),
        ("freeze-node+kill-flow", {"world": 2, "nodes": 2, "min_nodes": 1}, None),
        ("kill-rank", {"world": 2, "nodes": 2}, None),
    ],
)
def test_a_group_over_nodes_is_refused_where_it_makes_no_sense(
    tmp_path: Path, name: str, group: dict[str, Any], reason: str | None
) -> None:
    found = Scenario(name).why_not(rig_of_nodes(tmp_path), ParallelConfig(**group))
    assert (found is None) if reason is None else (found is not None and reason in found)
    assert Scenario("lose-node").why_not(rig(tmp_path, own=False), OVER_NODES) == "needs a stack of the drill's own"
    assert (
        Scenario("kill-train").why_not(rig(tmp_path, own=False), OVER_NODES) == "needs a stack of the drill's own"
    )


def test_a_users_group_goes_on_with_one_node_unless_the_job_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.drill.job._made", lambda _root, config, *_: config)

    def parallel(*changes: str, shrinks: bool = True) -> ParallelConfig:
        made: Any = users_job(ROOT, ROOT / BUILT_IN, list(changes), shrinks=shrinks)
        return ParallelConfig.model_validate(made.parallel)

    two = ("parallel.world=2", "parallel.nodes=2")
    assert parallel(*two).min_nodes == 1
    assert parallel(*two, "parallel.min_nodes=2").min_nodes == 2
    assert parallel(*two, shrinks=False).min_nodes is None
    assert parallel("parallel.world=2").min_nodes is None


def test_scenarios_of_one_group_share_the_longest_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[Any] = []

    def make(_root: Path, *wanted: Any) -> Any:
        made.append(wanted)
        return wanted

    monkeypatch.setattr("tasks.drill.run.built_in_job", make)
    scenarios = [Scenario(name) for name in ("kill-train", "hang+kill-flow", "shrink-grow", "lose-node", "random")]
    job_of: Any = _jobs(tmp_path, None, [], scenarios)
    assert job_of(scenarios[0]) == job_of(scenarios[1]) == (scenarios[1].steps, ParallelConfig())
    assert job_of(scenarios[3]) == job_of(scenarios[2]) == (scenarios[2].steps, OVER_NODES)
    assert job_of(scenarios[4]) == (scenarios[4].steps, ParallelConfig())
    assert len(made) == 3, "each is made once"


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
