"""Who of a group copies, encodes and writes what several of its ranks hold. Each of them comes to one answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from training.checkpoint.manifest import Tensor
from training.checkpoint.state.boxes import is_own

HoldersOf = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Share:
    """The share of one rank.

    Attributes:
        rank, size: of the group; rank None: there is none.
        split: keys of tensors, or of parts of the state (`optimizer/state`), that are the same on all ranks that
            hold them, bit for bit. All else is saved by the first of those: buffers differ between the ranks of DDP
            until the next forward pass.
        holders_of: the ranks that hold a tensor, by its key, in order; None: all ranks hold all tensors.
    """

    rank: int | None = None
    size: int = 1
    split: frozenset[str] = field(default_factory=frozenset)
    holders_of: HoldersOf | None = None

    def holders(self, key: str) -> tuple[int, ...]:
        """The ranks that hold a tensor."""
        return tuple(range(self.size) if self.holders_of is None else self.holders_of(key))

    def common_chunks(self, entries: Iterable[Tensor], chunk_bytes: Mapping[str, int]) -> set[str]:
        """The chunks that this rank saves, of those that it does not hold alone.

        Those that any of its holders may save go to the one that has the least so far, the largest first.

        Args:
            entries: all tensors of the state, in the order of the structure.
            chunk_bytes: the size of each chunk.
        """
        common = [entry for entry in entries if not is_own(entry.key)]
        if self.rank is None:
            return {entry.chunk for entry in common}
        shared: dict[tuple[int, ...], dict[str, bool]] = {}  # holders -> chunk -> whether any of them may save it
        for entry in common:
            chunks = shared.setdefault(self.holders(entry.key), {})
            chunks[entry.chunk] = chunks.get(entry.chunk, True) and self._may_split(entry.key)
        return {
            chunk
            for holders, chunks in shared.items()
            if self.rank in holders
            for chunk in self._mine(holders, chunks, chunk_bytes)
        }

    def _mine(
        self, holders: tuple[int, ...], chunks: Mapping[str, bool], chunk_bytes: Mapping[str, int]
    ) -> Iterable[str]:
        loads = dict.fromkeys(holders, 0)
        loads[holders[0]] = sum(chunk_bytes[chunk] for chunk, may_split in chunks.items() if not may_split)
        split = (chunk for chunk, may_split in chunks.items() if may_split)
        for chunk in sorted(split, key=lambda chunk: (-chunk_bytes[chunk], chunk)):
            rank = min(holders, key=loads.__getitem__)
            loads[rank] += chunk_bytes[chunk]
            if rank == self.rank:
                yield chunk
        if self.rank == holders[0]:
            yield from (chunk for chunk, may_split in chunks.items() if not may_split)

    def _may_split(self, key: str) -> bool:
        parts = key.split("/")
        return any("/".join(parts[:count]) in self.split for count in range(1, len(parts) + 1))


ALONE = Share()
