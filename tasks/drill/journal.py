"""The Prefect server's journal, by plain requests: flow runs of a training, and the states they went through."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import httpx

from infra.automations import TAG
from tasks.drill.recording import StateSeen

TIMEOUT_SECONDS = 10.0
LIMIT = 200


class Journal:
    """Reads what the server keeps about the flow runs of one training."""

    def __init__(self, api_url: str, run: str) -> None:
        self._api_url, self._run = api_url, run

    def flow_runs(self) -> list[dict[str, Any]]:
        """All flow runs of the training, parents and ranges, oldest first.

        By parameter: a parent that an automation has just made has no tag of its training yet.
        """
        wanted = {
            "flow_runs": {"tags": {"all_": [TAG]}},
            "limit": LIMIT,
            "sort": "EXPECTED_START_TIME_DESC",
        }
        found = [run for run in self._ask("POST", "/flow_runs/filter", wanted) if _training(run) == self._run]
        return sorted(found, key=lambda run: str(run["created"]))

    def parents(self) -> list[dict[str, Any]]:
        """Flow runs of the whole training, oldest first: one, unless it was killed."""
        return [run for run in self.flow_runs() if is_parent(run)]

    def states(self) -> list[StateSeen]:
        """Every change of state of each of them, in order of time."""
        found = []
        for run in self.flow_runs():
            for state in self._ask("GET", f"/flow_run_states/?flow_run_id={run['id']}"):
                found.append(
                    StateSeen(
                        flow_run_id=run["id"],
                        name=run["name"],
                        state=state["type"],
                        at=datetime.fromisoformat(state["timestamp"]).timestamp(),
                        message=state["message"] or "",
                        parent=is_parent(run),
                    )
                )
        return sorted(found, key=lambda change: change.at)

    def state(self, flow_run_id: str) -> str:
        """State of a flow run now."""
        return str(self._ask("GET", f"/flow_runs/{flow_run_id}")["state_type"])

    def cancel(self, flow_run_id: str) -> None:
        """Ask for an end."""
        body = {"state": {"type": "CANCELLING", "name": "Cancelling"}, "force": False}
        self._ask("POST", f"/flow_runs/{flow_run_id}/set_state", body)

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        answer = httpx.request(method, self._api_url + path, json=body, timeout=TIMEOUT_SECONDS, trust_env=False)
        answer.raise_for_status()
        return answer.json()


def _training(run: dict[str, Any]) -> str | None:
    parameters = run.get("parameters") or {}
    name = (parameters.get("order") or parameters).get("run")
    return str(name) if name else None


def is_parent(run: dict[str, Any]) -> bool:
    """Whether a flow run is of the whole training, not of a range."""
    return "order" not in (run.get("parameters") or {})
