"""What crosses the process boundary: typed JSON lines from a training process to its supervisor."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from training.checkpoint.manifest import Position, Ref
from training.checkpoint.token import Skipped
from training.config import Frozen, JobConfig
from training.errors import RetomaError, error_of_kind

# In the meta of a manifest: the evaluation at its position was given up, and its range is not done without it.
EVALUATION_DUE = "evaluation_due"
SLOW_RANKS = "slow_ranks"  # and there: when ranks held up the others
SPEED = "train/samples_per_second"  # in the metrics of a manifest: of the whole group, in its steps


class Gathering(Frozen):
    """Where the other nodes of a group come to, and what they must show there."""

    host: str
    port: int
    ticket: str = Field(repr=False)
    last_call_seconds: float = 2.0  # for those that are missing, once there are enough


class RangeSpec(Frozen):
    """What a training process is told: one attempt at one epoch range."""

    run: str
    start: int  # first epoch of the range
    stop: int  # first epoch after it
    token: int  # claimed by the supervisor
    store_url: str
    config: JobConfig
    data_folder: str | None = None  # absolute, verified
    data_version: dict[str, str | int | bool | None] = Field(default_factory=dict)
    expected: Ref | None = None  # the newest checkpoint that the registry knows
    gathering: Gathering | None = None  # of a group over several nodes
    profile_folder: str | None = None  # where profiles go; None: none is made


class Restored(Frozen):
    """The process has restored (or starts from nothing) and is about to train."""

    kind: Literal["restored"] = "restored"
    checkpoint: Ref | None
    position: Position
    skipped: tuple[Skipped, ...] = ()
    seconds: float
    total_steps: int
    steps_per_epoch: int


class Beat(Frozen):
    """Progress: sent after an optimizer step at a bounded rate, or at the end of a pause; never by a timer."""

    kind: Literal["beat"] = "beat"
    position: Position
    loss: float | None
    samples_per_second: float
    step_seconds: float = 0.0  # the longest of the recent steps; 0: none is known yet


class Pause(Frozen):
    """An honest silence begins: something that may take long, and of which nothing is heard until its end.

    The next message of the loop ends it. `Saved` and `SaveFailed` do not: they may come from the background.
    """

    kind: Literal["pause"] = "pause"
    what: str  # "restoring", "evaluating", ...: shown as the phase
    allowance_seconds: float


class Saved(Frozen):
    """A checkpoint was committed and acknowledged."""

    kind: Literal["saved"] = "saved"
    checkpoint: Ref
    checkpoint_kind: Literal["base", "delta"]
    position: Position
    written_bytes: int
    state_bytes: int
    stall_seconds: float
    metrics: dict[str, float] = Field(default_factory=dict)  # of an evaluation, at epoch ends


class SaveFailed(Frozen):
    """A save failed, the training goes on: the next one is taken against the last that was committed."""

    kind: Literal["save_failed"] = "save_failed"
    error: str
    message: str
    failures_in_a_row: int


class Present(Frozen):
    """The other nodes that are there, by the names that they were given."""

    kind: Literal["present"] = "present"
    names: tuple[str, ...]


class Regroup(Frozen):
    """The group has committed and ends, to be started again with other nodes. No failure."""

    kind: Literal["regroup"] = "regroup"
    reason: str


class Slow(Frozen):
    """A rank holds up the others, or no longer. No progress.

    Attributes:
        rank: which.
        since_step: its first step.
        over: whether it is over.
        excess_seconds: what the rank needs more for a step than the median of the others, on its own.
        step_seconds: what a step takes.
    """

    kind: Literal["slow"] = "slow"
    rank: int
    since_step: int
    over: bool
    excess_seconds: float
    step_seconds: float


class Profiled(Frozen):
    """A rank has written its profile. No progress.

    Attributes:
        rank: which; 0 for one process alone.
        path: of the file, in the folder that the supervisor has named.
    """

    kind: Literal["profiled"] = "profiled"
    rank: int
    path: str


class Done(Frozen):
    """The range is complete and its last checkpoint committed."""

    kind: Literal["done"] = "done"
    checkpoint: Ref
    position: Position
    state_digest: str
    metrics: dict[str, float] = Field(default_factory=dict)


class Failed(Frozen):
    """The process ends with an error. `error` is a kind of `training.errors`, or another exception's name.

    `report`: of a group, where its ranks were when it had to be ended.
    """

    kind: Literal["failed"] = "failed"
    error: str
    message: str
    hint: str | None = None
    report: str | None = None

    def exception(self) -> RetomaError:
        """The error to raise on the supervisor's side."""
        return error_of_kind(self.error, self.message, hint=self.hint)


Message = Annotated[
    Restored | Beat | Pause | Saved | SaveFailed | Present | Slow | Profiled | Regroup | Done | Failed,
    Field(discriminator="kind"),
]
_adapter: TypeAdapter[Message] = TypeAdapter(Message)


def encode_message(message: Message) -> bytes:
    """One line."""
    return message.model_dump_json().encode() + b"\n"


def decode_message(line: bytes) -> Message:
    """Parse one line. Raises pydantic's ValidationError on anything else."""
    return _adapter.validate_json(line)
