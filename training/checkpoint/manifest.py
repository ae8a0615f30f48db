"""The manifest: one small JSON object whose appearance in the store commits a checkpoint.

It lists what changed. A chunk that is absent is the same as in the parent; `state_digest` covers the whole set.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from training.checkpoint.document import Document, decode, encode
from training.checkpoint.document import digest as digest_bytes
from training.errors import Corrupt

CODEC = "blosc2-shuffle-zstd"
BALANCED = "balanced"
CAST = "bf16-cast"
BOUNDED = {"int8-blocks": 8, "int4-blocks": 4}  # codec: bits of an item
FRAME_BYTES = 4 * 1024 * 1024


class Part(BaseModel):
    """Base of the manifest's sections: immutable; unknown optional fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")


class Ref(Part):
    """Names one checkpoint, and proves which bytes its manifest had."""

    token: int = Field(ge=1)
    sequence: int = Field(ge=0)
    digest: str

    def __str__(self) -> str:
        return f"{self.token:06d}/{self.sequence:08d}"


class Position(Part):
    """What comes next: zero-based epoch, optimizer step, and sample counted over all epochs."""

    epoch: int = Field(0, ge=0)
    step: int = Field(0, ge=0)
    sample: int = Field(0, ge=0)


class Frame(NamedTuple):
    """One piece of a chunk, at most `FRAME_BYTES` decoded, as it lies in a pack."""

    number: int  # place in the chunk: byte number * FRAME_BYTES
    pack: int
    offset: int
    length: int
    checksum: str  # of the encoded bytes
    digest: str  # of the decoded bytes


class Chunk(Part):
    """The bytes of one rank's part of one tensor (or of a slab of small ones), as far as they changed.

    Only frames that changed are listed. `full`: each can be decoded alone; a base lists all of them. `delta`:
    each is the difference to the parent's frame; the codec says how it is taken.
    """

    key: str
    mode: Literal["full", "delta"]
    codec: str = CODEC
    item_bytes: int
    size_bytes: int
    digest: str  # over the digests of all decoded frames
    frames: tuple[Frame, ...]
    source: str | None = None  # codec `bf16-cast`: the chunk of float32 that this one is rounded from
    bound: float | None = None  # bounded codecs: no element is further from what was given to `save`


class Tensor(Part):
    """Where a tensor of the state lies: a slice of a chunk."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]  # of this rank's part within the whole tensor
    chunk: str
    start: int  # bytes into the chunk


class Layout(Part):
    """The structure of the state: a tree of typed nodes, and the tensors that its leaves point at."""

    tree: Any
    tensors: tuple[Tensor, ...]


class Pack(Part):
    """One object of encoded frames. Its key follows from token, sequence, rank, and its place among that rank's."""

    size_bytes: int
    rank: int = 0  # who wrote it


class Health(Part):
    """Whether the published state is fit to be resumed from."""

    finite: bool = True
    loss: float | None = None


class Costs(Part):
    """What this save cost. Bytes and seconds; for people and for later decisions."""

    state_bytes: int = 0
    written_bytes: int = 0
    stall_seconds: float = 0.0
    encode_seconds: float = 0.0  # of CPU time, all threads together
    upload_seconds: float = 0.0  # of all packs together; they may overlap. In a group, of rank 0's
    save_seconds: float = 0.0  # from the copy to the last pack
    attempt_seconds: float = 0.0  # since the attempt was opened


class Decision(Part):
    """Why the checkpoint is what it is; for people, and for the next decision of the same attempt."""

    kind: str = ""  # why a base, or why a delta
    restore_seconds: float | None = None  # predicted, of this checkpoint with its chain
    modes: dict[str, int] = Field(default_factory=dict)  # how many chunks were coded how
    interval: dict[str, Any] = Field(default_factory=dict)  # how the distance to the next save was chosen
    failed_saves: int = 0  # of this attempt, up to here
    skipped_saves: int = 0  # that found the one before still in flight, with `on_busy="skip"`


class Writer(Part):
    """Who wrote the checkpoint; informational."""

    host: str = ""
    pid: int = 0
    version: str = ""
    created: str = ""  # wall clock, ISO 8601 UTC; never used to decide


class MetricPoint(Part):
    """Metrics at one optimizer step, collected since the parent checkpoint."""

    step: int
    values: dict[str, float]


class Manifest(Document):
    """The commit of one checkpoint."""

    run: str
    token: int = Field(ge=1)
    sequence: int = Field(ge=0)
    kind: Literal["base", "delta"]
    parent: Ref | None = None
    position: Position = Position()
    world_size: int = 1
    job: dict[str, Any] = Field(default_factory=dict)  # name, identity and digest of the configuration
    data: dict[str, Any] = Field(default_factory=dict)  # path, digest and git revision of the data set
    meta: dict[str, Any] = Field(default_factory=dict)  # the caller's own JSON
    layout: Layout | None = None  # None: as in the parent
    layout_digest: str
    values: Annotated[list[Any], Field(default_factory=list)]  # the tree's scalars, as typed JSON
    chunks: tuple[Chunk, ...] = ()
    chunk_count: int
    state_digest: str  # over layout digest, values, and every chunk of the whole state
    packs: tuple[Pack, ...] = ()
    deltas_since_base: int = 0
    metrics: tuple[MetricPoint, ...] = ()
    health: Health = Health()
    costs: Costs = Costs()
    decision: Decision = Decision()
    rebases: Ref | None = None  # in a rebased manifest: the checkpoint of which it is a second, shorter form
    nonce: str | None = None  # in a rebased manifest: a part of its packs' keys, since several may compact at once
    writer: Writer = Writer()

    @property
    def key(self) -> str:
        """The object that commits it."""
        key = manifest_key if self.rebases is None else rebased_key
        return key(self.token, self.sequence)

    def written_by_rank(self) -> dict[int, int]:
        """Bytes of the packs of each rank."""
        written = dict.fromkeys(range(self.world_size), 0)
        for pack in self.packs:
            written[pack.rank] += pack.size_bytes
        return written

    def pack_keys(self) -> list[str]:
        """The objects that it names."""
        counts: Counter[int] = Counter()
        keys = []
        for pack in self.packs:
            name = PackName(self.token, self.sequence, pack.rank, self.nonce)
            keys.append(name.key(counts[pack.rank]))
            counts[pack.rank] += 1
        return keys


class Committed(NamedTuple):
    """A manifest as found in the store, with the digest of its bytes."""

    manifest: Manifest
    ref: Ref


def manifest_key(token: int, sequence: int) -> str:
    """`manifests/000003/00000041.json`."""
    return f"manifests/{token:06d}/{sequence:08d}.json"


def rebased_key(token: int, sequence: int) -> str:
    """`rebased/000003/00000041.json`."""
    return f"rebased/{token:06d}/{sequence:08d}.json"


class PackName(NamedTuple):
    """Where the packs of a checkpoint lie, or those of its rebased form."""

    token: int
    sequence: int
    rank: int = 0
    nonce: str | None = None

    def key(self, index: int) -> str:
        """`packs/000003/00000041-r0000-00.pack`, or `rebased/000003/00000041-1f2e3d4c-00.pack`."""
        if self.nonce is None:
            return f"packs/{self.token:06d}/{self.sequence:08d}-r{self.rank:04d}-{index:02d}.pack"
        return f"rebased/{self.token:06d}/{self.sequence:08d}-{self.nonce}-{index:02d}.pack"


def pack_key(token: int, sequence: int, index: int, rank: int = 0) -> str:
    """`packs/000003/00000041-r0000-00.pack`."""
    return PackName(token, sequence, rank).key(index)


def encode_manifest(manifest: Manifest) -> tuple[bytes, Ref]:
    """Bytes to commit, and the reference that a child will hold."""
    data = encode(manifest)
    return data, ref_of(manifest, data)


def ref_of(manifest: Manifest, data: bytes) -> Ref:
    """The reference to a manifest with such bytes."""
    return Ref(token=manifest.token, sequence=manifest.sequence, digest=digest_bytes(data))


def decode_manifest(data: bytes, token: int, sequence: int, run: str | None = None) -> Committed:
    """Parse and check that the manifest belongs under its key.

    Raises:
        Corrupt: damaged, or written for another run, token or sequence.
    """
    return _decode(data, manifest_key(token, sequence), token, sequence, run)


def decode_rebased(data: bytes, original: Committed) -> Manifest:
    """Parse a rebased manifest and check that it is the same state as the checkpoint that it stands for.

    Raises:
        Corrupt: damaged, or the form of another checkpoint.
    """
    ref, key = original.ref, rebased_key(original.ref.token, original.ref.sequence)
    found = _decode(data, key, ref.token, ref.sequence, original.manifest.run).manifest
    if found.rebases != ref or found.kind != "base" or found.state_digest != original.manifest.state_digest:
        raise Corrupt(f"{key} is not a form of {original.manifest.key}", key=key)
    return found


def _decode(data: bytes, key: str, token: int, sequence: int, run: str | None) -> Committed:
    manifest = decode(data, Manifest, key)
    found = (manifest.key, manifest.token, manifest.sequence, manifest.run)
    if found != (key, token, sequence, run if run is not None else manifest.run):
        raise Corrupt(f"{key} holds the manifest of run {manifest.run!r} {manifest.key}", key=key)
    return Committed(manifest, Ref(token=token, sequence=sequence, digest=digest_bytes(data)))


def layout_digest(layout: Layout) -> str:
    """Digest of the structure of a state."""
    text = json.dumps(layout.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return digest_bytes(text.encode())
