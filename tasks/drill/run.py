"""Runs scenarios one after the other on one rig, and writes the report."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path

from infra.settings import Settings
from tasks.drill.folder import drill_folder, sweep
from tasks.drill.job import DrillJob, Straight, built_in_job, users_job
from tasks.drill.recording import Recording
from tasks.drill.report import Drill, markdown, now, page
from tasks.drill.rig import Report, Rig, own_rig, users_rig
from tasks.drill.scenarios import RANDOM, Scenario
from tasks.drill.session import PENDING, Session
from training.parallel.config import ParallelConfig
from training.straight import Segment


def run_drill(
    settings: Settings,
    scenarios: Sequence[Scenario],
    report: Report,
    *,
    s3: bool = False,
    here: bool = False,
    job: Path | None = None,
    overrides: Sequence[str] = (),
    each: Callable[[Recording], None] = lambda _: None,
) -> Drill:
    """Run the scenarios. Changes this process's environment, see `tasks.drill.rig`.

    Args:
        settings: the user's; a drill has a stack of its own, unless `here`.
        scenarios: what to drill.
        report: receives a line for people.
        s3: on a SeaweedFS server of its own instead of a folder.
        here: on the user's own stack.
        job: the user's job; default: a small one that comes with retoma.
        overrides: changes of the job.
        each: receives each recording as soon as there is one.

    Raises:
        Invalid: the job can't be drilled, or the rig can't be made.
        Unavailable: a server did not start.
    """
    sweep(settings.home, report)
    with drill_folder() as folder:
        job_of = _jobs(settings.home, job, list(overrides), scenarios)
        straights = _Straights(settings.home, folder)
        for scenario in scenarios:
            if not scenario.shrinks:
                straights.begin(job_of(scenario))  # while the servers start
        with _rig(settings, folder, report, s3=s3, here=here) as rig:
            about = {"job": job_of(scenarios[0]).config.short_name, **rig.about}
            drill = Drill(started=now(), about=about | {"seed": str(scenarios[0].seed)})
            for scenario in scenarios:
                made = job_of(scenario)
                group = made.config.parallel
                if reason := scenario.why_not(rig, group):
                    drill.skipped[scenario.name] = reason
                    report(f"{scenario.name}: not possible here: {reason}")
                    continue
                straights.wait()  # it would make the measured training slow
                recording = Session(
                    rig=rig,
                    job=made,
                    scenario=scenario.name,
                    run=f"{scenario.run_name}-{secrets.token_hex(2)}",
                    plan=scenario.plan(rig, made.step_seconds, group),
                    report=report,
                    seed=scenario.seed,
                    kill_pending=scenario.name == PENDING,
                ).record(partial(straights.digest, made))
                drill.recordings.append(recording)
                each(recording)
        return drill


def write_report(drill: Drill, folder: Path) -> dict[str, Path]:
    """Write `drill.md`, `drill.html`, and a recording for each scenario. Returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"drill.md": markdown(drill), "drill.html": page(drill)}
    for recording in drill.recordings:
        files[f"{recording.scenario}.json"] = recording.model_dump_json(indent=1)
    for name, text in files.items():
        (folder / name).write_text(text)
    return {name: folder / name for name in files}


class _Straights:
    """The straight runs of the jobs of a drill: trainings that are the same are run once."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._root, self._folder = root, folder
        self._runs: dict[tuple[int, int, tuple[Segment, ...]], Straight] = {}

    def begin(self, job: DrillJob, segments: tuple[Segment, ...] = ()) -> Straight:
        key = epochs, world, _ = job.config.epochs, job.config.parallel.world, segments
        if key not in self._runs:
            folder = self._folder / f"straight-{len(self._runs)}-{epochs}-{world}"
            self._runs[key] = Straight(self._root, job, folder, segments)
        return self._runs[key]

    def wait(self) -> None:
        for run in self._runs.values():
            run.digest()

    def digest(self, job: DrillJob, segments: tuple[Segment, ...]) -> str:
        """With these numbers of ranks; where they are the job's own all the time, of the plain run."""
        as_planned = all(segment.ranks == job.config.parallel.world for segment in segments)
        return self.begin(job, () if as_planned else segments).digest()


def _jobs(
    root: Path, file: Path | None, overrides: list[str], scenarios: Sequence[Scenario]
) -> Callable[[Scenario], DrillJob]:
    """The job of each scenario: as long as the longest one with the same group needs; a user's is as it is."""
    if file is not None:
        own = users_job(root, file, overrides, shrinks=any(scenario.shrinks for scenario in scenarios))
        return lambda _: own
    steps: dict[ParallelConfig, int] = {}
    for scenario in scenarios:
        if scenario.name != RANDOM:
            steps[scenario.group] = max(scenario.steps, steps.get(scenario.group, 0))

    @cache
    def made(count: int, group: ParallelConfig) -> DrillJob:
        return built_in_job(root, count, group)

    return lambda wanted: made(wanted.steps if wanted.name == RANDOM else steps[wanted.group], wanted.group)


@contextlib.contextmanager
def _rig(settings: Settings, folder: Path, report: Report, *, s3: bool, here: bool) -> Iterator[Rig]:
    if here:
        yield users_rig(settings, folder)
        return
    with own_rig(settings.home, folder, report, s3=s3) as rig:
        yield rig
