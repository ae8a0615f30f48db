"""Does a training that is resumed from bounded checkpoints end like one that was never interrupted?

    python -m benchmarks.bounded_resume [--seeds 0 1 2] [--set KEY=VALUE ...] [--out FOLDER]

char_gpt, each seed three times: straight and exact; and with int8 and int4 deltas, where every epoch is a range of
its own, resumed from what the deltas reconstruct. What counts is the difference to the exact run of the same seed
beside the spread of the exact runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from infra.settings import find_home
from tasks.data import ensure_data
from training.checkpoint.history import read_lineage
from training.checkpoint.store import open_store
from training.config import JobConfig, load_config
from training.session import train_range

JOB = "training/jobs/char_gpt.yaml"
METRIC = "val_loss"
RESULTS = Path(__file__).parent / "results"
BOUNDED = ("int8", "int4")


def final_metric(config: JobConfig, data: Path, *, resumed: bool) -> tuple[float, int]:
    """Metric at the end, and how many resumes began from a bounded delta.

    Args:
        config: the job.
        data: its verified data set.
        resumed: every epoch is an attempt of its own.
    """
    with tempfile.TemporaryDirectory(prefix="bounded-") as folder:
        for stop in range(1, config.epochs + 1) if resumed else [config.epochs]:
            done = train_range(config, folder, "r", data_folder=data, stop=stop)
        lineage = read_lineage(open_store(folder))
        starts = {attempt.seal.head.sequence for attempt in lineage.attempts if attempt.seal and attempt.seal.head}
        bounded = [
            committed
            for committed in lineage.chain
            if committed.ref.sequence in starts and any(chunk.bound for chunk in committed.manifest.chunks)
        ]
        return done.metrics[METRIC], len(bounded)


def measure(seeds: list[int], overrides: list[str]) -> list[dict[str, Any]]:
    """One row for each seed."""
    root = find_home(Path(__file__).parent)
    rows = []
    for seed in seeds:
        base = [f"seed={seed}", "checkpoint.every_steps=10", "checkpoint.deltas_per_base=1000", *overrides]
        exact = load_config(root / JOB, base)
        assert exact.data is not None
        data = root / ensure_data(root, exact.data).path
        row: dict[str, Any] = {"seed": seed, "exact": final_metric(exact, data, resumed=False)[0]}
        for name in BOUNDED:
            config = load_config(root / JOB, [*base, f"checkpoint.bounded={name}"])
            row[name], row[f"{name}_resumes"] = final_metric(config, data, resumed=True)
        rows.append(row)
        print(row, flush=True)
    return rows


def as_markdown(rows: list[dict[str, Any]], overrides: list[str], facts: dict[str, Any], date: str) -> str:
    """The page for people."""
    spread = statistics.stdev(row["exact"] for row in rows)
    lines = [
        f"# Resuming from bounded checkpoints, {date}",
        "",
        f"{facts['cpu']}, {facts['cores']} cores; python {facts['python']}, torch {facts['torch']}.",
        f"Revision {facts['revision']}. Made by `python -m benchmarks.bounded_resume`.",
        "",
        f"`{JOB}`{' with ' + ', '.join(overrides) if overrides else ''}; saved every 10 steps, one base only.",
        f"`{METRIC}` at the end. The bounded runs were cut at each epoch and resumed from a bounded delta.",
        "",
        "| seed | exact, straight | int8, resumed | int4, resumed | resumes |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['seed']} | {row['exact']:.4f} | {row['int8']:.4f} | {row['int4']:.4f} | {row['int8_resumes']} |"
        for row in rows
    ]
    lines += ["", f"Standard deviation of the exact runs: {spread:.4f}."]
    for name in BOUNDED:
        off = statistics.fmean(row[name] - row["exact"] for row in rows)
        lines.append(f"Mean difference of {name} to the exact run of the same seed: {off:+.4f}.")
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure, and write a dated JSON file and page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    date, facts = f"{datetime.now(UTC):%Y-%m-%d}", machine(("torch", "numpy", "blosc2"))
    rows = measure(options.seeds, options.overrides)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"{date}-bounded-resume.json"
    result = {"date": date, "machine": facts, "overrides": options.overrides, "metric": METRIC, "rows": rows}
    file.write_text(json.dumps(result, indent=2) + "\n")
    file.with_suffix(".md").write_text(as_markdown(rows, options.overrides, facts, date))
    print(f"written: {file.with_suffix('.md')}")


if __name__ == "__main__":
    main()
