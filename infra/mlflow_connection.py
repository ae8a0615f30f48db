"""The wire to MLflow: bounded waiting, and MLflow's exceptions as our kinds of error.

MLflow reads its time limits from the environment at each request, so they are set there. Its defaults wait 246 s
for a server that refuses and about 20 minutes for one that accepts and stays mute.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from infra.settings import TELEMETRY_OFF
from training.errors import Invalid, RetomaError, Unavailable

if TYPE_CHECKING:
    from mlflow import MlflowClient

RETRIES = 1  # a kept-alive connection may have been closed by the server: one fresh try
_RETRY_LATER = {"INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "RESOURCE_EXHAUSTED"}
_ALREADY = {"RESOURCE_ALREADY_EXISTS", "BAD_REQUEST"}  # BAD_REQUEST: the database's own unique constraint


class Conflict(Invalid):
    """What we wanted to create is already there. Look again; for the registry's own use."""


class Missing(Invalid):
    """What we asked for is not there. For the registry's own use."""


class Connection:
    """One MLflow server. Building it makes no traffic, and does not import MLflow (1.8 s).

    Args:
        url: address of the tracking server, `http://` or `https://`.
        timeout_seconds: longest silence of one request; a mute server costs twice that, a refusing one nothing.
    """

    def __init__(self, url: str, timeout_seconds: float) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise Invalid(
                f"MLflow address {url!r} must start with http:// or https://", hint="see RETOMA_MLFLOW_URL"
            )
        self.url = url.rstrip("/")
        self.timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._client: MlflowClient | None = None

    @property
    def client(self) -> MlflowClient:
        """MLflow's client, made on first use; usable from several threads."""
        with self._lock:
            if self._client is None:
                self._limit_waiting()
                from mlflow import MlflowClient  # slow, and not needed where MLflow is not used

                self._client = MlflowClient(tracking_uri=self.url, registry_uri=self.url)
            return self._client

    def _limit_waiting(self) -> None:
        seconds = str(max(1, math.ceil(self.timeout_seconds)))
        os.environ.update(TELEMETRY_OFF)
        os.environ.update(
            MLFLOW_HTTP_REQUEST_MAX_RETRIES=str(RETRIES),
            MLFLOW_HTTP_REQUEST_TIMEOUT=seconds,
            MLFLOW_ARTIFACT_UPLOAD_DOWNLOAD_TIMEOUT=seconds,
            MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT="true",  # links without workflowType open an empty page
        )

    @contextlib.contextmanager
    def asking(self, what: str) -> Iterator[MlflowClient]:
        """Translate what goes wrong inside.

        Raises:
            Unavailable: no answer, or the server failed; retry later.
            Missing, Conflict: see there.
            Invalid: the server refused; a person must act.
        """
        from mlflow.exceptions import MlflowException
        from requests.exceptions import RequestException

        client = self.client
        try:
            yield client
        except MlflowException as error:
            raise self._explain(error, what) from error
        except RequestException as error:
            raise self._away(what, error) from error
        except (ValueError, KeyError) as error:  # an answer that is not MLflow's JSON
            if isinstance(error, RetomaError):
                raise
            raise Invalid(
                f"{what}: {self.url} answered, but not as MLflow does: {error!r}",
                hint="check the address: `retoma status`, RETOMA_MLFLOW_URL",
            ) from error

    def _explain(self, error: Exception, what: str) -> RetomaError:
        code = str(getattr(error, "error_code", ""))
        text = " ".join(str(error).split())[:300]
        if code == "RESOURCE_DOES_NOT_EXIST" or ("alias" in text and "not found" in text):
            return Missing(f"{what}: {text}")
        if code == "RESOURCE_ALREADY_EXISTS" or (code in _ALREADY and "IntegrityError" in text):
            return Conflict(f"{what}: {text}")
        if code in _RETRY_LATER:
            return self._away(what, text)
        hint = "`retoma status` shows the server and its log"
        if code in {"PERMISSION_DENIED", "UNAUTHENTICATED"} or "403" in text:
            hint = "start the server with --allowed-hosts naming this host, or check the credentials"
        return Invalid(f"{what}: MLflow at {self.url} refused: {text}", hint=hint)

    def _away(self, what: str, reason: object) -> Unavailable:
        return Unavailable(
            f"{what}: MLflow at {self.url} did not answer: {str(reason)[:300]}",
            hint="training goes on without it; see `retoma status`, or start it with `retoma up`",
        )
