"""How many bytes does a checkpoint cost? Both example jobs, saved at several intervals of one training each.

    python -m benchmarks.delta_sizes [--steps N] [--out FOLDER]

Trains each job by its YAML file with the loop's own parts, and saves each due state into one checkpointer for each
interval. Every save is waited for, so that its timings are not those of a neighbour. Sizes depend on the training
alone; timings depend on the machine and its load, which are written down beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from infra.settings import find_home
from tasks.data import ensure_data
from training.checkpoint import IncrementalCheckpointer, Manifest, Position
from training.checkpoint.manifest import Committed
from training.checkpoint.store import MemoryStore
from training.config import JobConfig, load_config
from training.trainer import Trainer

JOBS = ("training/jobs/mnist_cnn.yaml", "training/jobs/char_gpt.yaml")
EPOCH = 0  # the interval "at epoch ends only", as `checkpoint.every_steps` spells it
INTERVALS = (1, 10, EPOCH)
RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "numpy", "blosc2")


def measure(
    config: JobConfig, folder: Path | None, intervals: Iterable[int] = INTERVALS, steps: int | None = None
) -> dict[int, list[Manifest]]:
    """Train once and save at each interval. Returns the manifests of each interval, oldest first.

    Args:
        config: the job.
        folder: its verified data set.
        intervals: optimizer steps between saves; 0 stands for epoch ends only. Epoch ends are saved always.
        steps: stop after so many optimizer steps; default: train to the end.
    """
    trainer = Trainer(config, folder)
    found: dict[int, list[Manifest]] = {every: [] for every in intervals}
    savers = {every: _checkpointer(config, every, found[every]) for every in intervals}
    position = Position()
    last = min(steps or trainer.total_steps, trainer.total_steps)
    while position.step < last:
        epoch = position.epoch
        batches = trainer.batches(position)
        while position.epoch == epoch and position.step < last:
            trainer.optimizer_step(batches, trainer.schedule.window_at(position))
            position = trainer.schedule.after(position)
            for every, saver in savers.items():
                if position.epoch > epoch or (every and position.step % every == 0):
                    saver.save(trainer.state.capture(), position=position)
                    saver.wait()
    for saver in savers.values():
        saver.close()
    return found


def _checkpointer(config: JobConfig, every: int, manifests: list[Manifest]) -> IncrementalCheckpointer:
    store = MemoryStore(f"memory://every-{every}")

    def keep_the_numbers(committed: Committed) -> None:
        manifests.append(committed.manifest)
        for key in committed.manifest.pack_keys():  # gigabytes, and nobody restores them
            store.delete(key)

    return IncrementalCheckpointer(
        store,
        deltas_per_base=config.checkpoint.deltas_per_base,
        encode_threads=config.checkpoint.encode_threads,
        on_saved=keep_the_numbers,
    )


def summarise(manifests: list[Manifest]) -> dict[str, Any]:
    """Sizes in percent of the raw state; seconds and bytes a second of the saves."""
    deltas = [m for m in manifests if m.kind == "delta"]
    bases = [m for m in manifests if m.kind == "base"]
    shares = [_percent(m) for m in deltas]
    return {
        "saves": len(manifests),
        "state_bytes": manifests[-1].costs.state_bytes,
        "base_percent": _mean(_percent(m) for m in bases),
        "delta_percent": _mean(shares),
        "smallest_percent": min(shares, default=None),
        "largest_percent": max(shares, default=None),
        "delta_percent_by_part": _by_part(deltas),
        "all_percent": _mean(_percent(m) for m in manifests),
        "stall_milliseconds": 1000 * statistics.median(m.costs.stall_seconds for m in manifests),
        "encode_megabytes_per_second": statistics.median(
            m.costs.state_bytes / m.costs.encode_seconds / 1e6 for m in manifests
        ),
    }


def _percent(manifest: Manifest) -> float:
    return 100 * manifest.costs.written_bytes / manifest.costs.state_bytes


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.fmean(found) if found else None


def _by_part(deltas: list[Manifest]) -> dict[str, float]:
    """Where the bytes go: large tensors by what they are, small ones and generators together."""
    written: dict[str, int] = defaultdict(int)
    raw: dict[str, int] = {}
    for manifest in deltas:
        for chunk in manifest.chunks:
            part = _part(chunk.key)
            written[part] += sum(frame.length for frame in chunk.frames)
    sizes = {chunk.key: chunk.size_bytes for manifest in deltas for chunk in manifest.chunks}
    for key, size in sizes.items():
        raw[_part(key)] = raw.get(_part(key), 0) + size
    return {part: 100 * written[part] / (raw[part] * len(deltas)) for part in sorted(raw)}


def _part(chunk: str) -> str:
    if chunk.startswith("model/"):
        return "weights"
    if chunk.endswith("/exp_avg"):
        return "first moment"
    return "second moment" if chunk.endswith("/exp_avg_sq") else "small tensors"


def as_markdown(result: dict[str, Any]) -> str:
    """The page for people."""
    facts = result["machine"]
    versions = ", ".join(f"{name} {facts[name]}" for name in ("python", *PACKAGES))
    lines = [
        f"# Sizes of checkpoints, {result['date']}",
        "",
        f"{facts['cpu']}, {facts['cores']} cores, load {facts['load_average_1_minute']}; {versions}.",
        f"Revision {facts['revision']}. Made by `make bench`.",
        "",
        "Percent of the raw state: weights, both moments of AdamW, scheduler, random generators.",
        "A base follows after 8 deltas. Sizes do not depend on the machine's load; timings do.",
        "",
        "| job | state | saved every | saves | base | delta | smallest to largest | all | stall | encode |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for job, rows in result["jobs"].items():
        lines += [_row(job, label, row) for label, row in rows.items()]
    lines += ["", "Deltas by part, percent of that part:", "", "| job | saved every | part | delta |"]
    lines.append("|---|---|---|---|")
    for job, rows in result["jobs"].items():
        for label, row in rows.items():
            for part, percent in row["delta_percent_by_part"].items():
                lines.append(f"| {job} | {label} | {part} | {percent:.1f} % |")
    return "\n".join([*lines, ""])


def _row(job: str, label: str, row: dict[str, Any]) -> str:
    percent = {
        key: "-" if row[f"{key}_percent"] is None else f"{row[f'{key}_percent']:.1f} %"
        for key in ("base", "delta", "all", "smallest", "largest")
    }
    cells = [
        job,
        f"{row['state_bytes'] / 1e6:.1f} MB",
        label,
        row["saves"],
        percent["base"],
        f"**{percent['delta']}**",
        f"{percent['smallest']} to {percent['largest']}",
        percent["all"],
        f"{row['stall_milliseconds']:.1f} ms",
        f"{row['encode_megabytes_per_second']:.0f} MB/s",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def label_of(every: int) -> str:
    """`step`, `10 steps`, `epoch`."""
    return {EPOCH: "epoch", 1: "step"}.get(every, f"{every} steps")


def main() -> None:
    """Measure both jobs and write a dated JSON file and page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="stop each job after so many optimizer steps")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    root = find_home(Path(__file__).parent)
    result: dict[str, Any] = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "machine": machine(PACKAGES), "jobs": {}}
    for job in JOBS:
        config = load_config(root / job)
        folder = root / ensure_data(root, config.data).path if config.data else None
        found = measure(config, folder, steps=options.steps)
        rows = {label_of(every): summarise(manifests) for every, manifests in found.items() if manifests}
        result["jobs"][config.short_name] = rows
        for label, row in rows.items():
            print(_row(config.short_name, label, row), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"{result['date']}-delta-sizes.json"
    file.write_text(json.dumps(result, indent=2) + "\n")
    file.with_suffix(".md").write_text(as_markdown(result))
    print(f"written: {file.with_suffix('.md')}")


if __name__ == "__main__":
    main()
