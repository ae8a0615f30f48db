"""Stores written document by document: a run's history without training anything."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from training.checkpoint.document import encode
from training.checkpoint.manifest import (
    Committed,
    Costs,
    Manifest,
    MetricPoint,
    Pack,
    Position,
    Writer,
    encode_manifest,
    manifest_key,
)
from training.checkpoint.store import Store
from training.checkpoint.token import Seal, Skipped, claim, mark_run, seal_key

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
STEPS_PER_EPOCH = 10
DATA = {
    "path": "data/mnist",
    "digest": "md5:0123456789abcdef0123456789abcdef.dir",
    "revision": "f" * 40,
    "dirty": False,
    "bytes": 3920128,
    "files": 2,
}
JOB = {"name": "mnist-cnn", "identity": {"job": "training.jobs.mnist_cnn:MnistCnn", "params": {}}}


class RunBuilder:
    """Writes one run's attempts and checkpoints, with a clock of its own."""

    def __init__(self, store: Store, run: str = "run-1", job: dict[str, Any] | None = None) -> None:
        self.store = store
        self.run = run
        self.job = JOB if job is None else job
        self.committed: dict[tuple[int, int], Committed] = {}
        self.head: Committed | None = None
        self._seconds = 0
        mark_run(store, run)

    def claim(self, start: int, stop: int, **who: Any) -> int:
        facts = {"range": [start, stop], "attempt": f"{start}-{stop}:a1", "host": "node-1", "pid": 4711, **who}
        return claim(self.store, self.run, facts, self._now())

    def seal(self, token: int, head: Committed | None, skipped: tuple[Skipped, ...] = ()) -> None:
        document = Seal(
            run=self.run, token=token, head=head.ref if head else None, skipped=skipped, created=self._now()
        )
        assert self.store.put_if_absent(seal_key(token), encode(document))
        self.head = head

    def attempt(self, start: int, stop: int, **who: Any) -> int:
        """A claim and a seal on the head."""
        token = self.claim(start, stop, **who)
        self.seal(token, self.head)
        return token

    def commit(
        self,
        token: int,
        step: int,
        kind: Literal["base", "delta"] = "delta",
        metrics: dict[int, dict[str, float]] | None = None,
        written: tuple[int, ...] = (),
        meta: dict[str, Any] | None = None,
    ) -> Committed:
        """A manifest on the head; `step` says what comes next, `written` the bytes of each rank of a group."""
        parent = self.head
        if metrics is None:
            metrics = {step: {"train/loss": 1.0 / (1 + step)}}
        manifest = Manifest(
            run=self.run,
            token=token,
            sequence=parent.ref.sequence + 1 if parent else 0,
            kind=kind,
            parent=parent.ref if parent else None,
            position=Position(epoch=step // STEPS_PER_EPOCH, step=step, sample=step * 32),
            world_size=len(written) or 1,
            packs=tuple(Pack(size_bytes=size, rank=rank) for rank, size in enumerate(written)),
            meta=meta or {},
            job=self.job,
            data=DATA,
            layout_digest="xxh3_128:0",
            values=[],
            chunk_count=0,
            state_digest=f"xxh3_128:{step:032x}",
            metrics=tuple(MetricPoint(step=at, values=values) for at, values in metrics.items()),
            costs=Costs(state_bytes=1000, written_bytes=1000 if kind == "base" else 340, stall_seconds=0.001),
            writer=Writer(host="node-1", pid=4711, version="0.1.0", created=self._now()),
        )
        data, ref = encode_manifest(manifest)
        assert self.store.put_if_absent(manifest_key(ref.token, ref.sequence), data)
        self.head = Committed(manifest, ref)
        self.committed[ref.token, ref.sequence] = self.head
        return self.head

    def _now(self) -> str:
        self._seconds += 1
        return (START + timedelta(seconds=self._seconds)).isoformat()


GROUP_METRICS = {
    "train/samples_per_second": 150.0,
    "group/step_seconds": 0.2,
    "group/communication_share": 0.05,
    "rank/0/own_seconds": 0.09,
    "rank/0/waiting_share": 0.5,
    "rank/1/own_seconds": 0.19,
    "rank/1/waiting_share": 0.0,
}


def run_of_two_ranks(store: Store, run: str = "run-2", job: dict[str, Any] | None = None) -> RunBuilder:
    """Rank 1 holds up rank 0 from step 4 on."""
    builder = RunBuilder(store, run, job)
    token = builder.attempt(0, 2)
    slow = {"rank": 1, "since_step": 4, "until_step": None, "excess_seconds": 0.1, "step_seconds": 0.2}
    builder.commit(token, 5, "base", {5: GROUP_METRICS}, (600, 400))
    builder.commit(token, 10, "delta", {10: GROUP_METRICS}, (200, 140), {"slow_ranks": [slow]})
    builder.commit(token, 15, "delta", {15: GROUP_METRICS}, (200, 140), {"slow_ranks": [slow | {"until_step": 12}]})
    return builder


def interrupted_run(store: Store, run: str = "run-1") -> RunBuilder:
    """Two ranges of two epochs: the first is killed after three checkpoints and finished by a second attempt."""
    builder = RunBuilder(store, run)
    first = builder.attempt(0, 2)
    builder.commit(first, 5, "base")
    builder.commit(first, 10)
    builder.commit(first, 15)
    second = builder.attempt(0, 2)
    builder.commit(second, 20, metrics={20: {"train/loss": 0.5, "eval/accuracy": 0.75}})
    third = builder.attempt(2, 4)
    builder.commit(third, 30, "base")
    builder.commit(third, 40, metrics={40: {"train/loss": 0.25, "eval/accuracy": 0.875}})
    return builder
