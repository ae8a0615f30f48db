"""What follows from a recording: detection, recovery and loss of each fault, and goodput. Pure arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import median

from tasks.drill.recording import Injected, Recording, StateSeen, TokenSeen
from tasks.drill.worlds import grew_at
from training.config import Frozen

CALM_STATES = ("SCHEDULED", "PENDING", "RUNNING")
STILL_SECONDS, STILL_STEPS = 1.0, 10  # between two steps; while a fault lasts, more than this is no work
DEFAULT_STEP_SECONDS = 0.1  # of a recording that has no two steps


class Trial(Frozen):
    """One fault and what came of it. Seconds from the fault; None: it did not happen.

    Attributes:
        verdict_seconds: until somebody said that the attempt is over; `by` says who.
        claim_seconds: until the next token was claimed.
        restore_seconds: until that attempt had restored and sealed.
        recovery_seconds: until its first trained step. Without a new token: the longest time without a step.
        steps_lost: that had been trained, and were trained again.
        whole_seconds: from when a node was back until a group of as many ranks as before had committed.
    """

    fault: str
    at: float
    token: int | None
    verdict_seconds: float | None = None
    by: str = ""
    claim_seconds: float | None = None
    restore_seconds: float | None = None
    recovery_seconds: float | None = None
    steps_lost: int | None = None
    next_token: int | None = None
    until_seconds: float | None = None
    whole_seconds: float | None = None
    detail: str = ""


def trials(recording: Recording) -> list[Trial]:
    """One for each fault, in order. A fault is answered for until the next one comes."""
    faults = recording.injected
    ends = [fault.at for fault in faults[1:]] + [recording.hurried or recording.ended]
    return [_trial(recording, fault, end) for fault, end in zip(faults, ends, strict=False)]


def began(recording: Recording) -> float:
    """The first claim, or a fault before it: where the time of people begins."""
    times = [seen.claimed for seen in recording.tokens] + [fault.at for fault in recording.injected]
    return min(times, default=recording.started)


def step_seconds(recording: Recording) -> float:
    """Median time of a step."""
    gaps = [after - before for times in recording.steps.values() for before, after in _pairs(times)]
    return median(gaps) if gaps else DEFAULT_STEP_SECONDS


def steps_at_risk(recording: Recording, store_away: bool = False) -> int:
    """Most steps that a fault may cost: those that the job promises, if it does.

    Else an interval, and what was trained while the save before was in flight: it is a checkpoint only when it is
    committed. The next save waits for it, so that it is never more than two, which happens with the store away.
    """
    if recording.max_lost_steps is not None:
        return recording.max_lost_steps
    if store_away:
        return 2 * recording.interval_steps
    longest = max((commit.save_seconds for commit in recording.commits), default=0.0)
    in_flight = math.ceil(longest / step_seconds(recording))
    return recording.interval_steps + min(recording.interval_steps, in_flight)


def goodput(recording: Recording) -> float | None:
    """Time that was spent on steps that lasted, over wall time from the first step to the last.

    Evaluation and saves between two steps are a part of the steps' time, standing still is not. None without steps.
    """
    usual = step_seconds(recording)
    until = recording.hurried or recording.ended
    times = {pid: [at for at in steps if at <= until] for pid, steps in recording.steps.items()}
    every = [at for steps in times.values() for at in steps]
    if not every:
        return None
    useful = 0.0
    for seen in recording.tokens:
        own = times.get(seen.pid or 0, [])[: useful_steps(recording, seen)]
        for begin, end in stretches(recording, seen.pid, own):
            useful += end - begin + usual
    last = max(at for steps in recording.steps.values() for at in steps)
    return useful / (min(last, until) - min(every) + usual)


def stretches(recording: Recording, pid: int | None, times: Sequence[float]) -> list[tuple[float, float]]:
    """First and last of a process's steps, in pieces: it stood still in between, while a fault lasted."""
    still_seconds = max(STILL_SECONDS, STILL_STEPS * step_seconds(recording))
    lasting = [(fault.at, fault.until) for fault in recording.injected if fault.pid == pid and fault.until]
    pieces: list[tuple[float, float]] = []
    for at in times:
        still = pieces and at - pieces[-1][1] > still_seconds
        if pieces and not (still and any(pieces[-1][1] < until and at > begin for begin, until in lasting)):
            pieces[-1] = (pieces[-1][0], at)
        else:
            pieces.append((at, at))
    return pieces


def useful_steps(recording: Recording, seen: TokenSeen) -> int:
    """How many of an attempt's steps were not trained again by a later one."""
    own = len(recording.steps.get(seen.pid or 0, ()))
    later = [other.start_step for other in recording.tokens if other.token > seen.token]
    starts = [start for start in later if start is not None]
    return own if not starts else max(0, min(own, min(starts) - (seen.start_step or 0)))


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of all values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _trial(recording: Recording, fault: Injected, end: float) -> Trial:
    found = Trial(
        fault=fault.fault,
        at=fault.at,
        token=fault.token,
        detail=fault.detail,
        until_seconds=fault.until - fault.at if fault.until is not None else None,
        whole_seconds=_whole(recording, fault),
    )
    if fault.token is None:
        return found.model_copy(update=_parent_fields(recording, fault, end))
    following = [seen for seen in recording.tokens if seen.token > fault.token and fault.at < seen.claimed < end]
    verdict = _verdict(recording, fault, end, following)
    fields: dict[str, object] = {}
    if verdict is not None:
        fields |= {"verdict_seconds": verdict[0] - fault.at, "by": verdict[1]}
    if not following:
        return found.model_copy(update=fields | _tolerated(recording, fault, end))
    fields["claim_seconds"] = following[0].claimed - fault.at
    for seen in following:
        steps = recording.steps.get(seen.pid or 0, ())
        if seen.pid in (None, fault.pid) or not steps:
            continue  # died before its first step: the one after it has recovered
        fields |= {
            "next_token": seen.token,
            "restore_seconds": seen.sealed - fault.at if seen.sealed is not None else None,
            "recovery_seconds": steps[0] - fault.at,
            "steps_lost": _lost(recording, fault, seen),
        }
        break
    return found.model_copy(update=fields)


def _whole(recording: Recording, fault: Injected) -> float | None:
    if fault.ranks is None or fault.until is None:
        return None
    at = grew_at(recording, fault.until, fault.ranks)
    return at - fault.until if at is not None else None


def _verdict(
    recording: Recording, fault: Injected, end: float, following: list[TokenSeen]
) -> tuple[float, str] | None:
    """When the attempt that was hit was given up, and by whom; whatever shows it first."""
    signs = [
        (seen.ended, seen.ended_by)
        for seen in recording.tokens
        if seen.token == fault.token and seen.ended is not None
    ]
    signs += [
        (change.at, f"Prefect: {change.state.lower()}")
        for change in recording.states
        if change.flow_run_id == fault.flow_run_id and change.state not in CALM_STATES
    ]
    signs += [(seen.claimed, "next claim") for seen in following[:1]]
    seen_in_time = [sign for sign in signs if fault.at <= sign[0] < end]
    return min(seen_in_time, key=lambda sign: sign[0], default=None)  # of two at once, the one that says more


def _lost(recording: Recording, fault: Injected, seen: TokenSeen) -> int | None:
    """Steps of the victim until the next claim, less those that were restored. Later ones are nobody's loss."""
    victim = next((other for other in recording.tokens if other.token == fault.token), None)
    if victim is None or seen.start_step is None:
        return None
    until = next(other.claimed for other in recording.tokens if other.token > victim.token)
    done = sum(at <= until for at in recording.steps.get(fault.pid or 0, ()))
    return max(0, (victim.start_step or 0) + done - seen.start_step)


def _tolerated(recording: Recording, fault: Injected, end: float) -> dict[str, object]:
    """Nobody took over: how long training stood still."""
    steps = recording.steps.get(fault.pid or 0, ())
    gaps = [after - before for before, after in _pairs(steps) if before < end and after > fault.at]
    return {"recovery_seconds": max(gaps), "steps_lost": 0} if gaps else {}


def _parent_fields(recording: Recording, fault: Injected, end: float) -> dict[str, object]:
    """The parent was hit: its end in Prefect, and the next parent that runs."""

    def first(states: list[StateSeen]) -> float | None:
        return min((change.at for change in states if fault.at <= change.at < end), default=None)

    parents = [change for change in recording.states if change.parent]
    ended = first([c for c in parents if c.flow_run_id == fault.flow_run_id and c.state not in CALM_STATES])
    running = first([c for c in parents if c.flow_run_id != fault.flow_run_id and c.state == "RUNNING"])
    return {
        "verdict_seconds": ended - fault.at if ended is not None else None,
        "by": "Prefect" if ended is not None else "",
        "recovery_seconds": running - fault.at if running is not None else None,
        "steps_lost": 0,
    }


def _pairs(times: Sequence[float]) -> list[tuple[float, float]]:
    return list(itertools.pairwise(times))
