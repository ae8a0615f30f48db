"""From the store back to a state. Every byte is verified before anything is handed out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from training.checkpoint.chain import Chain, ChunkPlan, check_packs, plan_chunks, read_chain
from training.checkpoint.coding.chunks import ChunkData
from training.checkpoint.coding.encode import Reference
from training.checkpoint.frames import read_chunks
from training.checkpoint.history import candidates, read_committed
from training.checkpoint.manifest import Committed, Layout, Manifest, Position, manifest_key
from training.checkpoint.policy import Cost
from training.checkpoint.quarantine import Incident
from training.checkpoint.state.boxes import EVERYTHING, Wanted, is_own
from training.checkpoint.state.share import ALONE, Share
from training.checkpoint.state.snapshot import chosen_frames, rebuild
from training.checkpoint.store import Store
from training.checkpoint.token import Skipped, check_not_fenced
from training.errors import Corrupt, Diverged


class RestoredState(dict[str, Any]):
    """The state as it was given to `save`, with what is known about it.

    A plain dict otherwise: `model.load_state_dict(checkpointer.restore())` works.

    Attributes:
        checkpoint: the manifest and its reference.
        skipped: newer checkpoints that were not intact, and why.
    """

    def __init__(self, state: dict[str, Any], checkpoint: Committed, skipped: Iterable[Skipped]) -> None:
        super().__init__(state)
        self.checkpoint = checkpoint
        self.skipped = tuple(skipped)

    @property
    def manifest(self) -> Manifest:
        """The manifest of the restored checkpoint."""
        return self.checkpoint.manifest

    @property
    def position(self) -> Position:
        """What comes next."""
        return self.manifest.position

    @property
    def epoch(self) -> int:
        """The epoch of the position; with `save_checkpoint(state, epoch)`, the number given there."""
        return self.position.epoch


class View(NamedTuple):
    """What is restored: the whole state, or what one rank of a group needs of it and saves of it later."""

    wanted: Wanted = EVERYTHING
    share: Share = ALONE


WHOLE = View()
T = TypeVar("T")
Load = Callable[[int, int, list[Skipped]], "Found"]  # a checkpoint; what is passed by is added to the list


@dataclass
class Found:
    """What an attempt starts from.

    Attributes:
        state: for the caller.
        reference: its bytes, for the next delta.
        chain: what it was read from.
        bytes_per_second: of state, all checkpoints of the chain counted.
    """

    state: RestoredState
    reference: Reference
    chain: Chain
    bytes_per_second: float


def find_newest(
    store: Store,
    run: str,
    before: int | None = None,
    threads: int | None = None,
    notes: Iterable[Skipped] = (),
    incident: Incident | None = None,
    read: Load | None = None,
) -> tuple[Found | None, list[Skipped]]:
    """The newest intact checkpoint that the history admits, and what was skipped. See `first_intact`.

    Args:
        store, run, before, notes, incident: as there.
        threads: that read and decode; default: as many as there are cores, 4 at most.
        read: reads one checkpoint; default: all of it, in this process.
    """
    if read is None:
        read = partial(load_checkpoint, store, run, threads=threads)
    return first_intact(store, run, read, before, notes, incident)


def first_intact(
    store: Store,
    run: str,
    read: Callable[[int, int, list[Skipped]], T],
    before: int | None = None,
    notes: Iterable[Skipped] = (),
    incident: Incident | None = None,
) -> tuple[T | None, list[Skipped]]:
    """What `read` makes of the newest checkpoint for which it raises no `Corrupt`, and what was skipped.

    Args:
        store: the run's store.
        run: name of the run.
        read: given token and sequence of a checkpoint, and a list for what is passed by on the way.
        before: look only at tokens below this one (the attempt that asks).
        notes: what is wrong with the store already; reported with what is skipped.
        incident: roll back: pass by what is not from before it.

    Raises:
        Diverged: there are checkpoints, and none from before the incident.
        Corrupt: the run has checkpoints and none of them is intact. Never silently starts from zero.
        Fenced: the same, but a newer attempt than the one that asks has taken over.
    """
    skipped = list(notes)
    found = False
    for token, sequence in candidates(store, before, skipped):
        found = True
        try:
            if incident is not None and (reason := _void(store, token, sequence, incident)):
                skipped.append(Skipped(key=manifest_key(token, sequence), reason=reason))
                continue
            return read(token, sequence, skipped), skipped
        except Corrupt as error:
            skipped.append(Skipped(key=error.key or manifest_key(token, sequence), reason=error.message))
    if found:
        if before is not None:
            check_not_fenced(store, before, run)  # what this attempt looks for may have been collected since
        if incident is not None:
            raise Diverged(
                f"no intact checkpoint is from before step {incident.since_step}, where the trouble began: "
                f"{incident.reason}",
                hint="start a new run, with a lower learning rate",
                run=run,
            )
        raise Corrupt(
            f"none of the run's checkpoints is intact: {'; '.join(item.reason for item in skipped[:5])}",
            hint="restore the objects from a backup of the store, or start a new run",
            run=run,
        )
    return None, skipped


def _void(store: Store, token: int, sequence: int, incident: Incident) -> str | None:
    """Why a rollback passes by a checkpoint."""
    step = read_committed(store, token, sequence).manifest.position.step
    if step < incident.since_step:
        return None
    return f"rolled back over: not healthy since step {incident.since_step}, {incident.reason}"


def restore_newest(store: Store, run: str, threads: int | None = None, view: View = WHOLE) -> RestoredState | None:
    """The newest intact state, read-only: claims nothing and seals nothing. None if the run has no checkpoint.

    Raises:
        Corrupt: the run has checkpoints and none of them is intact.
    """
    read = partial(load_checkpoint, store, run, threads=threads, for_reference=False, view=view)
    found, _ = first_intact(store, run, read)
    return found.state if found is not None else None


def restore_checkpoint(
    store: Store, token: int, sequence: int, run: str | None = None, threads: int | None = None, view: View = WHOLE
) -> RestoredState:
    """One given checkpoint, read-only: claims nothing and seals nothing.

    Raises:
        Corrupt: something in its chain is missing or damaged.
    """
    return load_checkpoint(store, run, token, sequence, [], threads=threads, for_reference=False, view=view).state


def load_checkpoint(
    store: Store,
    run: str | None,
    token: int,
    sequence: int,
    skipped: list[Skipped],
    *,
    threads: int | None = None,
    for_reference: bool = True,
    view: View = WHOLE,
) -> Found:
    """One checkpoint by the shortest chain that is intact: a damaged rebased form is passed by, and noted.

    Raises:
        Corrupt: something in its chain is missing or damaged.
    """
    avoid: list[tuple[int, int]] = []
    while True:
        chain = read_chain(store, token, sequence, run, avoid=avoid, notes=skipped)
        try:
            return _load(store, chain, skipped, threads, for_reference, view)
        except Corrupt as error:
            if not chain.is_rebased:
                raise
            skipped.append(Skipped(key=error.key or chain.contents[-1].key, reason=error.message))
            avoid.append((chain.links[-1].ref.token, chain.links[-1].ref.sequence))


def _load(
    store: Store, chain: Chain, skipped: list[Skipped], threads: int | None, for_reference: bool, view: View
) -> Found:
    started = time.perf_counter()
    layout, plans = chain.layout, plan_chunks(chain)
    check_packs(store, chain)
    dtypes = {entry.chunk: entry.dtype for entry in layout.tensors if entry.chunk == entry.key}
    with ThreadPoolExecutor(threads or min(4, os.cpu_count() or 1), "retoma-restore") as executor:
        chosen = chosen_frames(layout, view.wanted) if view.wanted is not EVERYTHING else None
        chunks = read_chunks(store, plans, executor, chosen)
        for key, chunk in chunks.items():
            chunk.dtype = dtypes.get(key, "")
        # a reference must not change with what the caller does to the state
        values = chain.head.manifest.values
        state = rebuild(layout, values, chunks, executor if for_reference else None, view.wanted)
    if chosen is not None:
        chunks = _own_chunks(layout, plans, chunks, chosen, view.share)
    digests = {key: plans[key].frame_digests() for key in chunks}
    sources = {key: source for key in chunks if (source := plans[key].cast_from) is not None}
    seconds = time.perf_counter() - started
    work_bytes = sum(Cost.of(manifest).work_bytes for manifest in chain.contents)
    return Found(
        state=RestoredState(state, chain.head, skipped),
        reference=Reference(chunks, digests, sources),
        chain=chain,
        bytes_per_second=max(work_bytes, 1) / seconds,
    )


def _own_chunks(
    layout: Layout,
    plans: Mapping[str, ChunkPlan],
    chunks: Mapping[str, ChunkData],
    chosen: Mapping[str, Collection[int]],
    share: Share,
) -> dict[str, ChunkData]:
    """Those that this rank has read whole and will save: the others back no delta of it."""
    common = share.common_chunks(layout.tensors, {key: plan.size_bytes for key, plan in plans.items()})
    own = {entry.chunk for entry in layout.tensors if is_own(entry.key)}
    whole = {key for key, numbers in chosen.items() if len(numbers) == len(plans[key].sources)}
    return {key: chunks[key] for key in whole & (common | own)}
