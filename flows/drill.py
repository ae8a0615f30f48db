"""Drills on a staging pool: the same as the command, with the report on the flow run's page.

prefect deployment run drill/cpu -p 'scenarios=["kill-train", "freeze-tree"]'
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from prefect import flow, get_run_logger, runtime
from prefect.states import Completed, Failed

from infra.settings import load_settings


@flow(name="drill")
def drill(
    scenarios: list[str] | None = None,
    job: str | None = None,
    overrides: list[str] | None = None,
    s3: bool = False,
    minutes: float = 2.0,
    mean_seconds: float = 30.0,
    seed: int | None = None,
) -> Any:
    """Break a training on a stack of its own beside this worker; fails when a check does not hold.

    Args:
        scenarios: names, see `retoma drill --list`; default: a quick set.
        job: its YAML file, relative to the project's root; default: a small one that comes with retoma.
        overrides: `key=value` changes of the YAML file.
        s3: on a SeaweedFS server instead of a folder.
        minutes: how long `random` makes faults.
        mean_seconds: mean time between faults of `random`.
        seed: of everything that is random; default: a new one.
    """
    options = ["--minutes", str(minutes), "--mean-seconds", str(mean_seconds)]
    options += ["--flow-run", str(runtime.flow_run.id)]
    options += ["--s3"] if s3 else []
    options += ["--job", job] if job else []
    options += [part for change in overrides or [] for part in ("--set", change)]
    options += ["--seed", str(seed)] if seed is not None else []
    logger, lines = get_run_logger(), []
    # a process of its own: a drill has another Prefect server in its environment
    with subprocess.Popen(
        [sys.executable, "-m", "flows.cli", "drill", *(scenarios or []), *options],
        cwd=load_settings().home,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            for line in process.stdout or ():
                lines.append(line.rstrip())
                logger.info("%s", lines[-1])
        except BaseException:  # this flow is stopped: so is the drill, with its stack
            process.terminate()
            raise
    if process.returncode:
        return Failed(message=f"the drill ended with code {process.returncode}:\n" + "\n".join(lines[-20:]))
    return Completed(message="every check holds")
