"""What the Prefect server thinks of the flow run that we are: one question, a short wait, no second try."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from infra.prefect_runs import PrefectRuns
from training.errors import Unavailable

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

DELETED = "DELETED"


class OwnRun:
    """Asks for the state of a flow run. For one thread, the one that enters it.

    Args:
        flow_run_id: the flow run.
        connect: opens a client; by default to the server of the environment, with short timeouts.
    """

    def __init__(self, flow_run_id: str, connect: Callable[[], SyncPrefectClient] | None = None) -> None:
        self._flow_run_id = flow_run_id
        self._runs = PrefectRuns(patience_seconds=0, connect=connect)
        self._stack = ExitStack()

    def __enter__(self) -> OwnRun:
        from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

        # By itself the client would be silent for a minute before it says that there is no answer.
        self._stack.enter_context(temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}))
        self._stack.enter_context(self._runs)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def state(self) -> str:
        """Its state's type, for example RUNNING; `DELETED` where the server does not know it.

        Raises:
            Unavailable: no answer, or none that says it.
        """
        from prefect.exceptions import ObjectNotFound

        try:
            return self._runs.read(self._flow_run_id).state
        except ObjectNotFound:
            return DELETED
        except Unavailable:
            raise
        except Exception as error:
            raise Unavailable(f"the Prefect server does not tell the flow run's state: {error}") from error
