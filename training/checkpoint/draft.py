"""One save on its way to the store: what was asked for, and the manifest that it becomes."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from typing import Any

from training.checkpoint.manifest import Committed, Costs, Decision, Health, Manifest, MetricPoint, Position, Writer
from training.checkpoint.pack import Written
from training.checkpoint.state.buffers import SnapshotBuffers
from training.checkpoint.state.copying import Copyings
from training.checkpoint.state.snapshot import Snapshot


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
        written: Written,
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
        snapshot, before = self.snapshot, parent.manifest if parent is not None else None
        same_layout = not base and before is not None and before.layout_digest == snapshot.layout_digest
        return Manifest(
            run=run,
            token=token,
            sequence=sequence,
            kind="base" if base else "delta",
            parent=parent.ref if parent is not None else None,
            position=self.position,
            job=dict(job),
            data=dict(data),
            meta=self.meta,
            layout=None if same_layout else snapshot.layout,
            layout_digest=snapshot.layout_digest,
            values=snapshot.values,
            chunks=tuple(written.chunks),
            chunk_count=len(snapshot.chunks),
            state_digest=written.state_digest,
            packs=tuple(written.packs),
            deltas_since_base=0 if base or before is None else before.deltas_since_base + 1,
            metrics=self.metrics,
            health=self.health,
            costs=Costs(
                state_bytes=snapshot.size_bytes,
                written_bytes=written.size_bytes,
                stall_seconds=self.stall_seconds + self.copying.waited_seconds,
                encode_seconds=written.encode_seconds,
                upload_seconds=written.upload_seconds,
                save_seconds=time.perf_counter() - self.started,
                attempt_seconds=attempt_seconds,
            ),
            decision=Decision(modes=written.modes, interval=self.interval),
            writer=Writer(host=socket.gethostname(), pid=os.getpid(), version=_version(), created=created),
        )


@cache
def _version() -> str:
    """Read once: looking it up costs milliseconds, a save of what did not change costs less."""
    try:
        return metadata.version("retoma")
    except metadata.PackageNotFoundError:
        return ""  # a copy of the source that was never installed
