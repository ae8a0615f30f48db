"""A profile of one process alone: the steps that were asked for, and the same training."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.cuts import gpt_config, write_corpus
from training import profile
from training.config import JobConfig, parse_config
from training.errors import Invalid
from training.ports import Beat, Message, Pause, Profiled, Saved
from training.session import train_range

STEP = "Optimizer.step#AdamW.step"


class Scene:
    """The small GPT: six steps in three epochs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, write_corpus(folder / "corpus")
        self.profiles = folder / "profiles"
        self.profiles.mkdir()
        self.said: list[Message] = []

    def train(self, config: JobConfig, name: str) -> str:
        self.said.clear()
        store, report = str(self.folder / name), self.said.append
        done = train_range(config, store, "r", data_folder=self.data, report=report, profile_folder=self.profiles)
        return done.state_digest

    def trace(self) -> list[str]:
        """Names of the events of the only profile."""
        (told,) = [message for message in self.said if isinstance(message, Profiled)]
        assert told == Profiled(rank=0, path=str(self.profiles / "rank-0.json.gz"))
        events = json.loads(gzip.decompress(Path(told.path).read_bytes()))["traceEvents"]
        return [event.get("name", "") for event in events]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_the_steps_that_were_asked_for_are_profiled_and_no_bit_changes(scene: Scene) -> None:
    plain = scene.train(gpt_config(), "plain")
    assert not any(isinstance(message, Profiled) for message in scene.said)
    assert scene.train(gpt_config(profile={"start_step": 1, "steps": 3}), "profiled") == plain
    assert scene.trace().count(STEP) == 3


def test_each_step_is_marked_by_its_number(scene: Scene) -> None:
    scene.train(gpt_config(profile={"start_step": 1, "steps": 3}), "run")
    names = scene.trace()
    marks = {name for name in names if name.startswith("step ")}
    assert marks == {"step 1", "step 2", "step 3"}


def test_the_profiler_writes_nothing_of_its_own_into_the_log(
    scene: Scene, capfd: pytest.CaptureFixture[str]
) -> None:
    scene.train(gpt_config(profile={"start_step": 2, "steps": 1}), "run")
    assert "profiler" not in capfd.readouterr().err


def test_a_profile_that_cannot_be_written_is_left_out_and_said(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.profiles.rmdir()
    scene.train(gpt_config(profile={"start_step": 2, "steps": 1}), "run")
    assert not any(isinstance(message, Profiled) for message in scene.said)
    assert "the profile of rank 0 is left out: [Errno 2]" in capsys.readouterr().err


def test_a_range_that_ends_within_the_steps_writes_those_it_had(scene: Scene) -> None:
    scene.train(gpt_config(profile={"start_step": 4, "steps": 100}), "run")
    assert scene.trace().count(STEP) == 2
    assert list(scene.profiles.iterdir()) == [scene.profiles / "rank-0.json.gz"]


def test_starting_and_writing_are_announced_and_end_with_a_sign_of_life(scene: Scene) -> None:
    scene.train(gpt_config(profile={"start_step": 2, "steps": 1}), "run")
    said = [message for message in scene.said if not isinstance(message, Saved)]  # from the background, any time
    places = [n for n, m in enumerate(said) if isinstance(m, Pause) and m.what == profile.PROFILING]
    assert len(places) == 2
    assert all(isinstance(said[place + 1], Beat) for place in places)


def test_what_is_too_large_is_left_out_and_said(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile, "MOST_BYTES", 100)
    scene.train(gpt_config(profile={"start_step": 2, "steps": 1}), "run")
    assert not any(isinstance(message, Profiled) for message in scene.said)
    assert not list(scene.profiles.iterdir())
    assert "set profile.steps to fewer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"start_step": -1}, "profile.start_step"),
        ({"start_step": 1, "steps": 0}, "profile.steps"),
        ({"steps": 3}, "profile.start_step"),
        ({"start_step": 1, "step": 3}, "unknown key 'profile.step'"),
    ],
)
def test_a_section_that_cannot_be_is_refused_by_name(section: dict[str, Any], named: str) -> None:
    with pytest.raises(Invalid, match=named):
        parse_config({"job": "a:B", "profile": section})
