"""One save on its way to the store: what was asked for, and the manifest that it becomes."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from typing import Any

from training.checkpoint.manifest import (
    Chunk,
    Committed,
    Costs,
    Decision,
    Health,
    Layout,
    Manifest,
    MetricPoint,
    Pack,
    Position,
    Writer,
)
from training.checkpoint.pack import Written
from training.checkpoint.policy import Cost, work_of
from training.checkpoint.state.buffers import SnapshotBuffers
from training.checkpoint.state.copying import Copyings
from training.checkpoint.state.snapshot import Snapshot


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a manifest says about the bytes of a state, after its packs are written.

    `printed` are the chunks as JSON, where they are not in `chunks`.
    """

    layout: Layout
    layout_digest: str
    values: list[Any]
    chunks: Sequence[Chunk]
    chunk_count: int
    packs: Sequence[Pack]
    state_digest: str
    state_bytes: int
    encode_seconds: float
    upload_seconds: float
    modes: Mapping[str, int]
    cost: Cost
    world_size: int = 1
    printed: bytes = b""

    @classmethod
    def of(cls, snapshot: Snapshot, written: Written) -> Content:
        """Of a state that one process holds whole."""
        return cls(
            layout=snapshot.layout,
            layout_digest=snapshot.layout_digest,
            values=snapshot.values,
            chunks=written.chunks,
            chunk_count=len(snapshot.chunks),
            packs=written.packs,
            state_digest=written.state_digest,
            state_bytes=snapshot.size_bytes,
            encode_seconds=written.encode_seconds,
            upload_seconds=written.upload_seconds,
            modes=written.modes,
            cost=Cost(work_of(written.chunks), written.size_bytes),
        )


@dataclass(frozen=True)
class Draft:
    """A snapshot with everything that its manifest will say and that is known before it is encoded."""

    snapshot: Snapshot
    copying: Copyings  # until it is finished, the snapshot is not whole
    buffers: SnapshotBuffers  # hold the snapshot
    position: Position
    stall_seconds: float
    base: bool
    meta: dict[str, Any]
    metrics: tuple[MetricPoint, ...]
    health: Health
    interval: dict[str, Any]
    started: float = field(default_factory=time.perf_counter)

    def manifest(
        self,
        content: Content,
        *,
        run: str,
        token: int,
        sequence: int,
        parent: Committed | None,
        base: bool,
        job: Mapping[str, Any],
        data: Mapping[str, Any],
        created: str,
        attempt_seconds: float,
    ) -> Manifest:
        """The manifest to commit, after the packs are written. The layout is left to the chain if it can be."""
        before = parent.manifest if parent is not None else None
        same_layout = not base and before is not None and before.layout_digest == content.layout_digest
        return Manifest(
            run=run,
            token=token,
            sequence=sequence,
            kind="base" if base else "delta",
            parent=parent.ref if parent is not None else None,
            position=self.position,
            world_size=content.world_size,
            job=dict(job),
            data=dict(data),
            meta=self.meta,
            layout=None if same_layout else content.layout,
            layout_digest=content.layout_digest,
            values=content.values,
            chunks=tuple(content.chunks),
            chunk_count=content.chunk_count,
            state_digest=content.state_digest,
            packs=tuple(content.packs),
            deltas_since_base=0 if base or before is None else before.deltas_since_base + 1,
            metrics=self.metrics,
            health=self.health,
            costs=self.costs(content, content.upload_seconds, attempt_seconds),
            decision=Decision(modes=dict(content.modes), interval=self.interval),
            writer=Writer(host=socket.gethostname(), pid=os.getpid(), version=_version(), created=created),
        )

    def costs(self, content: Content, upload_seconds: float, attempt_seconds: float) -> Costs:
        """What the save has cost until now."""
        return Costs(
            state_bytes=content.state_bytes,
            written_bytes=content.cost.read_bytes,
            stall_seconds=self.stall_seconds + self.copying.waited_seconds,
            encode_seconds=content.encode_seconds,
            upload_seconds=upload_seconds,
            save_seconds=time.perf_counter() - self.started,
            attempt_seconds=attempt_seconds,
        )


@cache
def _version() -> str:
    """Read once: looking it up costs milliseconds, a save of what did not change costs less."""
    try:
        return metadata.version("retoma")
    except metadata.PackageNotFoundError:
        return ""  # a copy of the source that was never installed
