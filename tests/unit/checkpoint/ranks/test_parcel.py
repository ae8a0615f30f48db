"""What rank 0 passes on without a look is what it would have written itself."""

from __future__ import annotations

import pytest

from training.checkpoint.manifest import Chunk, Frame, Pack
from training.checkpoint.ranks.contribution import Contribution, Parcel
from training.checkpoint.ranks.leader import _joined


def chunk(key: str, pack: int, length: int = 5) -> Chunk:
    frame = Frame(0, pack, 3, length, "c" if length else "", "d")
    return Chunk(key=key, mode="full", item_bytes=4, size_bytes=8, digest=key, frames=(frame,))


def parcel(rank: int, chunks: list[Chunk], packs: int = 1) -> Parcel:
    told = Contribution(
        rank=rank,
        sequence=0,
        rows=tuple((one.key, one.item_bytes, one.size_bytes, one.digest) for one in chunks),
        first_pack=rank,
        packs=tuple(Pack(size_bytes=5, rank=rank) for _ in range(packs)),
    )
    return Parcel.of(told, chunks)


def joined(*parcels: Parcel) -> list[Chunk]:
    return Parcel(parcels[0].told, _joined(parcels)).parsed()


def test_it_crosses_to_another_rank() -> None:
    made = parcel(1, [chunk("größe\n", 1), chunk("b", 1)])
    assert Parcel.decode(made.encode()) == made
    assert made.parsed() == [chunk("größe\n", 1), chunk("b", 1)]
    empty = parcel(2, [], packs=0)
    assert Parcel.decode(empty.encode()) == empty
    assert empty.parsed() == []


def test_one_pack_a_rank_needs_no_other_numbers() -> None:
    found = joined(parcel(0, [chunk("a", 0)]), parcel(1, [chunk("b", 1)]), parcel(2, []))
    assert found == [chunk("a", 0), chunk("b", 1)]


@pytest.mark.parametrize(("packs", "place"), [(0, 0), (3, 3)])
def test_frames_move_with_the_packs_before_them(packs: int, place: int) -> None:
    """But one that is computed from another chunk is in no pack."""
    found = joined(parcel(0, [], packs=packs), parcel(1, [chunk("b", 1), chunk("copy", 0, length=0)]))
    assert found == [chunk("b", place), chunk("copy", 0, length=0)]


def test_of_a_part_that_two_ranks_hold_the_first_one_counts() -> None:
    found = joined(parcel(0, [chunk("a", 0)]), parcel(1, [chunk("a", 1), chunk("b", 1)]))
    assert found == [chunk("a", 0), chunk("b", 1)]
