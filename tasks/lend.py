"""A node that is lent to a group: its agent as a process, from the verified data to the end of the range."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from tasks.companions import NodeCall
from tasks.data import verify_data
from tasks.relay import Relay

NODE_COMMAND = (sys.executable, "-m", "training.node")
LEAVE_SECONDS = 20.0  # until its group has committed
KILL_SECONDS = 5.0


class Lent:
    """The agent of this node. Use it from the main thread: it does not outlive the thread that starts it.

    Args:
        call: who asks for the node.
        name: by which the launcher knows it: our flow run.
        root: the project's root.
    """

    def __init__(
        self, call: NodeCall, name: str, root: Path, logger: logging.Logger | logging.LoggerAdapter[Any]
    ) -> None:
        self._call, self._name, self._root, self._logger = call, name, root, logger
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Verify the data, start the agent, and wait for its end. Returns its exit code.

        Raises:
            Corrupt, Invalid: the data of this node is not that of the run.
        """
        version, gathering = self._call.order.data_version, self._call.gathering
        folder = verify_data(self._root, version) if version is not None else None
        command = [*NODE_COMMAND, "--join", f"{gathering.host}:{gathering.port}", "--name", self._name]
        command += ["--lease-seconds", str(self._call.lease_seconds)]
        command += ["--data", str(folder)] if folder is not None else []
        self._process = subprocess.Popen(
            command, cwd=self._root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert self._process.stdin is not None  # noqa: S101 - both are pipes
        assert self._process.stdout is not None  # noqa: S101
        threading.Thread(target=self._show, args=(self._process.stdout,), daemon=True).start()
        with suppress(BrokenPipeError):
            self._process.stdin.write(gathering.ticket.encode() + b"\n")
            self._process.stdin.flush()
        try:
            return self._process.wait()
        except Exception:
            self._process.kill()
            raise

    def leave(self) -> None:
        """Have the group commit and go on without this node."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(KILL_SECONDS)

    def _show(self, output: IO[bytes]) -> None:
        relay = Relay(lambda line: self._logger.info("| %s", line))
        for line in output:
            relay.line(line.rstrip(b"\n"))
        relay.close()
