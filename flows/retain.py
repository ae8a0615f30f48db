"""Look after the stores of runs: compact long chains, delete what nobody needs. Made for a schedule.

prefect deployment run maintain/cpu -p dry_run=true
"""

from __future__ import annotations

from typing import Any

from prefect import flow, get_run_logger
from prefect.states import Completed, Failed

from infra.settings import load_settings
from tasks.retain import Care, retain
from tasks.tracking import registry_of
from training.errors import RetomaError

SECONDS_PER_HOUR = 3600.0


@flow(name="maintain")
def maintain(
    runs: list[str] | None = None,
    keep: int = 2,
    grace_hours: float = 24.0,
    max_links: int = 32,
    restore_seconds: float | None = None,
    dry_run: bool = False,
) -> Any:
    """Compact, then collect. May run beside trainings.

    Args:
        runs: names of runs; default: all.
        keep: newest bases that stay, with all that is newer; at least 1.
        grace_hours: nothing younger is deleted.
        max_links: a checkpoint whose restore reads more checkpoints than this is compacted.
        restore_seconds: the same, by how long the restore is predicted to take.
        dry_run: change nothing, and tell what would be deleted.
    """
    settings = load_settings()
    care = Care(
        keep=keep,
        grace_seconds=grace_hours * SECONDS_PER_HOUR,
        max_links=max_links,
        restore_seconds=restore_seconds,
        dry_run=dry_run,
    )
    try:
        done = retain(settings, registry_of(settings), runs, care)
    except RetomaError as error:
        return Failed(message=f"{error.kind}: {error}")
    for one in done:
        get_run_logger().info("%s", one)
    failed = [one for one in done if one.errors]
    if failed:
        return Failed(message="; ".join(str(one) for one in failed))
    return Completed(message=f"{len(done)} runs, {sum(one.freed_bytes for one in done)} bytes freed")
