"""Groups of ranks: what their saves cost beside DCP, and how long they stand still after a fault beside torchrun.

    python -m benchmarks.ranks [--parts saves,freeze-rank,kill-rank,lose-node] [--trials 20] [--out FOLDER]

Saves: a GPT of 4 million parameters, AdamW, FSDP2 over four gloo ranks, ten steps between saves. Faults: the same
supervisor, launcher and engine as in a range, a small GPT whose steps wait 0.1 s, checkpoints each five steps; a
fault at a random moment. torchrun: a plain DDP loop that restores nothing, with a timeout of 5 s for collectives
(its default is 30 minutes), TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (without it a restart in place fails now and then)
and every other setting as it comes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.ranks_recovery import PARALLEL, TORCH_TIMEOUT_SECONDS, Trial, measure_ours, measure_torch
from benchmarks.ranks_saves import ENGINES, measure_saves
from benchmarks.sequences import make_corpus
from tasks.drill.measures import percentile

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "numpy", "blosc2")
WORLD, GAP_STEPS, WARM_UP_STEPS = 4, 10, 60
SEQUENCE = "fsdp2-4-ranks"
TORCH_TRIALS = 3  # each takes as long as the default that it shows
GOALS = {
    ("freeze-rank", "named_s"): 2.0,
    ("freeze-rank", "recovery_s"): 8.0,
    ("lose-node", "recovery_s"): 10.0,
}
MEANING = {
    "bytes_ratio": "written by a delta save, all ranks together, in parts of the raw state; mean",
    "base_ratio": "the same of the first save",
    "stall_ms": "the slowest rank stands still in `save`; median",
    "save_ms": "from `save` until everything is stored; median",
    "commit_ms": "retoma: from the last rank's share until the outcome is posted, the manifest's fsync included; "
    "DCP: `finish`, which writes its metadata; median",
    "commit_put_ms": "of it until the manifest is durable in the store: fsync of a file and of its folder; median",
    "restore_ms": "the slowest rank's, after eight deltas; median",
    "named_s": "from the fault until a verdict names the rank, or the node",
    "recovery_s": "from the fault until the group has made its next step",
    "grown_s": "from the start of another node until the larger group has made a step",
}


def main() -> None:
    """Measure, print progress, and write what there is after each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", help="names, joined by commas; default: all")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    parts = options.parts.split(",") if options.parts else ["saves", *PARALLEL]
    scratch = Path(tempfile.mkdtemp(prefix="retoma-ranks-"))
    try:
        corpus = make_corpus(scratch)
        for part in parts:
            _write(options.out, part, _part(part, options.trials, options.seed, corpus, scratch))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _part(part: str, trials: int, seed: int, corpus: Path, scratch: Path) -> list[dict[str, Any]]:
    if part == "saves":
        return [
            {
                "sequence": SEQUENCE,
                "gap_steps": GAP_STEPS,
                "engine": engine,
                "metric": metric,
                "value": round(value, 4),
            }
            for engine in ENGINES
            for metric, value in measure_saves(engine, WORLD, GAP_STEPS, WARM_UP_STEPS, corpus, scratch).items()
        ]
    # A process of its own: the supervisor wants a main thread.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as alone:
        ours = alone.submit(measure_ours, part, trials, corpus, scratch / part, seed).result()
        theirs = alone.submit(measure_torch, part, min(trials, TORCH_TRIALS), scratch / f"{part}-torch").result()
    return [*_rows(part, "retoma", ours), *_rows(part, "torchrun", theirs)]


def _rows(fault: str, engine: str, trials: list[Trial]) -> list[dict[str, Any]]:
    found = {
        "named_s": [t.named_seconds for t in trials if t.named_seconds is not None],
        "recovery_s": [t.recovery_seconds for t in trials if t.recovery_seconds is not None],
        "grown_s": [t.grown_seconds for t in trials if t.grown_seconds is not None],
    }
    return [
        {
            "fault": fault,
            "engine": engine,
            "metric": metric,
            "p50": round(statistics.median(values), 3),
            "p95": round(percentile(values, 0.95), 3),
            "max": round(max(values), 3),
            "trials": len(values),
        }
        for metric, values in found.items()
        if values
    ]


def _write(out: Path, part: str, made: list[dict[str, Any]]) -> None:
    """Replace this part's rows in `ranks.json`, and write the day's page anew."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / "ranks.json"
    kept = json.loads(file.read_text()) if file.exists() else []
    rows = [row for row in kept if row.get("fault", "saves") != part] + made
    rows.sort(key=lambda row: ["saves", *PARALLEL].index(row.get("fault", "saves")))
    file.write_text(json.dumps(rows, indent=1) + "\n")
    (out / f"{datetime.now(UTC):%Y-%m-%d}-ranks.md").write_text(_text(rows))
    for row in made:
        print("  ".join(str(value) for value in row.values()), flush=True)


def _text(rows: list[dict[str, Any]]) -> str:
    assert __doc__ is not None
    lines = ["# Groups of ranks", "", *__doc__.splitlines()[4:], ""]
    saves = [row for row in rows if "sequence" in row]
    if saves:
        engines = list(dict.fromkeys(row["engine"] for row in saves))
        lines += ["| metric | " + " | ".join(engines) + " |", "|---|" + "---|" * len(engines)]
        for metric in dict.fromkeys(row["metric"] for row in saves):
            values = {row["engine"]: row["value"] for row in saves if row["metric"] == metric}
            lines.append(
                f"| {metric} | " + " | ".join(f"{values[e]:.4g}" if e in values else "" for e in engines) + " |"
            )
    lines += [
        "",
        "| fault | engine | metric | p50 | p95 | max | faults | goal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in (row for row in rows if "fault" in row):
        numbers = " | ".join(f"{row[name]:.2f}" for name in ("p50", "p95", "max"))
        head = f"| {row['fault']} | {row['engine']} | {row['metric']} | {numbers}"
        lines.append(f"{head} | {row['trials']} | {_goal(row)} |")
    lines += ["", *(f"- `{name}`: {text}" for name, text in MEANING.items())]
    lines += [f"- torchrun's collectives time out after {TORCH_TIMEOUT_SECONDS:g} s"]
    lines += [f"- {name}: {value}" for name, value in machine(PACKAGES).items()]
    return "\n".join(lines) + "\n"


def _goal(row: dict[str, Any]) -> str:
    goal = GOALS.get((row["fault"], row["metric"])) if row["engine"] == "retoma" else None
    return "" if goal is None else f"p95 <= {goal:g}: {'met' if row['p95'] <= goal else 'MISSED'}"


if __name__ == "__main__":
    main()
