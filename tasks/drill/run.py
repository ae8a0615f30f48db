"""Runs scenarios one after the other on one rig, and writes the report."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from infra.settings import Settings
from tasks.drill.folder import drill_folder, sweep
from tasks.drill.job import DrillJob, Straight, built_in_job, users_job
from tasks.drill.recording import Recording
from tasks.drill.report import Drill, markdown, now, page
from tasks.drill.rig import Report, Rig, own_rig, users_rig
from tasks.drill.scenarios import RANDOM, Scenario
from tasks.drill.session import PENDING, Session

Jobs = Callable[[int], DrillJob]
USERS = (0, 0)


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
        jobs = _jobs(settings.home, job, list(overrides), scenarios)
        straights = _Straights(settings.home, folder)
        for made in jobs.values():
            straights.begin(made)  # while the servers start
        with _rig(settings, folder, report, s3=s3, here=here) as rig:
            about = {"job": next(iter(jobs.values())).config.short_name, **rig.about}
            drill = Drill(started=now(), about=about | {"seed": str(scenarios[0].seed)})
            for scenario in scenarios:
                made = jobs[(scenario.steps, scenario.world) if job is None else USERS]
                world = made.config.parallel.world
                if reason := scenario.why_not(rig, world):
                    drill.skipped[scenario.name] = reason
                    report(f"{scenario.name}: not possible here: {reason}")
                    continue
                straights.wait()  # it would make the measured training slow
                recording = Session(
                    rig=rig,
                    job=made,
                    scenario=scenario.name,
                    run=f"{scenario.run_name}-{secrets.token_hex(2)}",
                    plan=scenario.plan(rig, made.step_seconds, world),
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
        self._runs: dict[tuple[int, int], Straight] = {}

    def begin(self, job: DrillJob) -> None:
        key = epochs, world = job.config.epochs, job.config.parallel.world
        if key not in self._runs:
            self._runs[key] = Straight(self._root, job, self._folder / f"straight-{epochs}-{world}")

    def wait(self) -> None:
        for run in self._runs.values():
            run.digest()

    def digest(self, job: DrillJob) -> str:
        return self._runs[job.config.epochs, job.config.parallel.world].digest()


def _jobs(
    root: Path, file: Path | None, overrides: list[str], scenarios: Sequence[Scenario]
) -> dict[tuple[int, int], DrillJob]:
    """By the steps and ranks that are wanted; a user's job has its own."""
    if file is not None:
        return {USERS: users_job(root, file, overrides)}
    found: dict[tuple[int, int], DrillJob] = {}
    for world in {scenario.world for scenario in scenarios}:
        own = [scenario for scenario in scenarios if scenario.world == world]
        longest = max((s.steps for s in own if s.name != RANDOM), default=0)
        wanted = {s.steps for s in own if s.name == RANDOM} | ({longest} if longest else set())
        made = {steps: built_in_job(root, steps, world) for steps in wanted}
        found |= {(steps, world): job for steps, job in made.items()}
        found |= {(s.steps, world): made[longest] for s in own if s.name != RANDOM}
    return found


@contextlib.contextmanager
def _rig(settings: Settings, folder: Path, report: Report, *, s3: bool, here: bool) -> Iterator[Rig]:
    if here:
        yield users_rig(settings, folder)
        return
    with own_rig(settings.home, folder, report, s3=s3) as rig:
        yield rig
