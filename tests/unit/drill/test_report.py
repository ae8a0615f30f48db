"""The report: complete in itself, and it says what was seen."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

from tasks.drill.recording import Recording
from tasks.drill.report import Drill, markdown, page
from tasks.drill.run import write_report
from tasks.drill.timeline import draw
from tests.unit.drill.histories import killed

SVG = "{http://www.w3.org/2000/svg}"


def drill(*recordings: Recording) -> Drill:
    return Drill(datetime(2026, 1, 2, tzinfo=UTC), {"store": "a <folder>"}, list(recordings), {"random": "no time"})


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = page(drill(killed()))
    links = re.findall(r"(?:src|href)\s*=|url\(|@import", text)
    assert links == []
    assert re.findall(r"https?://[^\s\"']+", text) == ["http://www.w3.org/2000/svg"]
    assert "a &lt;folder&gt;" in text


def test_both_forms_say_verdict_times_and_loss() -> None:
    for text in (page(drill(killed())), markdown(drill(killed()))):
        for part in ("kill-train", "supervisor", "3.0 s", "53 %", "no time"):
            assert part in text, part
    assert "Drill: pass" in markdown(drill(killed()))
    assert "FAIL bit for bit the straight run" in markdown(drill(killed(digest="xxh3:other")))


def test_a_drill_without_a_recording_has_not_passed() -> None:
    assert not drill().passed
    assert drill(killed()).passed
    assert not drill(killed(), killed(outcome="FAILED")).passed


def test_the_picture_shows_attempts_steps_checkpoints_faults_and_verdicts() -> None:
    picture = ElementTree.fromstring(draw(killed()))  # noqa: S314 - our own
    classes = [element.get("class") for element in picture.iter() if element.tag != f"{SVG}style"]
    assert classes.count("useful") == 2
    assert classes.count("lost") == 1
    assert classes.count("commit") == 4
    assert classes.count("fault") == 1
    assert classes.count("verdict") == 1
    bars = list(picture.iter(f"{SVG}rect"))
    assert all(float(bar.get("width", "0")) > 0 for bar in bars)
    assert all(86 <= float(bar.get("x", "0")) <= 960 for bar in bars)


def test_a_recording_without_anything_can_be_drawn() -> None:
    empty = Recording(scenario="x", run="x", started=0.0, ended=1.0, interval_steps=0)
    ElementTree.fromstring(draw(empty))  # noqa: S314 - our own
    assert "FAIL" in markdown(drill(empty))


def test_a_recording_is_kept_and_read_again(tmp_path: Path) -> None:
    files = write_report(drill(killed()), tmp_path)
    assert Recording.model_validate_json(files["kill-train.json"].read_text()) == killed()
    assert set(files) == {"drill.md", "drill.html", "kill-train.json"}
