"""What one engine costs on one recording. Each call wants a process of its own: its peak memory is measured."""

from __future__ import annotations

import shutil
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import xxhash

from benchmarks.engines import ENGINES, Engine
from benchmarks.recording import Recording
from benchmarks.sequences import State, nested

CHAIN = 8  # deltas behind the base, in the state that is restored
ENOUGH_SECONDS = 4.0  # of restoring; what is that slow is known well enough
MB = 1e6
Metrics = dict[str, float]


@dataclass(frozen=True)
class Save:
    """One save. `wall`: until stored; `cpu`: of the whole process."""

    wall_seconds: float
    cpu_seconds: float
    encode_seconds: float
    written_bytes: int
    peak_bytes: int


def measure(name: str, recording: Recording, scratch: Path, saves: int, repeats: int) -> Metrics:
    """Save the first `saves` states, restore one `repeats` times, and compare it with what was saved.

    Returns:
        `*_ratio` in parts of the raw state, `*_mb_s` in raw megabytes a second, `*_ms`, `*_mb`. Bytes are a mean
        over the deltas, times a median over all saves but the first, which fills buffers.
    """
    torch.set_num_threads(1)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    live = recording.start()
    raw_bytes = sum(value.nbytes for value in live.values())
    resident_bytes = psutil.Process().memory_info().rss
    engine = ENGINES[name](scratch)
    restored, expected = min(CHAIN, saves - 1), {}
    done: list[Save] = []
    for number in range(saves):
        if number:
            recording.advance(live, number)
            if not engine.deltas:
                forget(scratch, number - 1, keep=restored)
        done.append(_save(engine, live, number, scratch, resident_bytes))
        if number == restored:
            expected = digests(live)
            torch.save(nested(live), scratch.with_suffix(".pt"))
    later, deltas = done[1:], done[1 : restored + 1]
    found = {
        "bytes_ratio": statistics.fmean(save.written_bytes for save in deltas) / raw_bytes,
        "base_ratio": done[0].written_bytes / raw_bytes,
        "save_ms": 1000 * statistics.median(save.wall_seconds for save in later),
        "save_cpu_mb_s": raw_bytes / MB / statistics.median(save.cpu_seconds for save in later),
        "encode_mb_s": raw_bytes / MB / statistics.median(save.encode_seconds for save in deltas),
        "peak_mb": max(save.peak_bytes for save in done) / MB,
        "state_mb": raw_bytes / MB,
    }
    engine.wait()
    if decode_seconds := engine.decode_seconds(restored):
        decoded_bytes = engine.decoded_states(restored) * raw_bytes
        found["decode_alone_mb_s"] = decoded_bytes / MB / decode_seconds
    plain = scratch.with_suffix(".pt")
    found.update(_restores(engine, restored, expected, plain, raw_bytes, repeats))
    started = time.perf_counter()
    if engine.compact(restored):
        found["compact_ms"] = 1000 * (time.perf_counter() - started)
        again = _restores(engine, restored, expected, plain, raw_bytes, repeats)
        found["restore_compacted_ms"] = again["restore_ms"]
        found["restore_compacted_over_torch_load"] = again["restore_over_torch_load"]
    engine.close()
    shutil.rmtree(scratch)
    plain.unlink()
    return found


def _save(engine: Engine, live: State, number: int, scratch: Path, resident_bytes: int) -> Save:
    before_bytes = size_of(scratch)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    started, cpu_started = time.perf_counter(), time.process_time()
    engine.save(live, number)
    engine.wait()
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu_started
    return Save(
        wall_seconds=wall,
        cpu_seconds=cpu,
        encode_seconds=engine.encode_seconds() or cpu,
        written_bytes=size_of(scratch) - before_bytes,
        peak_bytes=_peak_bytes() - resident_bytes,
    )


def _restores(
    engine: Engine, number: int, expected: dict[str, str], plain: Path, raw_bytes: int, repeats: int
) -> Metrics:
    """Restores and warm `torch.load`s of the same state, by turns."""
    walls: list[float] = []
    cpus: list[float] = []
    loads: list[float] = []
    while len(walls) < repeats and sum(walls) < ENOUGH_SECONDS:
        started = time.perf_counter()
        torch.load(plain, weights_only=True)
        loads.append(time.perf_counter() - started)
        started, cpu_started = time.perf_counter(), time.process_time()
        state = engine.restore(number)
        walls.append(time.perf_counter() - started)
        cpus.append(time.process_time() - cpu_started)
        if engine.exact and digests(state) != expected:
            raise AssertionError(f"{engine.name} restored another state than it was given")
        del state
    decoded_mb = engine.decoded_states(number) * raw_bytes / MB
    return {
        "restore_ms": 1000 * statistics.median(walls),
        "restore_over_torch_load": statistics.median(walls) / statistics.median(loads),
        "torch_load_ms": 1000 * statistics.median(loads),
        "decode_mb_s": decoded_mb / statistics.median(cpus),
    }


def digests(state: State) -> dict[str, str]:
    """Of each tensor's bytes, by path."""
    return {
        path: xxhash.xxh3_128_hexdigest(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        for path, value in state.items()
    }


def size_of(folder: Path) -> int:
    """Bytes of all files below it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def forget(folder: Path, number: int, keep: int = -1) -> None:
    """Full savers keep one old state and the newest: the disk's cache is not what is measured."""
    for path in folder.iterdir():
        if path.stem == str(number) and number != keep:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return 1024 * int(line.split()[1])
    raise AssertionError("no VmHWM in /proc/self/status")
