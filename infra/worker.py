"""`python -m infra.worker --pool gpu ...`: `prefect worker start`, which lets its flow runs leave in order.

Prefect's own worker answers SIGTERM by SIGKILL to all that it started: nothing is saved, and the runs stay Running
until somebody misses them. Here they get SIGTERM first, and the time that they need to save and to say so.
"""

from __future__ import annotations

import runpy
import signal
import sys
from types import FrameType
from typing import Any

import psutil

from infra.processes import stop

# A training process has 20 s of it; a container or a service that is stopped needs a limit above this.
GRACE_SECONDS = 28.0


def main() -> None:
    """Run the worker with the arguments of this process."""
    from prefect.utilities import processutils

    install = processutils.setup_signal_handlers_worker

    def install_ours(*arguments: Any, **options: Any) -> None:
        install(*arguments, **options)
        _leave_in_order_first(signal.SIGTERM)

    processutils.setup_signal_handlers_worker = install_ours
    sys.argv[1:1] = ["--no-prompt", "worker", "start"]
    runpy.run_module("prefect", run_name="__main__")


def _leave_in_order_first(number: signal.Signals) -> None:
    """Put our handler before the one that is installed."""
    then: Any = signal.getsignal(number)

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # asked once is enough
        # The event loop stands still meanwhile: it takes no new run, and kills none.
        stop(psutil.Process().children(), GRACE_SECONDS)
        then(number, frame)

    signal.signal(number, leave)


if __name__ == "__main__":
    main()
