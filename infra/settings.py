"""Where everything is: folders, servers, time limits. One variable `RETOMA_<FIELD>` for each field.

Unset server URLs mean the local stack, whose ports `retoma up` writes to `<state_dir>/stack.json`.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from infra.beat import SEND_SECONDS
from training.config import Frozen
from training.errors import Invalid, Unavailable

PREFIX = "RETOMA_"
LOOPBACK = "127.0.0.1"
CHECKPOINT_SCHEMES = ("file", "s3", "memory")
BEATS_PER_WINDOW = 3  # one that is lost or late is no verdict
HEARTBEATS_PER_WINDOW = 2.5
_PASSWORD = re.compile(r"//[^/@\s]*@")

# Each tool has its own switch, and MLflow obeys DO_NOT_TRACK only when it is spelt `true`.
TELEMETRY_OFF: Mapping[str, str] = {
    "DO_NOT_TRACK": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DVC_NO_ANALYTICS": "1",
}


class StackPorts(Frozen):
    """The loopback ports of the local stack, kept in `stack.json` so that links stay valid."""

    prefect: int
    mlflow: int

    @property
    def prefect_api_url(self) -> str:
        """URL of the local Prefect API."""
        return f"http://{LOOPBACK}:{self.prefect}/api"

    @property
    def mlflow_url(self) -> str:
        """URL of the local MLflow server."""
        return f"http://{LOOPBACK}:{self.mlflow}"


class Settings(BaseSettings):
    """All that differs between a laptop and a cluster. Build it with `load_settings()`."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", hide_input_in_errors=True)

    home: Path = Field(default_factory=lambda: find_home(Path.cwd()), description="the project's root")
    state_dir: Path = Field(
        default_factory=lambda data: data["home"] / ".retoma",
        description="data, logs and pid files of the local stack",
    )
    checkpoints_url: str = Field(
        default_factory=lambda data: str(data["state_dir"] / "checkpoints"),
        validate_default=True,
        description="parent of all run stores: a folder, file://... or s3://...",
    )
    prefect_api_url: str | None = Field(None, description="a Prefect server elsewhere; else the local one")
    mlflow_url: str | None = Field(None, description="an MLflow server elsewhere; else the local one")
    s3_endpoint_url: str | None = Field(None, description="an S3 server that is not AWS; else AWS's own settings")
    s3_region: str | None = Field(None, pattern=r"^[a-z0-9\-]+$", description="else AWS's own settings")
    mlflow_experiment: str = Field("retoma", min_length=1)
    cpu_limit: int = Field(4, ge=1, description="flow runs at once on the local `cpu` worker")
    gpu_limit: int = Field(1, ge=1, description="flow runs at once on the local `gpu` worker")
    start_timeout_seconds: float = Field(120.0, gt=0, description="a local server must be ready by then")
    stop_grace_seconds: float = Field(  # a training has 20 to commit its step, `supervisor.grace_seconds`
        25.0, ge=0, description="from SIGTERM to SIGKILL in `retoma down`"
    )
    mlflow_timeout_seconds: int = Field(10, ge=1, description="one request to MLflow; retried once")
    server_restart_seconds: float = Field(
        10.0, ge=0, description="without a Prefect server for so long, nobody is declared dead"
    )
    progress_within_seconds: float = Field(
        15.0, ge=10, description="a range without progress for so long is cancelled and tried again"
    )
    heartbeat_seconds: int = Field(30, ge=30, description="between two of Prefect's own heartbeats of a flow run")
    heartbeat_within_seconds: float = Field(
        75.0, ge=10, description="a flow run without Prefect's own heartbeat for so long is given up"
    )
    pending_within_seconds: float = Field(
        60.0, ge=10, description="a flow run must start so soon after a worker has taken it"
    )
    parent_generations: int = Field(20, ge=0, description="how often a crashed `train` is started again by itself")
    node_address: str = Field(
        "127.0.0.1", min_length=1, description="where other nodes of a group reach this one; here: nobody else"
    )
    preemption_notice_file: Path | None = Field(
        None, description="when this file appears, the machine is about to go: save and leave"
    )

    @field_validator("home", "state_dir", "preemption_notice_file")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        return path.expanduser().absolute() if path else None

    @field_validator("checkpoints_url")
    @classmethod
    def _plain_or_remote(cls, url: str) -> str:
        scheme = urlsplit(url).scheme if "://" in url else ""
        if scheme and scheme not in CHECKPOINT_SCHEMES:
            raise ValueError(f"scheme {scheme!r} is none of {', '.join(CHECKPOINT_SCHEMES)}")
        if "@" in urlsplit(url).netloc:
            raise ValueError("credentials come from AWS's provider chain, never from a URL")
        if scheme == "file":
            return unquote(urlsplit(url).path)
        return url.rstrip("/") if scheme else str(Path(url).expanduser().absolute())

    @field_validator("prefect_api_url", "mlflow_url", "s3_endpoint_url")
    @classmethod
    def _http(cls, url: str | None) -> str | None:
        if url is None:
            return None
        if urlsplit(url).scheme not in ("http", "https"):
            raise ValueError("must start with http:// or https://")
        return url.rstrip("/")

    @field_validator("s3_endpoint_url")
    @classmethod
    def _no_password(cls, url: str | None) -> str | None:
        if url and "@" in urlsplit(url).netloc:
            raise ValueError("credentials come from AWS's provider chain, never from a URL")
        return url

    @model_validator(mode="after")
    def _windows_fit(self) -> Settings:
        """A window that is shorter than what is usual would declare healthy runs dead, again and again."""
        least = {
            f"{BEATS_PER_WINDOW} beats": ("progress_within_seconds", BEATS_PER_WINDOW * SEND_SECONDS),
            "server_restart_seconds and a beat": (
                "progress_within_seconds",
                self.server_restart_seconds + SEND_SECONDS,
            ),
            f"{HEARTBEATS_PER_WINDOW:g} times heartbeat_seconds": (
                "heartbeat_within_seconds",
                HEARTBEATS_PER_WINDOW * self.heartbeat_seconds,
            ),
            "server_restart_seconds": ("pending_within_seconds", self.server_restart_seconds),
        }
        for what, (name, seconds) in least.items():
            if getattr(self, name) < seconds:
                raise ValueError(f"{PREFIX}{name.upper()} must be at least {what}, {seconds:g} s")
        return self

    @property
    def stack_file(self) -> Path:
        """File that remembers the local stack's ports."""
        return self.state_dir / "stack.json"

    def ports(self) -> StackPorts | None:
        """Ports of the local stack, or None when there was never one here."""
        try:
            return StackPorts.model_validate(json.loads(self.stack_file.read_text()))
        except (FileNotFoundError, ValueError):
            return None

    def prefect_url(self) -> str:
        """URL of the Prefect API in use, ending in `/api`.

        Raises:
            Unavailable: no URL is set and no local stack was ever started.
        """
        return self.prefect_api_url or self._local("RETOMA_PREFECT_API_URL").prefect_api_url

    def tracking_url(self) -> str:
        """URL of the MLflow server in use.

        Raises:
            Unavailable: no URL is set and no local stack was ever started.
        """
        return self.mlflow_url or self._local("RETOMA_MLFLOW_URL").mlflow_url

    def run_url(self, run: str) -> str:
        """Store root of one run: below `checkpoints_url`."""
        return f"{self.checkpoints_url}/{run}"

    def variables(self) -> dict[str, str]:
        """What every process that uses Prefect, MLflow, DVC or an S3 store needs in its environment.

        Raises:
            Unavailable: a server's URL is not known yet.
        """
        return {
            **TELEMETRY_OFF,
            "RETOMA_HOME": str(self.home),
            "RETOMA_STATE_DIR": str(self.state_dir),
            "RETOMA_CHECKPOINTS_URL": self.checkpoints_url,
            # a home of its own: profiles and caches in ~/.prefect neither change nor are changed
            "PREFECT_HOME": str(self.state_dir / "prefect"),
            "PREFECT_API_URL": self.prefect_url(),
            "MLFLOW_TRACKING_URI": self.tracking_url(),
            # the default waits 246 s for a server that is away
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
            "MLFLOW_HTTP_REQUEST_TIMEOUT": str(self.mlflow_timeout_seconds),
            "RETOMA_PARENT_GENERATIONS": str(self.parent_generations),
            **({"RETOMA_PREEMPTION_NOTICE_FILE": str(notice)} if (notice := self.preemption_notice_file) else {}),
            **self.s3_variables(),
        }

    def s3_variables(self) -> dict[str, str]:
        """Ours for ourselves, AWS's for every client of S3. Credentials are AWS's matter alone."""
        found: dict[str, str] = {}
        if self.s3_endpoint_url:
            found |= dict.fromkeys(("RETOMA_S3_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"), self.s3_endpoint_url)
        if self.s3_region:  # boto3 reads the last of these names, other clients the one before
            found |= dict.fromkeys(("RETOMA_S3_REGION", "AWS_REGION", "AWS_DEFAULT_REGION"), self.s3_region)
        return found

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """Whole environment of a child process: `base` (default: ours) with `variables()` on top.

        Variables of Prefect and MLflow from the user's shell are dropped where the local stack is used,
        since they would point it at someone else's server or database.
        """
        foreign = [] if self.prefect_api_url else ["PREFECT_"]
        foreign += [] if self.mlflow_url else ["MLFLOW_"]
        kept = {
            name: value
            for name, value in (os.environ if base is None else base).items()
            if not name.startswith(tuple(foreign)) or name.startswith("PREFECT_LOGGING_")
        }
        return {**kept, **self.variables()}

    def export(self) -> None:
        """Put `variables()` into our own environment. Call it before Prefect or MLflow is imported."""
        os.environ.update(self.variables())
        self.make_state_dir()

    def make_state_dir(self) -> None:
        """Prefect makes its home, but not the folder above it, and would warn at each start."""
        self.state_dir.mkdir(parents=True, exist_ok=True)

    def _local(self, variable: str) -> StackPorts:
        ports = self.ports()
        if ports is None:
            raise Unavailable(
                f"no local stack in {self.state_dir}",
                hint=f"start one with `retoma up`, or set {variable}",
            )
        return ports


def find_home(start: Path) -> Path:
    """Nearest folder from `start` upwards with this project's pyproject.toml, else the installed one.

    Raises:
        Invalid: neither exists.
    """
    installed = Path(__file__).resolve().parent.parent
    for folder in (start, *start.parents, installed):
        if _is_home(folder):
            return folder
    raise Invalid(
        f"no retoma project in {start} or above",
        hint="change to the project's root, or set RETOMA_HOME",
    )


def load_settings() -> Settings:
    """Settings from the environment.

    Raises:
        Invalid: a RETOMA_ variable is unknown (names the nearest) or its value is wrong.
    """
    _refuse_unknown(os.environ)
    try:
        return Settings()
    except ValidationError as error:
        raise Invalid("; ".join(_explain(problem) for problem in error.errors(include_url=False))) from error


def _is_home(folder: Path) -> bool:
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text()).get("project", {})
    except (OSError, tomllib.TOMLDecodeError):
        return False
    return bool(project.get("name") == "retoma")


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    known = sorted(f"{PREFIX}{name.upper()}" for name in Settings.model_fields)
    for name in sorted(environ):
        if name.upper().startswith(PREFIX) and name.upper() not in known:
            near = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.0)[0]
            raise Invalid(f"unknown variable {name}; did you mean {near}?", hint=f"known: {', '.join(known)}")


def _explain(problem: Any) -> str:
    if not problem["loc"]:  # of several fields together: the message names them
        return str(problem["msg"]).removeprefix("Value error, ")
    name = PREFIX + "_".join(str(part) for part in problem["loc"]).upper()
    return f"{name}: {problem['msg']}, got {_PASSWORD.sub('//***@', repr(problem['input']))}"
