"""One attempt at an epoch range, on a GPU pool. Its process supervises; the training runs in a child of it.

How it ends tells the parent what to do: Completed and Failed are final, Crashed asks for another attempt,
Cancelled says that another attempt has taken over, or that somebody cancelled it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, runtime
from prefect.states import Cancelled, Crashed, Failed

from infra.beat import Reporter
from infra.own_run import OwnRun
from infra.prefect_runs import PrefectRuns
from infra.settings import load_settings
from tasks.attempts import outcome_of
from tasks.companions import Company
from tasks.departure import Departure
from tasks.order import RangeOrder, RangeResult
from tasks.profiles import profile_folder
from tasks.publish import Publisher
from tasks.range import RangeSupervisor
from tasks.tracking import registry_of
from tasks.watch import Watch
from training.errors import RetomaError

STATES = {"CRASHED": Crashed, "CANCELLED": Cancelled, "FAILED": Failed}
CLOSE_SECONDS = 5.0


@flow(name="train-range")
def train_range(order: RangeOrder) -> Any:
    """Train the epochs of the order; what the store already has costs nothing."""
    with profile_folder(order.config) as folder:
        return _train(order, folder)


def _train(order: RangeOrder, profiles: Path | None) -> Any:
    departure = Departure()
    departure.listen()
    settings = load_settings()
    flow_run_id = str(runtime.flow_run.id)
    registry = registry_of(settings)
    reporter = Reporter(flow_run_id)
    version = order.data_version.model_dump() if order.data_version else None
    publisher = Publisher(order.store_url, registry, order.run, config=order.config, data_version=version)
    publisher.start()
    company = None
    if order.config.parallel.nodes > 1:
        company = Company(order, settings.node_address, PrefectRuns, get_run_logger())
        company.start()
    supervisor = RangeSupervisor(
        order=order,
        root=settings.home,
        flow_run_id=flow_run_id,
        registry=registry,
        publisher=publisher,
        on_progress=reporter.report,
        logger=get_run_logger(),
        company=company,
        profile_folder=profiles,
    )
    watch = Watch(
        supervisor,
        store=supervisor.store,
        flow_run=lambda: OwnRun(flow_run_id),
        departure=departure,
        lease_seconds=order.config.supervisor.lease_seconds,
        notice_file=settings.preemption_notice_file,
    )
    watch.start()
    ended: RangeResult | RetomaError
    try:
        ended = supervisor.run_until_asked(departure)
    except RetomaError as error:
        ended = error
    finally:
        # Both bounded: what is left over is published by the next attempt or by the parent.
        publisher.close(CLOSE_SECONDS)
        if company is not None:
            company.close(CLOSE_SECONDS)
        reporter.close()
        state = watch.last_look()
    if isinstance(ended, RangeResult):
        return ended.model_dump(mode="json")
    kind, message = outcome_of(ended)
    if kind == "CRASHED" and state == "CANCELLING":
        kind = "CANCELLED"
    return STATES[kind](message=message)
