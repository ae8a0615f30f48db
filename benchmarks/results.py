"""Everything that one run has found out, and what its words mean."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.engines import ENGINES
from benchmarks.measure import Metrics

METRICS = ("bytes_ratio", "stall_ms", "encode_mb_s", "decode_mb_s", "restore_ms", "peak_mb", "slowdown")
Key = tuple[str, int, str]  # sequence, gap in steps, engine

DEFINITIONS = {
    "bytes_ratio": "bytes a delta save writes, in parts of the raw state; mean over the deltas",
    "stall_ms": "the running training stands still, in `save` and before an optimizer's step; a save after each "
    "step, each alone, two before them; median. It does not depend on the gap and stands with each",
    "stall_without_overlap_ms": "the same of an engine that was not told whose steps change the state",
    "encode_mb_s": "raw state a second of encoding on one thread. retoma counts it itself "
    "(`manifest.costs.encode_seconds`); for the others it is the CPU time of the whole save",
    "decode_mb_s": "bytes decoded a second of the CPU time of a restore, reading and checking included",
    "decode_alone_mb_s": "the same without reading: encoded frames in memory, one thread, digests compared",
    "restore_ms": "the state after a base and 8 deltas (4 at gap 100), warm cache, two threads; median of 3",
    "peak_mb": "resident memory above the live state at its highest, ten saves",
    "slowdown": "time of the dense training with a save after every fifth step, over the time without",
    "base_ratio": "bytes of the first save, in parts of the raw state",
    "save_ms": "from `save` until the state is stored; median",
    "save_cpu_mb_s": "raw state a second of the CPU time of the whole save, all threads of the process",
    "state_mb": "raw state, each tensor once",
    "restore_over_torch_load": "restore_ms over a warm `torch.load` of the same state, by turns in one process",
    "torch_load_ms": "that `torch.load`",
    "compact_ms": "compaction of that chain to one base, on one thread",
    "restore_compacted_ms": "the same state after it",
    "restore_compacted_over_torch_load": "over a warm `torch.load` of the same state",
    "step_ms": "a step of the training without saves",
    "longest_stall_ms": "the longest `save`, or wait before a step, while it trained; waiting for the save before "
    "included; "
    "`gc.freeze()` was called before, as retoma's training process does",
    "floor_ratio": "order-0 entropy of one delta, in parts of the raw state",
    "memcpy_mb_s": "one thread copies between buffers of 256 MB",
}


@dataclass
class Results:
    """Everything that one run has found out."""

    smoke: bool
    saves: dict[int, int]
    about: dict[str, str]
    absent: dict[str, str] = field(default_factory=dict)
    values: dict[Key, Metrics] = field(default_factory=dict)
    floors: dict[tuple[str, int], float] = field(default_factory=dict)
    first_steps: dict[tuple[str, int], int] = field(default_factory=dict)
    memcpy_mb_s: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, sequence: str, gap_steps: int, engine: str, found: Metrics) -> None:
        """Take in what was measured, and say so."""
        self.values.setdefault((sequence, gap_steps, engine), {}).update(found)
        told = "  ".join(f"{name} {value:.4g}" for name, value in found.items() if name in METRICS)
        print(f"{sequence:10} {gap_steps:4} {engine:15} {told}", flush=True)

    def rows(self, wanted: bool) -> list[dict[str, Any]]:
        """Rows of the agreed metrics, or all others."""
        rows = [
            {"sequence": sequence, "gap_steps": gap, "engine": engine, "metric": metric, "value": value}
            for (sequence, gap, engine), metrics in self.values.items()
            for metric, value in metrics.items()
            if (metric in METRICS) is wanted
        ]
        if not wanted:
            rows += [
                {"sequence": sequence, "gap_steps": gap, "engine": "limit", "metric": "floor_ratio", "value": value}
                for (sequence, gap), value in self.floors.items()
            ]
        return rows

    def engines(self) -> list[str]:
        """Those that were measured, ours first."""
        found = {engine for _, _, engine in self.values}
        return [name for name in ENGINES if name in found]

    def value(self, sequence: str, gap_steps: int, engine: str, metric: str) -> float | None:
        """One figure, if there is one."""
        return self.values.get((sequence, gap_steps, engine), {}).get(metric)
