"""Registered models of MLflow: versions that point at a checkpoint in its store, and the aliases that move last."""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from infra.mlflow_connection import Conflict, Connection, Missing
from infra.mlflow_text import TAG_CHARACTERS, cut

LOADER = "training.serving"
CHECKPOINT = "retoma.checkpoint"
_ALIAS_TRIES = 3


class Version(NamedTuple):
    """One version of a registered model. `tags` name its run and checkpoint, and its metrics."""

    name: str
    number: str
    tags: dict[str, str]


class Models:
    """Registered models, their versions and aliases."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def upload_pointer(self, model_id: str, pointer: Mapping[str, Any]) -> None:
        """Make a LoggedModel loadable: an `MLmodel` and `data/pointer.json`, no weights and no code.

        `mlflow.pyfunc.load_model` downloads the whole folder, so the weights stay in the run's store.
        """
        # written by hand: importing mlflow.pyfunc takes seconds, and its warnings
        flavor = {"loader_module": LOADER, "data": "data", "python_version": platform.python_version()}
        model = {"model_id": model_id, "model_uuid": model_id, "flavors": {"python_function": flavor}}
        with tempfile.TemporaryDirectory(prefix="retoma-") as name:
            folder = Path(name)
            (folder / "data").mkdir()
            (folder / "data" / "pointer.json").write_text(json.dumps(dict(pointer), indent=1, sort_keys=True))
            (folder / "MLmodel").write_text(yaml.safe_dump(model))
            with self._connection.asking("uploading a model's pointer") as client:
                client.log_model_artifacts(model_id, str(folder))

    def versions(self, name: str) -> list[Version]:
        """All versions of a model, oldest first; empty if there is no such model."""
        found: list[Version] = []
        page: str | None = None
        with self._connection.asking(f"looking for model {name}") as client:
            while True:
                rows = client.search_model_versions(
                    f"name = '{name}'", max_results=200, order_by=["version_number ASC"], page_token=page
                )
                found.extend(Version(name, str(row.version), dict(row.tags)) for row in rows)
                page = rows.token
                if not page:
                    return sorted(found, key=lambda version: int(version.number))

    def create_version(
        self, name: str, model_id: str, run_id: str, tags: Mapping[str, str], description: str
    ) -> Version:
        """Register a LoggedModel as the next version of a model, which is made if it is new."""
        kept = {key: cut(value, TAG_CHARACTERS) for key, value in tags.items()}
        try:
            with self._connection.asking(f"creating model {name}") as client:
                client.create_registered_model(name)
        except Conflict:
            pass  # it is there: what we want
        with self._connection.asking(f"registering a version of {name}") as client:
            made = client.create_model_version(
                name,
                source=f"models:/{model_id}",
                run_id=run_id,
                tags=kept,
                description=description,
                model_id=model_id,
                await_creation_for=0,  # it is READY when the call returns; waiting only logs
            )
        return Version(name, str(made.version), kept)

    def set_version_tags(self, version: Version, tags: Mapping[str, str]) -> None:
        """Write tags of a version that differ."""
        with self._connection.asking(f"describing version {version.number} of {version.name}") as client:
            for key, value in tags.items():
                if version.tags.get(key) != value:
                    client.set_model_version_tag(version.name, version.number, key, cut(value, TAG_CHARACTERS))

    def with_alias(self, name: str, alias: str) -> Version | None:
        """The version that an alias points at."""
        try:
            with self._connection.asking(f"looking up {name}@{alias}") as client:
                found = client.get_model_version_by_alias(name, alias)
        except Missing:
            return None
        return Version(name, str(found.version), dict(found.tags))

    def set_alias(self, version: Version, alias: str) -> None:
        """Point an alias at a version. The database may refuse one of two that race: tried again."""
        for left in reversed(range(_ALIAS_TRIES)):
            try:
                with self._connection.asking(f"moving {version.name}@{alias}") as client:
                    client.set_registered_model_alias(version.name, alias, version.number)
            except Conflict:
                if not left:
                    raise
            else:
                return
