"""The engine beside its peers, on the states of real trainings.

    python -m benchmarks [--smoke] [--out FOLDER] [--chart FILE] [--sequences dense,lora] [--engines retoma,zipnn]

Records the states first, then measures each engine on each recording in a process of its own, one at a time. With
`--smoke`, tiny states and only the engines that need no package of their own: it shows that everything runs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.engines import ENGINES, INSTALLED
from benchmarks.limits import floor_ratio, memcpy_mb_s
from benchmarks.live import slowdowns, stalls
from benchmarks.measure import measure
from benchmarks.recording import Recording, record
from benchmarks.report import write
from benchmarks.results import Results
from benchmarks.sequences import make_corpus, sequences

SAVES = {1: 9, 10: 10, 100: 5}  # by gap; 10 at gap 10 for the peak of ten saves
SMOKE_SAVES = {10: 3}
FULL_SAVES = 2  # of an engine that writes everything each time, at gaps other than 10
MAIN_GAP = 10
STALL_SAVES = 8
RESULTS = Path(__file__).parent / "results"
CHART = Path(__file__).parents[1] / "docs/images/engine.svg"
T = TypeVar("T")


def main() -> None:
    """Run everything and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny states, no peers that need installing")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--chart", type=Path, help="default: docs/images/engine.svg, or OUT/engine.svg")
    parser.add_argument("--sequences", help="names, joined by commas; default: all")
    parser.add_argument("--engines", help="names, joined by commas; default: all")
    options = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    chart = options.chart or (CHART if options.out == RESULTS else options.out / "engine.svg")
    names = options.engines.split(",") if options.engines else list(ENGINES)
    if options.smoke:
        names = [name for name in names if ENGINES[name] not in INSTALLED]
    scratch = Path(tempfile.mkdtemp(prefix="retoma-bench-"))
    try:
        results = run(options.smoke, names, options.sequences.split(",") if options.sequences else None, scratch)
    finally:
        shutil.rmtree(scratch)
    for file in write(results, options.out, chart):
        print(f"written: {file}")


def run(smoke: bool, names: list[str], only: list[str] | None, scratch: Path) -> Results:
    """All measurements."""
    started = time.perf_counter()
    saves = SMOKE_SAVES if smoke else SAVES
    chosen = {item.name: item for item in sequences(smoke) if only is None or item.name in only}
    results = Results(smoke=smoke, saves=saves, about={name: item.about for name, item in chosen.items()})
    results.absent = {name: reason for name in names if (reason := ENGINES[name].absent())}
    alone = _here if smoke else _alone
    corpus = make_corpus(scratch)
    recordings = _record(smoke, list(chosen), corpus, scratch, saves)
    results.seconds["recording"] = time.perf_counter() - started
    results.memcpy_mb_s = memcpy_mb_s(16 if smoke else 256)
    for recording in recordings:
        results.first_steps[recording.sequence, recording.gap_steps] = recording.first_step
        results.floors[recording.sequence, recording.gap_steps] = floor_ratio(recording)
        for name in names:
            if name not in results.absent:
                count = recording.count
                if recording.gap_steps != MAIN_GAP and not ENGINES[name].deltas:
                    count = FULL_SAVES
                found = alone(measure, name, recording, scratch / "store", count, 1 if smoke else 3)
                results.add(recording.sequence, recording.gap_steps, name, found)
        shutil.rmtree(recording.folder)
    for sequence in chosen:
        for name in (name for name in names if name not in results.absent):
            arguments = name, sequence, smoke, corpus, scratch / "store", 2 if smoke else STALL_SAVES
            found = alone(stalls, *arguments)
            for gap in saves:
                results.add(sequence, gap, name, found)
    if "dense" in chosen:
        present = [name for name in names if name not in results.absent]
        every = alone(slowdowns, present, smoke, corpus, scratch / "store", 3 if smoke else 15)
        for name, metrics in every.items():
            results.add("dense", 1, name, metrics)
    results.seconds["all"] = time.perf_counter() - started
    return results


def _record(smoke: bool, names: list[str], corpus: Path, scratch: Path, saves: dict[int, int]) -> list[Recording]:
    """Two trainings at a time, the longest first: they are not what is timed."""
    order = sorted(names, key=["finetune", "dense", "lora", "embedding"].index)
    with ProcessPoolExecutor(2, _processes(), max_tasks_per_child=1) as pool:
        done = {name: pool.submit(record, name, smoke, corpus, scratch / "states", saves) for name in order}
        return [recording for name in names for recording in done[name].result()]


def _alone(call: Callable[..., T], *arguments: Any) -> T:
    with ProcessPoolExecutor(1, _processes()) as pool:
        return pool.submit(call, *arguments).result()


def _here(call: Callable[..., T], *arguments: Any) -> T:
    """For figures that nobody reads: the start of a process takes two seconds."""
    return call(*arguments)


def _processes() -> Any:
    """New processes that have torch imported and nothing else done."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.measure"])
    return context


if __name__ == "__main__":
    main()
