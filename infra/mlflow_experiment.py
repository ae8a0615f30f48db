"""The experiment of MLflow in which all runs of this project lie."""

from __future__ import annotations

from infra.mlflow_connection import Conflict, Connection
from training.errors import Invalid


class Experiment:
    """One experiment, found by name and created on first use."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        self._name = name
        self._id: str | None = None

    def id(self) -> str:
        """Its id. Raises `Invalid` if somebody has deleted it: MLflow keeps the name taken."""
        if self._id is None:
            self._id = self._find() or self._create()
        return self._id

    def _find(self) -> str | None:
        with self._connection.asking(f"looking for experiment {self._name}") as client:
            found = client.get_experiment_by_name(self._name)
        if found is None:
            return None
        if found.lifecycle_stage != "active":
            raise Invalid(
                f"MLflow experiment {self._name!r} was deleted",
                hint=f"mlflow experiments restore -x {found.experiment_id}, or set RETOMA_MLFLOW_EXPERIMENT",
            )
        return str(found.experiment_id)

    def _create(self) -> str:
        # the kind opens the page in model training mode instead of an empty GenAI one
        tags = {"mlflow.experimentKind": "custom_model_development"}
        try:
            with self._connection.asking(f"creating experiment {self._name}") as client:
                return str(client.create_experiment(self._name, tags=tags))
        except Conflict:
            found = self._find()
            if found is None:
                raise
            return found
