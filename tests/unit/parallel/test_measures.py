"""A real group whose one rank is slow: the figures name it, and agree with how slow it was made."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cuts import gpt_config, write_corpus
from tests.support.launched import Launched
from training.checkpoint.history import read_lineage
from training.checkpoint.manifest import Manifest
from training.config import JobConfig
from training.ports import Done, Profiled, Slow

pytestmark = pytest.mark.xdist_group("ranks")
SECONDS = 0.15  # so much slower is one rank
STEPS = 12
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"world": 2},
    "fsdp": {"world": 3, "data": "fsdp"},
    "tp": {"world": 2, "tensor": 2},
}


class Scene:
    """Starts groups that train the small GPT, one micro-batch a step, two checkpoints an epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, write_corpus(folder / "corpus")
        self.orders = folder / "orders"
        self.orders.mkdir()
        self._launched: list[Launched] = []

    def config(self, parallel: dict[str, Any], **changes: Any) -> JobConfig:
        params = {**gpt_config().params, "windows_per_epoch": 6 * STEPS, "folder": str(self.orders)}
        values: dict[str, Any] = {
            "job": "tests.support.slow_gpt:SlowGpt",
            "params": params,
            "parallel": parallel,
            "batch_size": 6,
            "accumulate_batches": 1,
            "epochs": 1,
            "checkpoint": {"every_steps": STEPS // 2},
        }
        return gpt_config(**{**values, **changes})

    def start(self, config: JobConfig, name: str = "run", profiles: Path | None = None) -> Launched:
        self._launched.append(Launched(config, self.folder / name, self.data, profile_folder=profiles))
        return self._launched[-1]

    def close(self) -> None:
        for each in self._launched:
            each.close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.close()


def figures(manifest: Manifest) -> dict[str, float]:
    """Of a checkpoint, without what is logged each n-th step."""
    return {name: value for point in manifest.metrics for name, value in point.values.items()}


@pytest.mark.soak
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_slow_rank_is_the_one_that_does_not_wait_and_the_others_wait_as_long_as_it_is_slow(
    strategy: str, scene: Scene
) -> None:
    (scene.orders / "late").write_text(f"1 {SECONDS}")
    parallel = STRATEGIES[strategy]
    group = scene.start(scene.config(parallel))
    assert isinstance(group.end(), Done)
    head = read_lineage(group.store).head
    assert head is not None
    told = figures(head.manifest)
    step_seconds = told["group/step_seconds"]
    waits = [told[f"rank/{rank}/waiting_share"] * step_seconds for rank in range(parallel["world"])]
    own = [told[f"rank/{rank}/own_seconds"] for rank in range(parallel["world"])]
    assert waits[1] < 0.1 * SECONDS, told
    assert own[1] == max(own)
    for rank in (0, *range(2, parallel["world"])):
        assert waits[rank] == pytest.approx(SECONDS, rel=0.2), told
    assert own[1] + told["group/communication_share"] * step_seconds == pytest.approx(step_seconds)
    assert told["train/samples_per_second"] == pytest.approx(6 / step_seconds, rel=0.3)
    assert set(head.manifest.written_by_rank()) == set(range(parallel["world"]))


@pytest.mark.soak
def test_a_rank_that_is_slow_for_long_is_told_while_it_is(scene: Scene) -> None:
    (scene.orders / "late").write_text(f"1 {SECONDS}")
    params = {**scene.config({}).params, "windows_per_epoch": 6 * 100}
    group = scene.start(scene.config({"world": 2}, params=params))
    assert isinstance(group.end(), Done)
    (slow,) = [message for message in group.heard if isinstance(message, Slow)]
    assert (slow.rank, slow.over) == (1, False)
    assert slow.excess_seconds == pytest.approx(SECONDS, rel=0.2)
    head = read_lineage(group.store).head
    assert head is not None
    (episode,) = head.manifest.meta["slow_ranks"]
    assert (episode["rank"], episode["until_step"]) == (1, None)


@pytest.mark.soak
def test_a_profile_of_each_rank_is_told_and_changes_no_bit(scene: Scene, tmp_path: Path) -> None:
    profiles = tmp_path / "profiles"
    profiles.mkdir()
    plain = scene.start(scene.config({"world": 2}), "plain").end()
    profiled = scene.start(scene.config({"world": 2}, profile={"start_step": 2, "steps": 2}), "profiled", profiles)
    done = profiled.end()
    assert isinstance(plain, Done)
    assert isinstance(done, Done)
    assert done.state_digest == plain.state_digest
    told = {message.rank: message.path for message in profiled.heard if isinstance(message, Profiled)}
    assert sorted(told) == [0, 1]
    for rank, path in told.items():
        assert path == str(profiles / f"rank-{rank}.json.gz")
        trace = json.loads(gzip.decompress(Path(path).read_bytes()))
        names = [event.get("name", "") for event in trace["traceEvents"]]
        assert names.count("Optimizer.step#AdamW.step") == 2
        assert {"step 2", "step 3"} <= set(names)
        assert any(name.startswith("gloo:all_reduce") for name in names)
        assert trace["distributedInfo"]["rank"] == rank
    assert "profiler" not in profiled.log.read_text()
