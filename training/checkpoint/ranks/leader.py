"""What rank 0 remembers of the whole state, and how the contributions of all ranks become one content."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from training.checkpoint.chain import Chain, plan_chunks
from training.checkpoint.coding.codec import state_digest
from training.checkpoint.document import enveloped, print_json, with_fields
from training.checkpoint.draft import Content
from training.checkpoint.manifest import Chunk, Costs, Layout, Manifest, layout_digest
from training.checkpoint.policy import Cost
from training.checkpoint.ranks.contribution import Contribution, Parcel
from training.checkpoint.ranks.merge import merge
from training.errors import Invalid

Whole = dict[str, tuple[int, int, str]]  # chunk -> (bytes of an item, size in bytes, digest)


class Ready(NamedTuple):
    """What rank 0 commits when all is stored: everything but the costs is known, and printed."""

    manifest: Manifest
    body: bytes
    content: Content
    whole: Whole

    @classmethod
    def of(cls, manifest: Manifest, content: Content, whole: Whole) -> Self:
        """Of a manifest whose chunks are printed already."""
        body = with_fields(print_json(manifest, leave_out={"chunks", "costs"}), {"chunks": content.printed})
        return cls(manifest, body, content, whole)

    def with_costs(self, costs: Costs) -> tuple[Manifest, bytes]:
        """The whole, and its bytes."""
        data = enveloped(with_fields(self.body, {"costs": print_json(costs)}))
        return self.manifest.model_copy(update={"costs": costs}), data


@dataclass
class Leader:
    """Of a group of `size` ranks.

    Attributes:
        whole: every chunk of the last committed state.
    """

    size: int
    whole: Whole = field(default_factory=dict)
    _layouts: dict[int, tuple[str, Layout]] = field(default_factory=dict)  # of each rank, with its digest
    _merged: tuple[list[str], Layout, str] | None = None  # from these digests; the layout and its own digest

    def start_from(self, chain: Chain) -> None:
        """Go on from a checkpoint that was restored."""
        plans = plan_chunks(chain)
        self.whole = {key: (p.item_bytes, p.size_bytes, p.newest.digest) for key, p in plans.items()}

    def combine(self, parcels: Sequence[Parcel]) -> tuple[Content, Whole]:
        """The content of a manifest, and what `whole` is when it is committed.

        Args:
            parcels: of all ranks, in order.

        Raises:
            Invalid: the ranks are not at the same save, or their states have different structures.
        """
        contributions = [parcel.told for parcel in parcels]
        first = contributions[0]
        for other in contributions[1:]:
            told = (other.sequence, other.position, other.base)
            if told != (first.sequence, first.position, first.base):
                raise Invalid(f"rank {other.rank} saves {told[1]}, base {told[2]}, but rank 0 {first.position}")
        layout, digest = self._layout(contributions)
        live = {entry.chunk for entry in layout.tensors}
        whole = {key: value for key, value in self.whole.items() if key in live}
        for contribution in reversed(contributions):  # see `_joined`: the first one counts
            whole.update({key: (item, size, value) for key, item, size, value in contribution.rows})
        if missing := live - whole.keys():
            raise Invalid(f"no rank saves chunk {min(missing)}")
        values = [value for contribution in contributions for value in contribution.values]
        packs = [pack for contribution in contributions for pack in contribution.packs]
        modes: Counter[str] = Counter()
        for contribution in contributions:
            modes.update(contribution.modes)
        content = Content(
            layout=layout,
            layout_digest=digest,
            values=values,
            chunks=(),
            printed=b"[%s]" % _joined(parcels),
            chunk_count=len(whole),
            packs=packs,
            state_digest=state_digest(digest, values, whole),
            state_bytes=sum(size for _, size, _ in whole.values()),
            encode_seconds=sum(one.encode_seconds for one in contributions),
            upload_seconds=0.0,  # not known yet
            modes=modes,
            cost=Cost(sum(one.work_bytes for one in contributions), sum(pack.size_bytes for pack in packs)),
            world_size=self.size,
        )
        return content, whole

    def _layout(self, contributions: Sequence[Contribution]) -> tuple[Layout, str]:
        for contribution in contributions:
            if contribution.layout is not None:
                self._layouts[contribution.rank] = contribution.layout_digest, contribution.layout
            known = self._layouts.get(contribution.rank)
            if known is None or known[0] != contribution.layout_digest:
                raise Invalid(f"rank {contribution.rank} has not told the structure of its state")
        digests = [contribution.layout_digest for contribution in contributions]
        if self._merged is None or self._merged[0] != digests:
            layouts = [self._layouts[rank][1] for rank in range(self.size)]
            layout = merge(layouts, [len(contribution.values) for contribution in contributions])
            self._merged = digests, layout, layout_digest(layout)
        return self._merged[1:]


def _joined(parcels: Iterable[Parcel]) -> bytes:
    """The chunks of all ranks, whose frames count the packs of all ranks. Mostly they do already."""
    texts: list[bytes] = []
    seen: set[str] = set()
    packs = 0
    for parcel in parcels:
        moved = packs - parcel.told.first_pack
        packs += len(parcel.told.packs)
        keys = {row[0] for row in parcel.told.rows}
        if moved or keys & seen:  # two ranks may hold the same part, where their meshes did not tell
            chunks = (_moved(chunk, moved) for chunk in parcel.parsed() if chunk.key not in seen)
            texts.append(b",".join(print_json(chunk) for chunk in chunks))
        else:
            texts.append(parcel.chunks)
        seen |= keys
    return b",".join(text for text in texts if text)


def _moved(chunk: Chunk, places: int) -> Chunk:
    """Whose packs have other places. A frame without bytes is in no pack."""
    frames = (frame._replace(pack=frame.pack + places) if frame.length else frame for frame in chunk.frames)
    return chunk.model_copy(update={"frames": tuple(frames)})
