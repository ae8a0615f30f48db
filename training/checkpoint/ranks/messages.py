"""What the ranks of a group tell each other about a checkpoint: which messages there are, and who waits for whom.

A save has three: each rank's part of the manifest, told when all is coded and the last pack is on its way; that its
packs are stored, or its error; and the outcome, from rank 0 to all. What rank 0 has to do with the parts it does
while packs are still on their way, so that the commit need not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from pydantic import BaseModel

from training.checkpoint.ranks.contribution import Failed, Failure, Outcome, Parcel
from training.checkpoint.ranks.exchange import Exchange, Stopped, dead_key
from training.errors import Unavailable

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


class Messages:
    """Of one rank, for one attempt.

    Args:
        exchange: with the other ranks; used by one thread at a time.
        patience_seconds: how long a rank that lives may take for its part.
    """

    def __init__(self, exchange: Exchange, patience_seconds: float) -> None:
        self.rank, self.others = exchange.rank, range(1, exchange.size)
        self._exchange, self._patience_seconds = exchange, patience_seconds
        self._told: list[int] = []  # saves whose messages may still be there

    def post(self, key: str, message: BaseModel) -> None:
        """Tell all."""
        self._exchange.post(key, message.model_dump_json().encode())

    def take(self, key: str, sender: int, model: type[M]) -> M:
        """Wait for what a rank tells. Raises `Unavailable`: it is dead, or does not answer."""
        try:
            (data,) = self._exchange.take([key], self._patience_seconds, [dead_key(sender)])
        except Stopped as stopped:
            raise Unavailable(f"rank {sender} is dead") from stopped
        return model.model_validate_json(data)

    def tell_part(self, parcel: Parcel) -> None:
        """Of this rank, when it is coded."""
        self._exchange.post(_part(parcel.told.sequence, self.rank), parcel.encode())

    def tell_stored(self, sequence: int) -> None:
        """That this rank's packs are durable."""
        self._exchange.post(_stored(sequence, self.rank), b"")

    def tell_failed(self, sequence: int, error: BaseException) -> None:
        """That this rank's packs will never be durable."""
        self.post(_failed(sequence), Failed(rank=self.rank, failure=Failure.of(error)))

    def parts(self, sequence: int, seconds: float | None = None) -> list[Parcel]:
        """For rank 0: those of the others, when all are there. Raises the error of a rank that has failed."""
        keys = [_part(sequence, rank) for rank in self.others]
        return [Parcel.decode(data) for data in self._of_all(self._exchange.take, sequence, keys, seconds)]

    def await_stored(self, sequence: int) -> None:
        """For rank 0: until all others have stored their packs. Raises the error of a rank that has failed."""
        keys = [_stored(sequence, rank) for rank in self.others]
        self._of_all(self._exchange.wait, sequence, keys)  # nothing is read: the commit waits for this

    def tell_outcome(self, sequence: int, outcome: Outcome) -> None:
        """From rank 0 to all."""
        self._told.append(sequence)
        self.post(_outcome(sequence), outcome)

    def outcome(self, sequence: int) -> Outcome:
        """Of a save, for the other ranks."""
        return self.take(_outcome(sequence), 0, Outcome)

    def forget_past(self) -> None:
        """For rank 0: all ranks have told their parts of the last save, so that they are past those before it."""
        for done in self._told[:-1]:
            of_ranks = (key(done, rank) for rank in self.others for key in (_part, _stored))
            for key in (_outcome(done), _failed(done), *of_ranks):
                self._exchange.forget(key)
        self._told = self._told[-1:]

    def _of_all(
        self,
        hear: Callable[[Sequence[str], float, Sequence[str]], T],
        sequence: int,
        keys: Sequence[str],
        seconds: float | None = None,
    ) -> T:
        patience_seconds = self._patience_seconds if seconds is None else seconds
        failed = _failed(sequence)
        try:
            return hear(keys, patience_seconds, [failed, *map(dead_key, self.others)])
        except Stopped as alarm:
            if alarm.key != failed:
                raise Unavailable(f"rank {alarm.key.rpartition('/')[2]} is dead") from alarm
            told = self.take(failed, 0, Failed)
            raise told.failure.error(told.rank) from alarm


def _part(sequence: int, rank: int) -> str:
    return f"save/{sequence}/r{rank}/part"


def _stored(sequence: int, rank: int) -> str:
    return f"save/{sequence}/r{rank}/stored"


def _failed(sequence: int) -> str:
    return f"save/{sequence}/failed"


def _outcome(sequence: int) -> str:
    return f"save/{sequence}"
