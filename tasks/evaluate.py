"""The final evaluation of a run: its newest checkpoint, in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from tasks.ask import ask
from tasks.plan import Plan
from training.checkpoint.manifest import Ref
from training.config import Frozen

EVALUATE_COMMAND = (sys.executable, "-m", "training.process", "--evaluate")


class Evaluation(Frozen):
    """Metrics of the checkpoint that was evaluated, and the digest of its whole state."""

    metrics: dict[str, float]
    state_digest: str
    checkpoint: Ref


def evaluate(plan: Plan, root: Path) -> Evaluation:
    """Restore the run's newest checkpoint and evaluate it.

    Raises:
        Unavailable: it did not answer in time, or the store does not.
        Invalid, Corrupt: there is no checkpoint, or none that is whole.
    """
    folder = root / plan.data_version.path if plan.data_version else None
    limits = plan.config.supervisor
    answer = ask(
        EVALUATE_COMMAND,
        {
            "config": plan.config.model_dump(mode="json"),
            "data_folder": str(folder) if folder else None,
            "store_url": plan.store_url,
            "run": plan.run,
        },
        timeout_seconds=2 * limits.start_seconds + limits.evaluation_seconds,
        cwd=root,
    )
    return Evaluation.model_validate(answer)
