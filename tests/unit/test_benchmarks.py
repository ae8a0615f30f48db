"""The benchmark runs, with tiny states, and writes what others read. No figure of time is asserted."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.engines import ENGINES, Engine
from benchmarks.limits import floor_ratio
from benchmarks.measure import digests, measure
from benchmarks.recording import ROWS, Recording, _changes
from benchmarks.results import METRICS
from benchmarks.sequences import State, flatten, nested

pytestmark = pytest.mark.xdist_group("benchmarks")  # one process, and so one smoke run
PROJECT = Path(__file__).parents[2]
SEQUENCES = {"dense", "finetune", "lora", "embedding"}
PRESENT = {"retoma", "retoma-int8", "retoma-int4", "torch.save", "safetensors", "dcp.save", "dcp.async_save"}


class Smoke(NamedTuple):
    """A run that has ended, and what it was asked for."""

    folder: Path
    sequences: set[str]
    engines: set[str]

    @property
    def rows(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads((self.folder / "out/engine.json").read_text())
        return found


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(({"dense", "finetune"}, {"retoma", "torch.save", "dcp.async_save"}), id="some"),
        pytest.param((SEQUENCES, PRESENT), id="all", marks=pytest.mark.soak),
    ],
)
def smoke(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Smoke:
    sequences, engines = request.param
    folder = tmp_path_factory.mktemp("bench")
    environment = {**os.environ, "TMPDIR": str(folder / "scratch")}
    (folder / "scratch").mkdir()
    command = [sys.executable, "-m", "benchmarks", "--smoke", "--out", str(folder / "out")]
    command += ["--sequences", ",".join(sorted(sequences)), "--engines", ",".join(sorted(engines))]
    done = subprocess.run(
        command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=270, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return Smoke(folder, sequences, engines)


def test_the_rows_have_the_agreed_form(smoke: Smoke) -> None:
    for row in smoke.rows:
        assert row.keys() == {"sequence", "gap_steps", "engine", "metric", "value"}
        assert row["sequence"] in smoke.sequences
        assert row["metric"] in METRICS
        assert row["engine"] in ENGINES
        assert isinstance(row["gap_steps"], int)
        assert math.isfinite(row["value"])
        assert row["value"] >= 0


def test_every_engine_is_measured_on_every_sequence(smoke: Smoke) -> None:
    per_gap = set(METRICS) - {"slowdown"}
    found = {(row["sequence"], row["engine"], row["metric"]) for row in smoke.rows if row["gap_steps"] == 10}
    assert found >= {(s, engine, metric) for s in smoke.sequences for engine in smoke.engines for metric in per_gap}
    slowed = {row["engine"] for row in smoke.rows if row["metric"] == "slowdown"}
    assert slowed == smoke.engines


def test_a_delta_is_smaller_than_a_whole_save(smoke: Smoke) -> None:
    sizes = {(r["sequence"], r["engine"]): r["value"] for r in smoke.rows if r["metric"] == "bytes_ratio"}
    for sequence in smoke.sequences:
        assert 0 < sizes[sequence, "retoma"] < 0.95 < sizes[sequence, "torch.save"] < 1.1


def test_the_page_says_that_it_is_a_smoke_run_and_the_chart_is_an_image(smoke: Smoke) -> None:
    (page,) = (smoke.folder / "out").glob("*-engine.md")
    assert "A smoke run" in page.read_text()
    assert all(f"| {name} |" in page.read_text() for name in smoke.engines)
    assert ElementTree.parse(smoke.folder / "out/engine.svg").getroot().tag.endswith("svg")  # noqa: S314 - our own


def test_nothing_is_left_behind(smoke: Smoke) -> None:
    left = [path.name for path in (smoke.folder / "scratch").iterdir()]
    assert not [name for name in left if name.startswith("retoma-bench")]


def small_states() -> list[State]:
    """A table of which one row changes, a tensor that changes, one that does not, a scalar and integers."""
    generator = torch.Generator().manual_seed(0)
    table, dense = torch.randn(64, 8, generator=generator), torch.randn(500, generator=generator)
    states = []
    for number in range(3):
        table, dense = table.clone(), dense + 0.01
        table[number] += 1
        state = {"table": table, "dense": dense, "still": torch.ones(40), "step": torch.tensor(float(number))}
        states.append({**state, "words": torch.arange(number, number + 7)})
    return states


def recorded(folder: Path) -> tuple[Recording, list[State]]:
    recording, states, before = Recording(folder, "dense", 10, 0, 3), small_states(), State()
    folder.mkdir()
    for number, state in enumerate(states):
        save_file(_changes(before, state), recording.file(number))
        before = state
    return recording, states


def test_a_recording_gives_back_every_state_and_holds_only_what_changed(tmp_path: Path) -> None:
    recording, states = recorded(tmp_path / "states")
    live = recording.start()
    for number, state in enumerate(states):
        if number:
            recording.advance(live, number)
            assert set(load_file(recording.file(number))) == {
                "table" + ROWS,
                "table\nvalues",
                "dense",
                "step",
                "words",
            }
        assert digests(live) == digests(state)


def test_the_floor_counts_rows_that_changed_and_nothing_that_did_not(tmp_path: Path) -> None:
    recording, states = recorded(tmp_path / "states")
    raw = sum(value.nbytes for value in states[0].values())
    dense_and_one_row = states[0]["dense"].nbytes + 8 * 4 + 64 / 8 + 4 + 7 * 8
    assert 0 < floor_ratio(recording) < dense_and_one_row / raw
    still = Recording(tmp_path / "still", "dense", 10, 0, 2)
    still.folder.mkdir()
    for number in range(2):
        save_file(_changes({} if number == 0 else states[0], states[0]), still.file(number))
    assert floor_ratio(still) == 0


def test_an_engine_that_restores_another_state_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forgetful(Engine):
        """Writes every state and restores the last."""

        name = "forgetful"

        def save(self, state: State, number: int) -> None:
            (self.folder / str(number)).write_bytes(b"1234")
            self.last = {path: value + 1 for path, value in state.items()}

        def restore(self, number: int) -> State:
            return self.last

    recording, _ = recorded(tmp_path / "states")
    monkeypatch.setitem(ENGINES, "forgetful", Forgetful)
    before = torch.get_num_threads()
    with pytest.raises(AssertionError, match="another state"):
        measure("forgetful", recording, tmp_path / "store", saves=3, repeats=1)
    torch.set_num_threads(before)


def test_flat_and_nested_states_are_the_same_tensors() -> None:
    state = {"model/a": torch.ones(2), "optimizer/state/a/step": torch.ones(())}
    tree = nested(state)
    assert tree["optimizer"]["state"]["a"]["step"] is state["optimizer/state/a/step"]
    assert digests(flatten(tree)) == digests(state)
