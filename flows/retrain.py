"""Train again when the data has changed, from the champion's weights; else end and say so. Made for a schedule.

prefect deployment run retrain/weekly -p force=true
"""

from __future__ import annotations

from typing import Any

from prefect import flow, get_run_logger
from prefect.states import Completed

from flows.train import as_parent, cancel_with_ranges, default_name, run_training
from infra.settings import Settings
from tasks.champion import judge_champion
from tasks.tracking import registry_of


@flow(name="retrain", on_cancellation=[cancel_with_ranges])
def retrain(
    job: str,
    registered_model: str | None = None,
    force: bool = False,
    run: str | None = None,
    overrides: list[str] | None = None,
    generation: int = 0,
) -> Any:
    """Compare data versions and, if they differ, train a new run.

    Args:
        job: YAML file of the job, relative to the project's root.
        registered_model: whose champion to start from; default: the job's own model.
        force: train also on the data that the champion has seen.
        run: name of the new run, or of one to go on with.
        overrides: `key=value` changes of the YAML file.
        generation: how often a crash of this flow was answered by starting it again; for the automation.
    """

    def body(settings: Settings) -> Any:
        changes = overrides or []
        verdict = judge_champion(settings, registry_of(settings), job, changes, registered_model)
        get_run_logger().info(verdict.reason)
        if not verdict.due and not force:
            return Completed(message=f"nothing to do: {verdict.reason}")
        name = run or default_name(settings, job, changes)
        if verdict.init_from is not None:
            changes = [*changes, f"init_from={verdict.init_from.model_dump_json()}"]
        return run_training(settings, job, name, changes, generation=generation, model=registered_model)

    return as_parent(body)
