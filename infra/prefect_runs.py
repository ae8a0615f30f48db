"""Questions to the Prefect server about our flow runs, patient with a server that restarts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from uuid import UUID

import tenacity
from pydantic import Field

from infra.automations import SUPERSEDED
from infra.beat import Progress, artifact_key, short_client
from infra.facts import from_metadata
from training.config import Frozen
from training.errors import Invalid, Unavailable

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

PATIENCE_SECONDS = 1800.0
LIVE = ("SCHEDULED", "PENDING", "RUNNING", "PAUSED", "CANCELLING")
LIMIT = 200  # the server's own page limit
T = TypeVar("T")
logger = logging.getLogger(__name__)


class FlowRunInfo(Frozen):
    """What we look at in a flow run."""

    id: str
    name: str
    state: str  # Prefect's state type, for example RUNNING
    state_name: str = ""  # what the site shows, for example Late
    message: str = ""
    tags: tuple[str, ...] = ()
    parameters: dict[str, Any] = Field(default_factory=dict)
    created: datetime | None = None

    @property
    def live(self) -> bool:
        """Whether the run may still change by itself."""
        return self.state in LIVE


class PrefectRuns:
    """Reads and starts flow runs. For one thread. Keeps its connection: opening one costs 30 ms of a core.

    Args:
        patience_seconds: how long a server may be away before `Unavailable` is raised.
        connect: opens a client; by default to the server of the environment, with short timeouts.
    """

    def __init__(
        self,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
        connect: Callable[[], SyncPrefectClient] | None = None,
    ) -> None:
        self._patience_seconds = patience_seconds
        self._connect = connect or short_client
        self._client: SyncPrefectClient | None = None

    def __enter__(self) -> PrefectRuns:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the next question opens another."""
        client, self._client = self._client, None
        if client is not None:
            client.__exit__(None, None, None)

    def find_by_key(self, keys: Iterable[str]) -> dict[str, FlowRunInfo]:
        """Flow runs by idempotency key, those that exist."""
        from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterIdempotencyKey

        wanted = FlowRunFilter(idempotency_key=FlowRunFilterIdempotencyKey(any_=list(keys)))
        found = self._ask(lambda client: client.read_flow_runs(flow_run_filter=wanted, limit=LIMIT))
        return {run.idempotency_key: _info(run) for run in found if run.idempotency_key}

    def read(self, flow_run_id: str) -> FlowRunInfo:
        """One flow run as it is now."""
        return _info(self._ask(lambda client: client.read_flow_run(UUID(flow_run_id))))

    def newest_of(self, flows: Iterable[str]) -> list[FlowRunInfo]:
        """The newest flow runs of some flows, whatever their state, newest first."""
        from prefect.client.schemas import filters, sorting

        wanted = filters.FlowFilter(name=filters.FlowFilterName(any_=list(flows)))
        order = sorting.FlowRunSort.EXPECTED_START_TIME_DESC
        return [
            _info(run)
            for run in self._ask(lambda client: client.read_flow_runs(flow_filter=wanted, sort=order, limit=LIMIT))
        ]

    def live_with_tag(self, tag: str) -> list[FlowRunInfo]:
        """Flow runs with a tag that are not over, newest first."""
        from prefect.client.schemas import filters, sorting
        from prefect.client.schemas.objects import StateType

        wanted = filters.FlowRunFilter(
            tags=filters.FlowRunFilterTags(all_=[tag]),
            state=filters.FlowRunFilterState(
                type=filters.FlowRunFilterStateType(any_=[StateType(name) for name in LIVE])
            ),
        )
        order = sorting.FlowRunSort.START_TIME_DESC
        found = self._ask(lambda client: client.read_flow_runs(flow_run_filter=wanted, sort=order, limit=LIMIT))
        return [_info(run) for run in found]

    def start(
        self,
        deployment: str,
        parameters: dict[str, Any],
        *,
        name: str,
        key: str | None = None,
        tags: Iterable[str] = (),
    ) -> FlowRunInfo:
        """Create a flow run of a deployment, or find the one that has the same key. Does not wait for it.

        Raises:
            Invalid: there is no such deployment.
            Unavailable: the server does not answer.
        """
        from prefect.deployments import run_deployment
        from prefect.exceptions import ObjectNotFound

        def create(_: SyncPrefectClient) -> Any:
            return run_deployment(
                deployment,
                parameters=parameters,
                timeout=0,
                flow_run_name=name,
                idempotency_key=key,
                tags=list(tags),
            )

        try:
            return _info(self._ask(create))
        except ObjectNotFound as error:
            raise Invalid(f"no deployment {deployment!r} on the Prefect server", hint="retoma deploy") from error

    def supersede(self, flow_run_id: str, message: str) -> None:
        """Set a flow run to Crashed whose process is gone, and which the caller replaces. It kills nothing.

        The state has a name of its own, so that the automation on crashes does not replace it, too.
        """
        from prefect.states import Crashed

        state: Any = Crashed(name=SUPERSEDED, message=message)
        self._ask(lambda client: client.set_flow_run_state(UUID(flow_run_id), state, force=True))

    def cancel(self, flow_run_id: str) -> None:
        """Ask for a flow run to be cancelled; nothing happens to one that is over."""
        from prefect.states import Cancelling

        state: Any = Cancelling(message="the run was cancelled")
        self._ask(lambda client: client.set_flow_run_state(UUID(flow_run_id), state))

    def label(self, flow_run_id: str, *, name: str, parameters: dict[str, Any], tags: Iterable[str]) -> None:
        """Name a flow run and add parameters and tags to it, so that others find it by them."""
        found = self.read(flow_run_id)
        merged, all_tags = {**found.parameters, **parameters}, sorted({*found.tags, *tags})
        if (found.name, found.parameters, sorted(found.tags)) != (name, merged, all_tags):
            self._ask(
                lambda client: client.update_flow_run(
                    UUID(flow_run_id), name=name, parameters=merged, tags=all_tags
                )
            )

    def progress(self, run: str) -> Progress | None:
        """What the newest attempt of a run reported last."""
        return from_metadata(Progress, self.latest_metadata(artifact_key(run)))

    def latest_metadata(self, key: str) -> dict[str, str]:
        """Metadata of the newest artifact with a key; empty if there is none."""
        from prefect.client.schemas import filters, sorting

        wanted = filters.ArtifactFilter(key=filters.ArtifactFilterKey(any_=[key]))
        found = self._ask(
            lambda client: client.read_artifacts(
                artifact_filter=wanted, sort=sorting.ArtifactSort.CREATED_DESC, limit=1
            )
        )
        return dict(found[0].metadata_ or {}) if found else {}

    def put_artifact(
        self,
        key: str,
        kind: Literal["markdown", "table"],
        data: str,
        *,
        flow_run_id: str,
        metadata: dict[str, str] | None = None,
    ) -> None:
        """Create an artifact on a flow run's page: a new version under its key. A table is JSON, a list of rows."""
        from prefect.client.schemas.actions import ArtifactCreate

        made = ArtifactCreate(key=key, type=kind, data=data, metadata_=metadata, flow_run_id=UUID(flow_run_id))
        self._ask(lambda client: client.create_artifact(made))

    def _ask(self, question: Callable[[SyncPrefectClient], T]) -> T:
        """Ask until there is an answer. What is asked must be safe to repeat."""
        import httpx
        from prefect.exceptions import PrefectHTTPStatusError

        def is_passing(error: BaseException) -> bool:
            if isinstance(error, PrefectHTTPStatusError):
                return error.response.status_code >= 500 or error.response.status_code == 429
            # Prefect's client reports a server that does not answer its first question as RuntimeError
            return isinstance(error, httpx.TransportError) or (
                isinstance(error, RuntimeError) and "Failed to reach API" in str(error)
            )

        asking = tenacity.Retrying(
            retry=tenacity.retry_if_exception(is_passing),
            wait=tenacity.wait_random_exponential(multiplier=0.5, max=15),
            stop=tenacity.stop_after_delay(self._patience_seconds),
            before_sleep=tenacity.before_sleep_log(logger, logging.WARNING),
            reraise=False,
        )

        def attempt() -> T:
            if self._client is None:
                self._client = self._connect().__enter__()
            try:
                return question(self._client)
            except Exception:
                self.close()
                raise

        try:
            return asking(attempt)
        except tenacity.RetryError as error:
            raise Unavailable(
                f"the Prefect server did not answer for {self._patience_seconds:g} s: "
                f"{error.last_attempt.exception()}",
                hint="look at `retoma status`; start the same command again when it is back",
            ) from error


def _info(run: FlowRun) -> FlowRunInfo:
    return FlowRunInfo(
        id=str(run.id),
        name=run.name,
        state=run.state.type.value if run.state else "PENDING",
        state_name=(run.state.name or "") if run.state else "",
        message=(run.state.message or "") if run.state else "",
        tags=tuple(run.tags or ()),
        parameters=dict(run.parameters or {}),
        created=run.created,
    )
