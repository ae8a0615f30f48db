"""Who of a group copies, encodes and writes what all of its ranks hold. Each of them comes to the same answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from training.checkpoint.manifest import Tensor
from training.checkpoint.state.boxes import is_own


@dataclass(frozen=True)
class Share:
    """The share of one rank.

    Attributes:
        rank, size: of the group; rank None: there is none.
        split: keys of tensors, or of parts of the state (`optimizer/state`), that are the same on all ranks, bit
            for bit. All else is rank 0's: buffers differ between the ranks of DDP until the next forward pass.
    """

    rank: int | None = None
    size: int = 1
    split: frozenset[str] = field(default_factory=frozenset)

    def common_chunks(self, entries: Iterable[Tensor], chunk_bytes: Mapping[str, int]) -> set[str]:
        """The chunks that this rank saves, of those that all ranks have.

        Those that any of them may save go to the rank that has the least so far, the largest first.

        Args:
            entries: all tensors of the state, in the order of the structure.
            chunk_bytes: the size of each chunk.
        """
        common = {entry.chunk: entry for entry in entries if not is_own(entry.key)}
        if self.rank is None:
            return set(common)
        rank_0s = {entry.chunk for entry in entries if entry.chunk in common and not self._may_split(entry.key)}
        loads = [sum(chunk_bytes[chunk] for chunk in rank_0s), *([0] * (self.size - 1))]
        mine = rank_0s if self.rank == 0 else set()
        for chunk in sorted(common.keys() - rank_0s, key=lambda chunk: (-chunk_bytes[chunk], chunk)):
            rank = loads.index(min(loads))
            loads[rank] += chunk_bytes[chunk]
            if rank == self.rank:
                mine.add(chunk)
        return mine

    def _may_split(self, key: str) -> bool:
        parts = key.split("/")
        return any("/".join(parts[:count]) in self.split for count in range(1, len(parts) + 1))


ALONE = Share()
