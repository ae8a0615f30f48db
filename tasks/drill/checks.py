"""The verdict on a drill: what must hold after any fault, and what must hold after this one."""

from __future__ import annotations

import re

from tasks.drill.measures import began, steps_at_risk, trials
from tasks.drill.recording import Recording
from tasks.drill.worlds import grew_at, in_words, numbers, shrank_at
from training.config import Frozen

# The drill itself has destroyed a checkpoint: falling back further than one interval is what must happen.
DAMAGING = ("corrupt-object",)
MUTE = ("partition-store", "full-disk")  # while it lasts the attempt can commit nothing
SLOW = ("slow-disk",)
STORE_AWAY = ("partition-both",)  # until another attempt takes over, and nothing of what was in flight arrives
WAKE_SECONDS = 2.0


class Check(Frozen):
    """One thing that must hold. `detail` says what was seen."""

    name: str
    passed: bool
    detail: str


def judge(recording: Recording) -> list[Check]:
    """All checks; the drill has passed when all have."""
    checks = [
        _completed(recording),
        _same_bits(recording),
        _felt(recording),
        _recovered(recording),
        _lost(recording),
    ]
    checks += [_history(recording), _fenced(recording), _registered(recording)]
    if any(fault.ranks is not None for fault in recording.injected):
        checks += [_named(recording), _sizes(recording)]
    checks.append(Check(name="nothing left", passed=not recording.orphans, detail=_list(recording.orphans)))
    if recording.failures:
        checks.append(Check(name="drill", passed=False, detail=_list(recording.failures)))
    return checks


def _completed(recording: Recording) -> Check:
    detail = recording.outcome + (f": {recording.message}" if recording.message else "")
    return Check(name="run completed", passed=recording.outcome == "COMPLETED", detail=detail)


def _same_bits(recording: Recording) -> Check:
    same = recording.digest is not None and recording.digest == recording.straight_digest
    detail = recording.digest or "no checkpoint"
    if not same:
        detail += f", the straight run has {recording.straight_digest}"
    if len(numbers(recording)) > 1:
        detail += f"; the straight run, too, made its steps with {in_words(recording)}"
    return Check(name="bit for bit the straight run", passed=same, detail=detail)


def _recovered(recording: Recording) -> Check:
    """After each fault there was a step again, by another attempt where one must take over; or another parent."""
    missing = [
        f"{trial.fault} at {trial.at - began(recording):.1f} s"
        for fault, trial in zip(recording.injected, trials(recording), strict=True)
        if trial.recovery_seconds is None or (fault.answer == "token" and trial.next_token is None)
    ]
    return Check(name="training went on after each fault", passed=not missing, detail=_list(tuple(missing)))


def _felt(recording: Recording) -> Check:
    """A fault that changed nothing proves nothing."""
    unfelt = [] if recording.injected else ["no fault was made"]
    for fault in recording.injected:
        own = [commit for commit in recording.commits if commit.token == fault.token]
        if fault.fault in MUTE and any(fault.at + 1.0 < c.at < (fault.until or 0.0) for c in own):
            unfelt.append(f"{fault.fault}: checkpoints were committed all the time")
        if fault.fault in SLOW and not any(commit.save_seconds >= 1.0 for commit in own):
            unfelt.append(f"{fault.fault}: no save took a second")
    return Check(name="each fault was felt", passed=not unfelt, detail=_list(tuple(unfelt)))


def _lost(recording: Recording) -> Check:
    measured = [t for t in trials(recording) if t.steps_lost is not None and t.fault not in DAMAGING]
    worst = max((trial.steps_lost or 0 for trial in measured), default=0)
    away = any(trial.fault in STORE_AWAY for trial in measured)
    allowed = steps_at_risk(recording, store_away=away)
    detail = f"at most {worst} lost, {allowed} allowed (a checkpoint each {recording.interval_steps})"
    return Check(name="steps lost", passed=worst <= allowed, detail=detail)


def _history(recording: Recording) -> Check:
    """Damage that was done must be named in a seal; damage that was not must not be there."""
    if any(fault.fault in DAMAGING for fault in recording.injected):
        named = [reason for seen in recording.tokens for reason in seen.skipped]
        return Check(name="damage was found and named", passed=bool(named), detail=_list(tuple(named)))
    return Check(name="history is sound", passed=not recording.problems, detail=_list(recording.problems))


def _fenced(recording: Recording) -> Check:
    """No attempt has committed anything after a later one had sealed, unless the seal made it void."""
    late = []
    for commit in recording.commits:
        seals = [s.sealed for s in recording.tokens if s.token > commit.token and s.sealed is not None]
        if not commit.void and seals and commit.at > min(seals) + WAKE_SECONDS:
            late.append(f"{commit.token:06d}/{commit.sequence:08d}")
    return Check(name="no commit after a takeover", passed=not late, detail=_list(tuple(late)))


def _named(recording: Recording) -> Check:
    """The group says which node it has lost, or which rank on it."""
    said: list[str] = []
    missing: list[str] = []
    for fault in recording.injected:
        if fault.ranks is None:
            continue
        reason = next((seen.reason for seen in recording.tokens if seen.token == fault.token), "")
        pids = {int(number) for number in re.findall(r"(?:pid|process) (\d+)", reason)}
        (said if pids & set(fault.named) else missing).append(reason or f"{fault.fault}: nothing")
    return Check(name="the node was named", passed=not missing, detail=_list(tuple(missing or said)))


def _sizes(recording: Recording) -> Check:
    """The group went on with fewer ranks; and with all of them, where the node came back."""
    missing = []
    faults = recording.injected
    for fault, end in zip(faults, [*(fault.at for fault in faults[1:]), None], strict=True):
        if fault.ranks is None:
            continue
        if shrank_at(recording, fault.at, fault.ranks, end) is None:
            missing.append(f"{fault.fault}: no checkpoint of fewer than {fault.ranks} ranks")
        if fault.grows and (fault.until is None or grew_at(recording, fault.until, fault.ranks) is None):
            missing.append(f"{fault.fault}: no checkpoint of {fault.ranks} ranks afterwards")
    return Check(name="the group's size", passed=not missing, detail=_list((in_words(recording), *missing)))


def _registered(recording: Recording) -> Check:
    missing = recording.unregistered
    detail = "not looked at" if missing is None else _list(missing)
    return Check(name="MLflow has every checkpoint", passed=not missing, detail=detail)


def _list(items: tuple[str, ...]) -> str:
    shown = "; ".join(items[:5])
    return shown + (f"; and {len(items) - 5} more" if len(items) > 5 else "")
