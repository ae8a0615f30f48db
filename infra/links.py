"""Links that open the right page."""

from __future__ import annotations

from infra.settings import Settings


def mlflow_link(settings: Settings, page: str = "experiments") -> str:
    """Link to a page of the MLflow site, for example `experiments/1/runs/<id>`.

    Without the ending a fresh browser opens MLflow in its GenAI mode, on an empty page. It belongs inside
    the part after `#`, which is the site's own route.

    Raises:
        Unavailable: the server's URL is not known.
    """
    return f"{settings.tracking_url()}/#/{page}?workflowType=machine_learning"


def prefect_link(settings: Settings, page: str = "") -> str:
    """Link to a page of the Prefect site, for example `runs/flow-run/<id>`.

    Raises:
        Unavailable: the server's URL is not known.
    """
    return f"{settings.prefect_url().removesuffix('/api')}/{page}".rstrip("/")
