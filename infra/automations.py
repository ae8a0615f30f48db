"""Automations of the Prefect server: the net under processes that nobody is left to report.

Prefect sees a dead process only through its living worker, and never one that hangs. What the server itself
notices by the absence of events, it answers as follows; the store's token makes a wrong verdict cost time only.

=================  ====================================  ==============================  ==========================
name               fires                                 then                            errs
=================  ====================================  ==============================  ==========================
progress lost      progress_within_seconds after the     the range is cancelled: a       after an outage of the
                   last beat of a range (+ 1 s)          living worker kills it          server that is longer
range silent       heartbeat_within_seconds after        the range is cancelled          the same
                   Prefect's own last heartbeat
parent silent      the same                              the parent is crashed           the same
range not started  pending_within_seconds after a        the range is cancelled          an image that takes longer
                   worker took it                                                        to pull
parent not         the same                              the parent is crashed           the same
started
train crashed,     at once                               the same deployment runs        up to parent_generations
retrain crashed                                          again, and attaches to the      times when it crashes at
                                                         ranges that are alive           every start
=================  ====================================  ==============================  ==========================

A wrong verdict on a range costs one attempt: the steps since its last checkpoint, and a restart. One on a parent
costs nothing but its own start. `parent silent` misses a parent that never beat, and all of them miss what was
last heard of before the automation existed.

A cancelled range is replaced by its parent at once. While its worker still kills it (a frozen one for 30 s), the
next one needs another slot.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from infra.beat import EVENT
from infra.settings import Settings

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

PREFIX = "retoma: "
TAG = "retoma"  # of our deployments, and so of their flow runs
RANGE = ("train-range",)
PARENTS = ("train", "retrain")
AGAIN_SECONDS = 3.0
HEARTBEAT = "prefect.flow-run.heartbeat"
# The name of a state is the name of its event. One of ours is not in Prefect's list: see SUPERSEDED.
SUPERSEDED = "Superseded"
ENDS = ("Completed", "Failed", "Crashed", "Cancelled", "Cancelling", "TimedOut", SUPERSEDED)
STARTING = ("Pending", "Submitting", "InfrastructurePending")
WAITS = ("Scheduled", "Late", "AwaitingRetry", "AwaitingConcurrencySlot", "Paused", "Suspended", "Resuming")
# Parameters that a parent is started again with. A template that is one expression keeps its type.
COPIED: dict[str, dict[str, str]] = {
    "train": {"job": "none", "run": "none", "overrides": "none"},
    "retrain": {"job": "none", "run": "none", "overrides": "none", "registered_model": "none", "force": "false"},
}


def wanted(settings: Settings) -> list[dict[str, Any]]:
    """All automations, as Prefect's API takes them. Pure, and without importing Prefect."""
    stalled = f"no progress for {settings.progress_within_seconds:g} s"
    silent = f"no heartbeat for {settings.heartbeat_within_seconds:g} s: frozen, or its machine is gone"
    late = f"not started within {settings.pending_within_seconds:g} s after a worker took it"
    heartbeat = {HEARTBEAT, *_events(*ENDS, *WAITS, *STARTING)}
    begun = set(_events("Running", "Retrying", *ENDS, *WAITS))
    return [
        _automation(
            "progress lost",
            "A range without progress is cancelled, and its parent starts the next attempt.",
            _absence(EVENT, {EVENT, *_events(*ENDS, *WAITS, *STARTING)}, settings.progress_within_seconds),
            _set("Cancelling", stalled),
        ),
        _automation(
            "range silent",
            "A range without Prefect's own heartbeat is cancelled: a second, slower net.",
            _absence(HEARTBEAT, heartbeat, settings.heartbeat_within_seconds, RANGE),
            _set("Cancelling", silent),
        ),
        _automation(
            "parent silent",
            "A parent without heartbeat is set to Crashed.",
            _absence(HEARTBEAT, heartbeat, settings.heartbeat_within_seconds, PARENTS),
            _set("Crashed", silent),
        ),
        _automation(
            "range not started",
            "A range that a worker took and never started is cancelled.",
            _absence("prefect.flow-run.Pending", begun, settings.pending_within_seconds, RANGE),
            _set("Cancelling", late),
        ),
        _automation(
            "parent not started",
            "A parent that a worker took and never started is set to Crashed.",
            _absence("prefect.flow-run.Pending", begun, settings.pending_within_seconds, PARENTS),
            _set("Crashed", late),
        ),
        *(_restart(flow, settings.parent_generations) for flow in PARENTS),
    ]


def apply(client: SyncPrefectClient, automations: Sequence[dict[str, Any]]) -> list[str]:
    """Make the server have exactly these of ours, by name. Returns the names that were written or deleted.

    One that somebody switched off stays off.
    """
    from prefect.events.schemas.automations import AutomationCore

    changed = []
    ours: dict[str, list[Any]] = {}
    for found in client.read_automations():
        if found.name.startswith(PREFIX):
            ours.setdefault(found.name, []).append(found)
    for document in automations:
        mine = AutomationCore.model_validate(document)
        same = ours.pop(mine.name, [])
        if not same:
            client.create_automation(mine)
            changed.append(mine.name)
            continue
        mine.enabled = same[0].enabled
        if AutomationCore.model_validate(same[0].model_dump()) != mine:
            client.update_automation(same[0].id, mine)
            changed.append(mine.name)
        ours[f"{mine.name} (twice)"] = same[1:]
    for left in (automation for group in ours.values() for automation in group):
        client.delete_automation(left.id)
        changed.append(left.name)
    return changed


def _automation(name: str, description: str, trigger: dict[str, Any], action: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": PREFIX + name,
        "description": description,
        "enabled": True,
        "tags": [TAG],
        "trigger": trigger,
        "actions": [action],
    }


def _absence(after: str, expect: set[str], seconds: float, flows: Sequence[str] = ()) -> dict[str, Any]:
    """Fires for each flow run that has shown `after`, and then none of `expect` for so long."""
    return {
        "type": "event",
        "posture": "Proactive",
        "match": {"prefect.resource.id": "prefect.flow-run.*"},
        "match_related": _of(flows) if flows else [],
        "after": [after],
        "expect": sorted(expect),
        "for_each": ["prefect.resource.id"],
        "threshold": 1,
        "within": seconds,
    }


def _restart(flow: str, most: int) -> dict[str, Any]:
    """Beyond `most` the flow itself refuses, and says so. One that cannot even be imported never gets there: for
    it a template that cannot be rendered ends the chain.
    """
    templates = {
        name: f"{{{{ flow_run.parameters.{name} | default({default}) }}}}" for name, default in COPIED[flow].items()
    }
    generation = "(flow_run.parameters.generation | default(0))"
    templates["generation"] = f"{{{{ ({generation} + 1 if {generation} <= {most} else 1 // 0) }}}}"
    return _automation(
        f"{flow} crashed",
        "A crashed parent is started again. It attaches to the ranges that are alive.",
        {
            "type": "event",
            "posture": "Reactive",
            "match": {"prefect.resource.id": "prefect.flow-run.*"},
            "match_related": _of((flow,)),
            "after": [],
            "expect": _events("Crashed"),
            "for_each": ["prefect.resource.id"],
            "threshold": 1,
            "within": 0.0,
        },
        {
            "type": "run-deployment",
            "source": "inferred",
            "parameters": templates,
            "schedule_after": AGAIN_SECONDS,
        },
    )


def _set(state: str, reason: str) -> dict[str, Any]:
    """Cancelling is what `cancel-flow-run` sets, too, but without a reason that people could read."""
    return {"type": "change-flow-run-state", "name": state, "state": state.upper(), "message": reason}


def _of(flows: Sequence[str]) -> list[dict[str, Any]]:
    """Flow runs of these flows that are ours: a server may have other people's flows of the same name."""
    return [
        {"prefect.resource.role": "flow", "prefect.resource.name": list(flows)},
        {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{TAG}"},
    ]


def _events(*states: str) -> list[str]:
    return [f"prefect.flow-run.{state}" for state in states]


def main() -> None:
    """Apply what standard input says to the server of the environment; a process of its own, see `infra.deploy`."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        sys.stdout.write(json.dumps(apply(client, json.load(sys.stdin))))


if __name__ == "__main__":
    main()
