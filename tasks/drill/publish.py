"""Shows a report where people look: an artifact in Prefect, files of a run in MLflow.

A server that is away fails no drill.
"""

from __future__ import annotations

from pathlib import Path

import httpx

from infra.links import mlflow_link
from infra.mlflow_connection import Connection
from infra.mlflow_experiment import Experiment
from infra.settings import Settings
from tasks.drill.report import Drill, markdown
from training.errors import RetomaError

EXPERIMENT = "retoma-drills"
ARTIFACT_KEY = "drill"
TIMEOUT_SECONDS = 10.0


def publish_to_prefect(settings: Settings, drill: Drill, flow_run_id: str | None) -> str | None:
    """A markdown artifact, on a flow run's page if it is one's. Returns why not, None when it is there."""
    body = {
        "key": ARTIFACT_KEY,
        "type": "markdown",
        "description": "retoma drill",
        "data": markdown(drill),
        "flow_run_id": flow_run_id,
    }
    try:
        url = f"{settings.prefect_url()}/artifacts/"
        httpx.post(url, json=body, timeout=TIMEOUT_SECONDS, trust_env=False).raise_for_status()
    except (RetomaError, httpx.HTTPError) as error:
        return str(error).partition("\n")[0]
    return None


def publish_to_mlflow(settings: Settings, drill: Drill, files: dict[str, Path]) -> tuple[str | None, str | None]:
    """A run of the experiment of drills, with the report as files. Returns its link, or why there is none."""
    try:
        connection = Connection(settings.tracking_url(), settings.mlflow_timeout_seconds)
        experiment = Experiment(connection, EXPERIMENT).id()
        tags = {
            f"retoma.drill.{scenario.replace('+', '/')}": "pass" if all(c.passed for c in checks) else "fail"
            for scenario, checks in drill.checks().items()
        }
        with connection.asking("publishing a drill") as client:
            name = f"drill-{drill.started:%Y%m%d-%H%M%S}"
            run: str = client.create_run(experiment, run_name=name, tags=tags).info.run_id
            for file_name, file in files.items():
                client.log_text(run, file.read_text(), file_name)
            client.set_terminated(run, "FINISHED" if drill.passed else "FAILED")
        return mlflow_link(settings, f"experiments/{experiment}/runs/{run}"), None
    except RetomaError as error:
        return None, error.message
