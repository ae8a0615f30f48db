"""The configuration of one training: defaults < YAML file < `--set key=value`.

Frozen, and closed: an unknown key is an error that names its neighbours.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from training.errors import Invalid
from training.parallel.config import ParallelConfig

JOB_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
NAME_PATTERN = r"^[a-z0-9][a-z0-9-]{0,63}$"


class Frozen(BaseModel):
    """Base of all configuration: immutable, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class CheckpointConfig(Frozen):
    """When to save and how. A save also happens at the end of every epoch."""

    every_steps: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        50, description="optimizer steps between saves; 0: at epoch ends only; auto: by cost and failures"
    )
    every_seconds: float | None = Field(None, gt=0, description="save when so much time has passed, too")
    max_lost_steps: int | None = Field(
        None, ge=1, description="training waits for a save, rather than have more steps to lose; default: no limit"
    )
    deltas_per_base: int | None = Field(None, ge=0, description="most deltas after a base; default: by their cost")
    restore_seconds: float | None = Field(None, gt=0, description="how long a restore may take")
    bounded: Literal["int8", "int4"] | None = Field(
        None, description="deltas with a bounded error; a resume is not bit-exact then"
    )
    bound: float | None = Field(None, gt=0, description="of an element, relative to the largest of its tensor")
    on_busy: Literal["wait", "skip"] = Field("wait", description="when the save before is still in flight")
    overlap_copy: bool = Field(
        False,
        description="copy beside the next pass; parameters may change in the optimizer's step only",
    )
    max_failed_saves: int = Field(3, ge=0, description="in a row, with the store away; one more ends the attempt")
    encode_threads: int = Field(1, ge=1, le=64, description="threads that compress beside the training")
    upload_threads: int = Field(2, ge=1, le=64, description="packs that are written at once")


class SupervisorConfig(Frozen):
    """How the supervisor of a range treats its training process."""

    silence_seconds: float = Field(
        5.0, gt=0, description="no progress for this long, or for 4 of the longest steps: the process is killed"
    )
    start_seconds: float = Field(
        120.0, gt=0, description="building the job, and then restoring, may each take this"
    )
    first_step_seconds: float = Field(
        300.0, gt=0, description="a first step, which compiles and warms up, may take"
    )
    evaluation_seconds: float = Field(600.0, gt=0, description="an evaluation may take")
    save_seconds: float = Field(
        600.0, gt=0, description="training may wait for the copy of a save and the one before"
    )
    lease_seconds: float = Field(
        60.0, gt=0, description="with neither store nor orchestrator for this long: give up"
    )
    grace_seconds: float = Field(20.0, ge=0, description="from the wish that it leaves to SIGKILL")
    restarts_in_place: int = Field(1, ge=0, description="restarts on this node before the orchestrator's retry")
    same_step_failures: int = Field(3, ge=1, description="tries that end at the same step, then give up")


class HealthConfig(Frozen):
    """What is not healthy, and what to do about it. Weights and losses that are not finite never are."""

    spike_factor: float | None = Field(None, gt=1, description="a loss above so many medians is one; default: none")
    spike_window_steps: int = Field(100, ge=2, description="steps before, whose median it is")
    spike_patience_steps: int = Field(10, ge=1, description="steps in a row that it takes")
    on_divergence: Literal["stop", "rollback"] = Field("stop", description="rollback: go on from before it")
    rollbacks: int = Field(2, ge=1, description="of a run; one more stops it")
    skip_steps: int = Field(0, ge=0, description="steps whose data is left out after a rollback, within the epoch")


class ProfileConfig(Frozen):
    """Which steps run under torch's profiler. Each rank's timeline becomes an artifact of the MLflow run."""

    start_step: int = Field(ge=0, description="the first one, counted over the run; the very first ones warm up")
    steps: int = Field(3, ge=1, le=100, description="so many; a step of a large model is megabytes")


class InitFrom(Frozen):
    """The checkpoint whose model weights a new run starts from. Optimizer, position and randomness start anew."""

    store_url: str = Field(min_length=1)
    run: str = Field(pattern=NAME_PATTERN)
    token: int = Field(ge=1)
    sequence: int = Field(ge=0)


class JobConfig(Frozen):
    """Everything that decides what one run computes."""

    job: str = Field(pattern=JOB_PATTERN, description="import path of the job class, module:Class")
    name: str = Field("", pattern=r"^$|" + NAME_PATTERN, description="short name; default from the class")
    data: str | None = Field(None, description="folder tracked by DVC, relative to the project's root")
    seed: int = Field(0, ge=0, lt=2**63)
    epochs: int = Field(1, ge=1)
    epochs_per_range: int = Field(1, ge=1, description="epochs of one scheduled unit")
    batch_size: int = Field(32, ge=1, description="samples of one micro-batch")
    accumulate_batches: int = Field(1, ge=1, description="micro-batches of one optimizer step")
    clip_grad_norm: float | None = Field(None, gt=0)
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = Field(1, ge=1, description="intra-op threads; a part of what makes a run bit-exact")
    loader_workers: int = Field(0, ge=0)
    log_every_steps: int = Field(10, ge=1, description="optimizer steps between logged losses")
    params: dict[str, Any] = Field(default_factory=dict, description="the job's own parameters")
    checkpoint: CheckpointConfig = CheckpointConfig()
    supervisor: SupervisorConfig = SupervisorConfig()
    health: HealthConfig = HealthConfig()
    parallel: ParallelConfig = ParallelConfig()
    profile: ProfileConfig | None = Field(None, description="steps to profile; default: none")
    attempts_per_range: int = Field(5, ge=1, description="tries in a row without a new checkpoint, then give up")
    init_from: InitFrom | None = Field(None, description="start from the weights of this checkpoint")

    @property
    def short_name(self) -> str:
        """`name`, or the module name of the job with `-` for `_`."""
        return self.name or self.job.partition(":")[0].rpartition(".")[2].lower().replace("_", "-")

    @model_validator(mode="after")
    def _group_agrees(self) -> Self:
        """What every rank decides for itself must not depend on its own clock, or on its own disk."""
        self._check_local_steps()
        if self.parallel.world == 1:
            return self
        if self.checkpoint.every_steps == "auto" or self.checkpoint.every_seconds is not None:
            raise ValueError("parallel.world > 1 needs checkpoint.every_steps as a number, and no every_seconds")
        if self.checkpoint.on_busy != "wait":
            raise ValueError("parallel.world > 1 needs checkpoint.on_busy: wait")
        if self.precision == "fp16" and self.parallel.data != "ddp":
            raise ValueError(f"parallel.data: {self.parallel.data} scales no loss for fp16; take precision: bf16")
        return self

    def _check_local_steps(self) -> None:
        steps, most = self.parallel.local_steps, self.checkpoint.max_lost_steps
        if most is not None and most < steps:
            raise ValueError(
                f"checkpoint.max_lost_steps {most} is less than parallel.local_steps {steps}, and between "
                "synchronisations nothing is saved: raise the one, or lower the other"
            )
        if steps > 1 and self.precision == "fp16":
            raise ValueError("parallel.local_steps: each rank would scale its loss for fp16; take precision: bf16")

    @model_validator(mode="after")
    def _pipeline_agrees(self) -> Self:
        """All pieces of a micro-batch have one shape: buffers for it are made once."""
        if self.parallel.pipeline == 1:
            return self
        pieces = self.parallel.data_ranks * self.parallel.microbatches
        if self.batch_size % pieces:
            raise ValueError(
                f"batch_size {self.batch_size} is no multiple of {pieces}, the pieces that parallel.microbatches "
                f"{self.parallel.microbatches} makes on {self.parallel.data_ranks} data-parallel ranks"
            )
        if self.precision == "fp16":
            raise ValueError("parallel.pipeline scales no loss for fp16; take precision: bf16")
        return self

    def identity(self) -> dict[str, Any]:
        """The part that changes the numbers. A checkpoint resumes only under an equal identity.

        The world size does not count: it changes the order of sums, and a run may go on with another one.
        """
        kept = {"job", "seed", "epochs", "batch_size", "accumulate_batches", "clip_grad_norm"}
        found = self.model_dump(mode="json", include=kept | {"precision", "threads", "params", "init_from"})
        if self.parallel.compression is not None:
            names = {"compression", "powersgd_rank", "powersgd_start_steps"}
            found["compression"] = self.parallel.model_dump(mode="json", include=names)
        if self.parallel.local_steps > 1:
            names = {"local_steps", "local_after_steps", "outer", "outer_lr", "outer_momentum"}
            found["local"] = self.parallel.model_dump(mode="json", include=names)
        return found

    def ranges(self) -> list[tuple[int, int]]:
        """Half-open epoch ranges `[start, stop)` that cover `[0, epochs)`."""
        step = self.epochs_per_range
        return [(start, min(start + step, self.epochs)) for start in range(0, self.epochs, step)]


def digest_of(value: Any) -> str:
    """sha256 of the canonical JSON of `value`, as `sha256:<hex>`."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def differences(saved: Mapping[str, Any], live: Mapping[str, Any]) -> list[str]:
    """`key was x, is y` for each key whose values differ."""
    return [
        f"{key} was {saved.get(key)!r}, is {live.get(key)!r}"
        for key in sorted(saved.keys() | live.keys())
        if saved.get(key) != live.get(key)
    ]


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> JobConfig:
    """Read a job's YAML file, apply `key=value` overrides (dotted keys reach inside), validate.

    Raises:
        Invalid: the file is missing or not YAML, a key is unknown, or a value is out of range.
    """
    file = Path(path)
    if not file.is_file():
        raise Invalid(f"no job file at {file}", hint="jobs that come with retoma: training/jobs/*.yaml")
    try:
        values = yaml.safe_load(file.read_text()) or {}
    except yaml.YAMLError as error:
        raise Invalid(f"{file} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise Invalid(f"{file} must hold a mapping of keys, not {type(values).__name__}")
    for override in overrides:
        _apply(values, override)
    return parse_config(values, source=str(file))


def parse_config(values: Mapping[str, Any], source: str = "configuration") -> JobConfig:
    """Validate plain values.

    Raises:
        Invalid: names every wrong key, what was expected, and the nearest known key.
    """
    try:
        return JobConfig.model_validate(values)
    except ValidationError as error:
        raise Invalid(f"{source}: {explain(error, JobConfig)}") from error


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """One line for each problem, with a suggestion for a misspelt key."""
    lines = []
    for problem in error.errors(include_url=False):
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            known = _keys(model, problem["loc"][:-1])
            near = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
            advice = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            lines.append(f"unknown key {key!r}; {advice}")
        elif problem["type"] == "value_error":  # of several keys together: the message names them
            lines.append(str(problem["msg"]).removeprefix("Value error, "))
        else:
            lines.append(f"{key}: {problem['msg']}, got {problem.get('input')!r}")
    return "; ".join(lines)


def _keys(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    for part in path:
        field = model.model_fields.get(str(part))
        inner = field.annotation if field else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        model = inner
    return sorted(model.model_fields)


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not re.fullmatch(r"[\w.]+", key):
        raise Invalid(f"override {override!r} is not key=value", hint="for example --set epochs=3")
    *parents, last = key.split(".")
    for part in parents:
        values = values.setdefault(part, {})
        if not isinstance(values, dict):
            raise Invalid(f"override {override!r}: {part!r} is a value, not a section")
    try:
        values[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise Invalid(f"override {override!r}: the value is not YAML") from error
