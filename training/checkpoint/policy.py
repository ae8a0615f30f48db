"""Base or delta: decided at each save by what a restore of the chain would cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from training.checkpoint.manifest import CAST, FRAME_BYTES, Chunk, Manifest

MAX_DELTAS = 256  # whatever they cost: each is a manifest to read, one after the other
_BASES_WORTH = 8.0  # without a limit by the user: deltas that cost as much to restore as this many bases
_SPARSE_FACTOR = 8  # a frame of few bytes holds few changes: at most so many decoded bytes for each
_NO_GAIN = 0.98  # a delta of this share of a base's bytes is not worth a longer chain


class Cost(NamedTuple):
    """What one checkpoint adds to a restore of its chain."""

    work_bytes: int  # to produce
    read_bytes: int

    @classmethod
    def of(cls, manifest: Manifest) -> Cost:
        """Told by its manifest."""
        return cls(work_of(manifest.chunks), sum(pack.size_bytes for pack in manifest.packs))


def work_of(chunks: Iterable[Chunk]) -> int:
    """Bytes that must be produced to decode these once."""
    work = 0
    for chunk in chunks:
        if chunk.codec != CAST:
            for frame in chunk.frames:
                size_bytes = min(FRAME_BYTES, chunk.size_bytes - frame.number * FRAME_BYTES)
                work += min(size_bytes, _SPARSE_FACTOR * frame.length)
    return work


@dataclass
class ChainPolicy:
    """Remembers what the chain costs so far.

    Attributes:
        deltas_per_base: at most so many deltas after a base; None: decided by cost alone.
        restore_seconds: how long a restore may take; None: as long as that of 9 bases.
        decode_rate, read_rate: bytes a second; update them as they are measured.
    """

    deltas_per_base: int | None = None
    restore_seconds: float | None = None
    decode_rate: float = 1.5e9  # until it was measured
    read_rate: float = 1.0e9
    _chain: list[Cost] = field(default_factory=list)  # newest last, from its base on

    def start_from(self, chain: Iterable[Manifest]) -> None:
        """Go on with a chain that was restored, newest first."""
        self._chain = [Cost.of(manifest) for manifest in chain][::-1]

    def committed(self, kind: str, cost: Cost) -> None:
        """Count a checkpoint that this attempt committed."""
        if kind == "base":
            self._chain.clear()
        self._chain.append(cost)

    def explain(
        self, manifest: Manifest, cost: Cost, reason: str, failed_saves: int, skipped_saves: int
    ) -> Manifest:
        """The manifest with the reason for its kind and with what a restore will take."""
        chain = [] if manifest.kind == "base" else self._chain
        seconds = self.predicted_seconds([*chain, cost])
        decision = manifest.decision.model_copy(
            update={
                "kind": reason,
                "restore_seconds": round(seconds, 4),
                "failed_saves": failed_saves,
                "skipped_saves": skipped_saves,
            }
        )
        return manifest.model_copy(update={"decision": decision})

    def predicted_seconds(self, chain: Iterable[Cost] | None = None) -> float:
        """Of a restore of the chain as it is, or of another one."""
        costs = self._chain if chain is None else chain
        return sum(cost.work_bytes / self.decode_rate + cost.read_bytes / self.read_rate for cost in costs)

    def decide(self) -> tuple[bool, str]:
        """Whether the next checkpoint should be a base, and why."""
        if not self._chain:
            return True, "the first checkpoint"
        base, deltas = self._chain[0], self._chain[1:]
        limit = MAX_DELTAS if self.deltas_per_base is None else min(self.deltas_per_base, MAX_DELTAS)
        if len(deltas) >= limit:
            return True, f"{len(deltas)} deltas since the base"
        if self.restore_seconds is not None:
            return self._by_time(self.restore_seconds)
        if self.deltas_per_base is not None or not deltas:
            return False, "a delta is cheaper"
        if deltas[-1].read_bytes >= _NO_GAIN * base.read_bytes:
            return True, "the last delta was as large as a base"
        if sum(delta.work_bytes for delta in deltas) >= _BASES_WORTH * base.work_bytes:
            return True, f"deltas cost as much to restore as {_BASES_WORTH:.0f} bases"
        return False, "a delta is cheaper"

    def _by_time(self, allowed: float) -> tuple[bool, str]:
        now, deltas = self.predicted_seconds(), self._chain[1:]
        after = now + self.predicted_seconds(deltas[-1:])
        if deltas and after > allowed:
            return True, f"one delta more would restore in {after:.2f} s; {allowed:g} s are allowed"
        return False, f"restores in {now:.2f} s; {allowed:g} s are allowed"
