"""Lends this node to a range whose group has several. Started by `train-range`, over when the range is.

How it ends says nothing of the training: the store does, and the flow run of the range.
"""

from __future__ import annotations

from typing import Any

from prefect import flow, get_run_logger, runtime
from prefect.states import Cancelled, Crashed

from infra.settings import load_settings
from tasks.companions import NodeCall
from tasks.departure import Departure, Leave
from tasks.lend import Lent
from training.errors import RetomaError


@flow(name="join-range")
def join_range(call: NodeCall) -> Any:
    """Start ranks here whenever the launcher of the group asks for them, until it dismisses this node."""
    departure = Departure()
    departure.listen()
    settings = load_settings()
    lent = Lent(call, str(runtime.flow_run.id), settings.home, get_run_logger())
    try:
        with departure:
            code = lent.run()
    except Leave as leave:
        lent.leave()
        return Cancelled(message=f"asked to leave ({leave}); the group goes on without this node")
    except RetomaError as error:
        return Crashed(message=f"{error.kind}: {error}")
    if code:
        return Crashed(message=f"the node ended with exit code {code}: its launcher is gone")
    return None
