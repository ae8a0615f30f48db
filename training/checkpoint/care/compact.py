"""Compaction: a second, shorter form of a checkpoint, so that a restore reads one base instead of a long chain.

The rebased manifest stands for the same state, bit for bit, and changes nothing in the history: it needs no token,
and a compactor that dies, loses a race or writes rubbish costs a training nothing.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from training.checkpoint.chain import Chain, ChunkPlan, check_packs, plan_chunks, read_chain, rebased_checkpoints
from training.checkpoint.coding.codec import encode_frame
from training.checkpoint.frames import map_frames, read_frames
from training.checkpoint.history import candidates
from training.checkpoint.manifest import (
    CAST,
    CODEC,
    Chunk,
    Committed,
    Costs,
    Decision,
    Frame,
    Manifest,
    PackName,
    Writer,
    encode_manifest,
    rebased_key,
)
from training.checkpoint.pack import PackWriter
from training.checkpoint.policy import ChainPolicy, Cost
from training.checkpoint.store import NotFound, Store, put_document
from training.errors import Corrupt, Unavailable

MAX_LINKS = 32
_UPLOADERS = 2


def new_nonce() -> str:
    """A part of a key that nobody else will use."""
    return secrets.token_hex(8)


@dataclass(frozen=True)
class Compaction:
    """What became of one checkpoint.

    Attributes:
        checkpoint: the original.
        written: whether this call wrote the rebased form. False: it needs none, or another compactor was first.
        reason: why, for people.
        links: checkpoints that a restore read before.
        read_bytes_before, read_bytes_after: of packs, for a restore.
        seconds: that it took.
    """

    checkpoint: Committed
    written: bool
    reason: str
    links: int
    read_bytes_before: int
    read_bytes_after: int
    seconds: float


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that is worth compacting."""

    checkpoint: Committed
    links: int
    restore_seconds: float  # predicted
    reason: str


def compactable(
    store: Store,
    run: str | None = None,
    *,
    max_links: int = MAX_LINKS,
    restore_seconds: float | None = None,
    policy: ChainPolicy | None = None,
) -> Candidate | None:
    """The newest intact checkpoint, if its chain is too long.

    Args:
        store: the run's store.
        run: name of the run, if it is known.
        max_links: so many checkpoints may be read for a restore.
        restore_seconds: how long a restore may take, as `policy` predicts it; None: as long as it wants.
        policy: knows the rates of decoding and reading.
    """
    for token, sequence in candidates(store):
        try:
            chain = read_chain(store, token, sequence, run)
            check_packs(store, chain)
        except Corrupt:
            continue
        rates = policy or ChainPolicy()
        seconds = rates.predicted_seconds(Cost.of(manifest) for manifest in chain.contents)
        links = len(chain.contents)
        if links > max_links:
            reason = f"a restore reads {links} checkpoints; {max_links} are allowed"
        elif restore_seconds is not None and links > 1 and seconds > restore_seconds:
            reason = f"a restore takes {seconds:.2f} s; {restore_seconds:g} s are allowed"
        else:
            return None
        return Candidate(chain.head, links, seconds, reason)
    return None


def compact(
    store: Store,
    token: int,
    sequence: int,
    run: str | None = None,
    *,
    threads: int = 1,
    nonce: Callable[[], str] = new_nonce,
    created: str = "",
) -> Compaction:
    """Write the rebased form of a checkpoint, unless it has one.

    Every frame is verified when it is read, and the new packs are read back whole before the manifest is put.
    Memory is bounded by a few frames and packs, not by the state.

    Args:
        store: the run's store.
        token, sequence: the checkpoint.
        run: name of the run, if it is known.
        threads: that decode and encode.
        nonce: makes the part of the packs' keys that no other compactor will use: lower-case hex digits.
        created: wall clock, informational.

    Raises:
        Corrupt: something in its chain is missing or damaged. Nothing is left behind.
        Unavailable: the store did not answer. What may be left are packs that a collection removes.
    """
    started = time.perf_counter()
    chain = read_chain(store, token, sequence, run)
    before = chain.size_bytes
    result = partial(Compaction, chain.head, links=len(chain.contents), read_bytes_before=before)

    def done(written: bool, reason: str, after: int) -> Compaction:
        seconds = time.perf_counter() - started
        return result(written=written, reason=reason, read_bytes_after=after, seconds=seconds)

    if chain.contents[0].kind == "base":
        return done(False, "it is a base", before)
    if (token, sequence) in rebased_checkpoints(store, token):  # damaged, or it would be in the chain
        raise Corrupt(
            f"{rebased_key(token, sequence)} is damaged",
            hint="compact a newer checkpoint; this one is still restored from its chain",
            key=rebased_key(token, sequence),
        )
    check_packs(store, chain)
    with ThreadPoolExecutor(_UPLOADERS, "retoma-upload") as uploaders:
        writer = PackWriter(store, PackName(token, sequence, nonce=nonce()), uploaders)
        try:
            manifest = _write(store, chain, writer, threads, created)
            _read_back(store, chain, manifest, threads)
        except BaseException:
            writer.discard()
            raise
        after = sum(pack.size_bytes for pack in manifest.packs)
        if _put(store, manifest):
            return done(True, f"{len(chain.contents)} checkpoints became one", after)
        writer.discard()
        return done(False, "another compactor was first", after)


def _write(store: Store, chain: Chain, writer: PackWriter, threads: int, created: str) -> Manifest:
    """Full frames of the whole state into packs, and the manifest that names them. Nothing is committed yet."""
    started = time.perf_counter()
    plans = plan_chunks(chain)
    chunks = tuple(_chunks(store, plans, writer, threads))
    writer.finish()
    original, size_bytes = chain.head.manifest, sum(plan.size_bytes for plan in plans.values())
    return original.model_copy(
        update={
            "kind": "base",
            "rebases": chain.head.ref,
            "nonce": writer.name.nonce,
            "layout": chain.layout,
            "chunks": chunks,
            "packs": tuple(writer.packs),
            "deltas_since_base": 0,
            "metrics": (),
            "costs": Costs(
                state_bytes=size_bytes,
                written_bytes=sum(pack.size_bytes for pack in writer.packs),
                upload_seconds=writer.upload_seconds,
                save_seconds=time.perf_counter() - started,
            ),
            "decision": Decision(kind=f"compaction of {len(chain.contents)} checkpoints"),
            "writer": Writer(created=created),
        }
    )


def _chunks(store: Store, plans: dict[str, ChunkPlan], writer: PackWriter, threads: int) -> Iterator[Chunk]:
    frames: dict[str, list[Frame]] = {key: [] for key in plans}
    for key, number, encoded in map_frames(store, plans, encode_frame, threads):
        frames[key].append(writer.append(number, encoded, plans[key].sources[number][0].frame.digest))
    for key, plan in plans.items():
        copy = plan.cast_from is not None
        if copy:
            frames[key] = [Frame(n, 0, 0, 0, "", digest) for n, digest in enumerate(plan.frame_digests())]
        yield Chunk(
            key=key,
            mode="full",
            codec=CAST if copy else CODEC,
            item_bytes=plan.item_bytes,
            size_bytes=plan.size_bytes,
            digest=plan.newest.digest,
            frames=tuple(frames[key]),
            source=plan.cast_from,
            bound=plan.bound,
        )


def _read_back(store: Store, chain: Chain, manifest: Manifest, threads: int) -> None:
    """The new form alone is the whole state. Raises `Corrupt` if it is not."""
    short = Chain(chain.head, [manifest], [chain.head])
    check_packs(store, short)
    read_frames(store, plan_chunks(short), threads)


def _put(store: Store, manifest: Manifest) -> bool:
    """Whether the store holds exactly this form now. After an unknown outcome it is read back, never assumed."""
    data, _ = encode_manifest(manifest)
    try:
        return put_document(store, manifest.key, data)
    except Unavailable as unknown:
        try:
            return store.get(manifest.key) == data
        except NotFound:
            raise unknown from None  # it may still arrive: the packs must stay
