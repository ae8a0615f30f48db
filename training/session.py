"""One attempt at a range, from an open store to its last commit. Needs no server."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.cadence import Cadence, Failures
from training.checkpoint.checkpointer import IncrementalCheckpointer
from training.checkpoint.coding.bounded import BoundedCodec
from training.checkpoint.manifest import Committed, Manifest, Position, Ref, manifest_key
from training.checkpoint.quarantine import RollbackPolicy
from training.checkpoint.restore import RestoredState
from training.checkpoint.store import Store, open_store
from training.checkpoint.store.metered import MeteredStore
from training.checkpoint.token import Skipped
from training.config import CheckpointConfig, HealthConfig, JobConfig, SupervisorConfig, differences, digest_of
from training.errors import Corrupt, Invalid, RetomaError
from training.failures import observe_failures
from training.health import LossWatch, UnhealthyLoss
from training.loop import train_epochs
from training.ports import EVALUATION_DUE, Done, Message, Pause, RangeSpec, Restored, Saved, SaveFailed
from training.stopping import StopRequest
from training.trainer import Trainer

if TYPE_CHECKING:
    from training.parallel.ranks import Ranks


def train_range(
    config: JobConfig,
    store: str | Store,
    run: str,
    *,
    stop: int | None = None,
    data_folder: Path | None = None,
    data_version: Mapping[str, Any] | None = None,
    token: int | None = None,
    expected: Ref | None = None,
    report: Callable[[Message], None] = lambda _: None,
    request: StopRequest | None = None,
    ranks: Ranks | None = None,
    profile_folder: Path | None = None,
) -> Done:
    """Resume a run from its newest intact checkpoint and train until epoch `stop`.

    Args:
        config: what is trained.
        store: the run's store, or its address.
        run: name of the run.
        stop: first epoch that is not trained; default: the end of the run.
        data_folder: the verified data set.
        data_version: its digest and revision; recorded in every manifest, and compared on resume.
        token: claimed by a supervisor; default: claim one.
        expected: the newest checkpoint that the registry knows; a difference is reported, the store wins.
        report: receives every message.
        request: asks for an early end; see `train_epochs`.
        ranks: the group that this process is a rank of; every rank calls this.
        profile_folder: where the profile that the configuration asks for goes; default: none is made.

    Raises:
        Invalid: the job cannot be trained, or the run was started with another job or other data.
        See `train_epochs` for the rest.
    """
    started = time.perf_counter()
    trainer = Trainer(config, data_folder, ranks)
    metered = MeteredStore(open_store(store) if isinstance(store, str) else store)
    checkpointer = IncrementalCheckpointer(
        metered,
        run=run,
        token=token,
        **checkpoint_options(config.checkpoint),
        must_be_finite=trainer.must_be_finite,
        group=ranks.exchange if ranks is not None else None,
        split=trainer.must_be_finite,
        holders_of=trainer.state.holders_of,
        rollback=rollback_policy(config.health),
        job=describe(config),
        data=data_version,
        on_saved=lambda committed: report(_saved(committed)),
        on_failed=lambda error, failures: report(_save_failed(error, failures)),
    )
    limits = config.supervisor
    with checkpointer, _announced_end(report, limits, checkpointer):
        checkpointer.check(trainer.state.capture())
        report(Pause(what="restoring", allowance_seconds=limits.start_seconds))
        restored = checkpointer.restore(trainer.state.box)
        position = _resume(trainer, restored, config, data_version)
        if checkpointer.rollback is not None:
            position = trainer.schedule.skip(position, checkpointer.rollback.skip_steps)
        cadence = _cadence(config, checkpointer, time.perf_counter() - started)
        report(
            Restored(
                checkpoint=restored.checkpoint.ref if restored is not None else None,
                position=position,
                skipped=_differences(restored, expected),
                seconds=time.perf_counter() - started,
                total_steps=trainer.total_steps,
                steps_per_epoch=trainer.schedule.steps_per_epoch,
            )
        )
        if config.checkpoint.overlap_copy:
            checkpointer.overlap(trainer.model, *trainer.optimizers)
        last = config.epochs if stop is None else min(stop, config.epochs)
        evaluation_due = restored is not None and bool(restored.manifest.meta.get(EVALUATION_DUE))
        position, metrics = train_epochs(
            trainer,
            checkpointer,
            position,
            last,
            report,
            request,
            cadence,
            evaluation_due,
            _watch(config, restored),
            profile_folder,
        )
        head = checkpointer.head
    if head is None:
        raise Invalid(f"nothing to train: the range ends at epoch {last}")
    done = Done(
        checkpoint=head.ref,
        position=position,
        state_digest=head.manifest.state_digest,
        metrics=metrics or head.manifest.meta.get("metrics", {}),
    )
    report(done)
    who = f"rank {ranks.rank}: " if ranks is not None else ""
    print(f"{who}{metered.snapshot()}", flush=True)  # noqa: T201 - the log
    return done


def train_spec(
    spec: RangeSpec,
    report: Callable[[Message], None],
    request: StopRequest,
    ranks: Ranks | None = None,
) -> Done:
    """`train_range` as a supervisor has ordered it."""
    return train_range(
        spec.config,
        spec.store_url,
        spec.run,
        stop=spec.stop,
        data_folder=Path(spec.data_folder) if spec.data_folder else None,
        data_version=spec.data_version,
        token=spec.token,
        expected=spec.expected,
        report=report,
        request=request,
        ranks=ranks,
        profile_folder=Path(spec.profile_folder) if spec.profile_folder else None,
    )


def checkpoint_options(config: CheckpointConfig) -> dict[str, Any]:
    """The part of the configuration that goes to the engine as it is."""
    names = {
        "deltas_per_base",
        "restore_seconds",
        "on_busy",
        "max_failed_saves",
        "encode_threads",
        "upload_threads",
    }
    bounded = BoundedCodec(config.bounded, config.bound) if config.bounded is not None else None
    return {**config.model_dump(include=names), "bounded": bounded}


def rollback_policy(config: HealthConfig) -> RollbackPolicy | None:
    """Whether an attempt rolls back after one that diverged."""
    rolls_back = config.on_divergence == "rollback"
    return RollbackPolicy(most=config.rollbacks, skip_steps=config.skip_steps) if rolls_back else None


def describe(config: JobConfig) -> dict[str, Any]:
    """What a manifest says about the job."""
    return {
        "name": config.short_name,
        "digest": digest_of(config.identity()),
        "identity": config.identity(),
        "epochs": config.epochs,
    }


def check_same_run(manifest: Manifest, config: JobConfig, data_version: Mapping[str, Any] | None) -> None:
    """Refuse to continue a run as another one.

    Raises:
        Invalid: names each key that differs, with both values.
    """
    saved = {**manifest.job.get("identity", {}), "data digest": manifest.data.get("digest")}
    live = {**config.identity(), "data digest": (data_version or {}).get("digest")}
    if found := differences(saved, live):
        raise Invalid(
            f"run {manifest.run} was started as another training: {'; '.join(found)}",
            hint="resume with the first configuration, or start a new run: retoma train JOB.yaml --new",
            run=manifest.run,
        )


@contextmanager
def _announced_end(
    report: Callable[[Message], None], limits: SupervisorConfig, checkpointer: IncrementalCheckpointer
) -> Iterator[None]:
    """The end may wait for the save in flight: no silence to be killed for before an error could be told."""
    ending = Pause(what="ending", allowance_seconds=limits.save_seconds)
    try:
        yield
    except Exception as error:
        report(ending)
        if isinstance(error, UnhealthyLoss):
            checkpointer.quarantine("loss", error.message, position=error.position, since_step=error.since_step)
        raise
    report(ending)


def _watch(config: JobConfig, restored: RestoredState | None) -> LossWatch:
    memory = restored.manifest.meta.get("health") if restored is not None else None
    return LossWatch(config.health, config.log_every_steps, memory)


def _cadence(config: JobConfig, checkpointer: IncrementalCheckpointer, start_seconds: float) -> Cadence:
    failures = Failures()
    if config.checkpoint.every_steps == "auto" and checkpointer.token is not None:
        failures = observe_failures(checkpointer.store, checkpointer.token)
    return Cadence(config.checkpoint, checkpointer, failures, start_seconds)


def _resume(
    trainer: Trainer, restored: RestoredState | None, config: JobConfig, data_version: Mapping[str, Any] | None
) -> Position:
    if restored is None:
        return Position()
    check_same_run(restored.manifest, config, data_version)
    for section in ("model", "optimizer", "scheduler", "scaler", "randomness"):
        if section not in restored:
            raise Corrupt(f"the checkpoint holds no {section}", key=restored.manifest.key)
    trainer.state.apply(restored, restored.manifest.world_size)
    return restored.position


def _differences(restored: RestoredState | None, expected: Ref | None) -> tuple[Skipped, ...]:
    skipped = restored.skipped if restored is not None else ()
    found = restored.checkpoint.ref if restored is not None else None
    if expected is not None and (
        found is None or (expected.token, expected.sequence) > (found.token, found.sequence)
    ):
        key = manifest_key(expected.token, expected.sequence)
        skipped += (Skipped(key=key, reason=f"registered, but the store's newest intact checkpoint is {found}"),)
    return skipped


def _save_failed(error: RetomaError, failures: int) -> SaveFailed:
    print(f"save failed ({failures} in a row): {error}", file=sys.stderr, flush=True)  # noqa: T201 - the log
    return SaveFailed(error=error.kind, message=error.message, failures_in_a_row=failures)


def _saved(committed: Committed) -> Saved:
    manifest = committed.manifest
    return Saved(
        checkpoint=committed.ref,
        checkpoint_kind=manifest.kind,
        position=manifest.position,
        written_bytes=manifest.costs.written_bytes,
        state_bytes=manifest.costs.state_bytes,
        stall_seconds=manifest.costs.stall_seconds,
        metrics=manifest.meta.get("metrics", {}),
    )
