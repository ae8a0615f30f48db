"""What a drill has seen: the raw history of one training with faults, as plain values that can be kept.

All times are the drill's own clock, in seconds since the epoch. They are when something *appeared*: an object in
the store, a step in the job's step file; a change of state has the Prefect server's time.
"""

from __future__ import annotations

from pydantic import Field

from training.config import Frozen


class Injected(Frozen):
    """A fault, and what it hit."""

    fault: str
    at: float
    answer: str = "token"  # what must come: another `token` that trains, `steps` of any attempt, another `parent`
    token: int | None = None  # of the attempt that was hit
    pid: int | None = None  # its training process
    flow_run_id: str | None = None
    until: float | None = None  # when it was taken back: healed, or woken
    detail: str = ""
    ranks: int | None = None  # of the group, where the fault is about a node of it
    named: tuple[int, ...] = ()  # processes there, of which the verdict must name one
    grows: bool = False  # whether the node is a part of the group again after the fault was taken back


class TokenSeen(Frozen):
    """One attempt: when its claim and seal appeared, what it started from, how it ended."""

    token: int
    claimed: float
    sealed: float | None = None
    start_step: int | None = None  # what it restored
    flow_run_id: str | None = None
    pid: int | None = None  # of its training process, once that has made a step
    node: str = ""
    ended: float | None = None  # its end document appeared
    ended_kind: str = ""
    ended_by: str = ""
    reason: str = ""
    skipped: tuple[str, ...] = ()


class CommitSeen(Frozen):
    """One checkpoint; `void`: a later seal has left it out of the history."""

    token: int
    sequence: int
    step: int
    kind: str
    at: float
    save_seconds: float
    void: bool = False
    ranks: int = 1  # that wrote it


class StateSeen(Frozen):
    """A flow run has changed its state."""

    flow_run_id: str
    name: str
    state: str
    at: float
    message: str = ""
    parent: bool = False  # of the whole training, not of a range


class Recording(Frozen):
    """One training and the faults in it."""

    scenario: str
    run: str
    started: float
    ended: float
    hurried: float | None = None  # from here on the job did not wait any more: not measured
    interval_steps: int
    max_lost_steps: int | None = None  # that the job promises
    injected: tuple[Injected, ...] = ()
    tokens: tuple[TokenSeen, ...] = ()
    commits: tuple[CommitSeen, ...] = ()
    # of each training process: the end of each optimizer step
    steps: dict[int, tuple[float, ...]] = Field(default_factory=dict)
    states: tuple[StateSeen, ...] = ()
    outcome: str = ""  # state of the parent flow run at the end
    message: str = ""
    digest: str | None = None  # of the state at the end
    straight_digest: str | None = None  # of the same training, never interrupted
    problems: tuple[str, ...] = ()  # of the store's history
    unregistered: tuple[str, ...] | None = None  # checkpoints that MLflow lacks; None: not looked at
    orphans: tuple[str, ...] = ()  # processes of the training that were left a moment after its end
    failures: tuple[str, ...] = ()  # what the drill itself found wrong while it ran
