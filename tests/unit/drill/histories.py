"""Recorded histories to measure, small enough to know what must come out."""

from __future__ import annotations

from typing import Any

from tasks.drill.recording import CommitSeen, Injected, Recording, StateSeen, TokenSeen

START = 1000.0
DIGEST = "xxh3:same"


def steps(first: float, count: int, every: float = 0.1) -> tuple[float, ...]:
    return tuple(first + number * every for number in range(count))


def killed(**changes: Any) -> Recording:
    """A training of 40 steps in 0.1 s each, killed after its 25th, with a checkpoint each ten: five are lost."""
    fields: dict[str, Any] = {
        "scenario": "kill-train",
        "run": "drill",
        "started": START - 10,
        "ended": START + 20,
        "interval_steps": 10,
        "injected": (
            Injected(fault="kill-train", at=START + 3.45, token=1, pid=11, flow_run_id="a", until=START + 7),
        ),
        "tokens": (
            TokenSeen(
                token=1,
                claimed=START,
                sealed=START + 0.9,
                start_step=0,
                flow_run_id="a",
                pid=11,
                ended=START + 3.55,
                ended_kind="Unavailable",
                ended_by="supervisor",
            ),
            TokenSeen(token=2, claimed=START + 4, sealed=START + 6, start_step=20, flow_run_id="a", pid=12),
        ),
        "commits": (
            CommitSeen(token=1, sequence=0, step=10, kind="base", at=START + 2, save_seconds=0.05),
            CommitSeen(token=1, sequence=1, step=20, kind="delta", at=START + 3, save_seconds=0.05),
            CommitSeen(token=2, sequence=2, step=30, kind="delta", at=START + 7.5, save_seconds=0.05),
            CommitSeen(token=2, sequence=3, step=40, kind="delta", at=START + 8.5, save_seconds=0.05),
        ),
        "steps": {11: steps(START + 1, 25), 12: steps(START + 6.5, 20)},
        "states": (
            StateSeen(flow_run_id="p", name="drill", state="RUNNING", at=START - 5, parent=True),
            StateSeen(flow_run_id="a", name="drill-0-1-a1", state="RUNNING", at=START - 1),
            StateSeen(flow_run_id="a", name="drill-0-1-a1", state="COMPLETED", at=START + 9),
            StateSeen(flow_run_id="p", name="drill", state="COMPLETED", at=START + 15, parent=True),
        ),
        "outcome": "COMPLETED",
        "digest": DIGEST,
        "straight_digest": DIGEST,
        "unregistered": (),
    }
    return Recording(**(fields | changes))
