"""How often attempts of a run ended badly, told by its store alone: for the choice of the saving interval."""

from __future__ import annotations

from training.cadence import Failures
from training.checkpoint.history import read_committed
from training.checkpoint.store import Store
from training.checkpoint.token import Claim, read_claim, read_seal
from training.errors import Corrupt

_ATTEMPTS = 16  # the newest ones tell enough, and each is two objects to read


def observe_failures(store: Store, token: int) -> Failures:
    """Failures and training time of the attempts before `token`.

    A range that came to its end is followed by a first attempt at the next one; any other new attempt
    follows a failure. What an attempt trained after its last checkpoint is not seen.
    """
    count, seconds = 0, 0.0
    for number in range(token, max(1, token - _ATTEMPTS), -1):
        try:
            if _follows_failure(read_claim(store, number)):
                count += 1
            head = read_seal(store, number).head
            if head is not None and head.token == number - 1:
                seconds += read_committed(store, head.token, head.sequence).manifest.costs.attempt_seconds
        except Corrupt:
            continue  # died before its seal, or damaged: an estimate can do without it
    return Failures(count, seconds)


def _follows_failure(claim: Claim) -> bool:
    known = [claim.who[name] for name in ("attempt", "try") if isinstance(claim.who.get(name), int)]
    return any(number > 1 for number in known) if known else claim.token > 1
