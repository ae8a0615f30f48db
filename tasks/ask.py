"""A question to a process with torch: one JSON line in, one JSON line out, and it ends."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tasks.ending import Ending
from training.errors import Corrupt, RetomaError, Unavailable
from training.ports import Failed, decode_message


def ask(
    command: Sequence[str],
    request: Mapping[str, Any],
    *,
    timeout_seconds: float,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Start a process that reads one JSON line, answers with one JSON line on standard output, and ends.

    Raises:
        RetomaError: what the process failed with.
        Unavailable: it died, or did not answer in time.
        Corrupt: the answer is no JSON object.
    """
    try:
        done = subprocess.run(
            list(command),
            input=(json.dumps(request) + "\n").encode(),
            capture_output=True,
            timeout=timeout_seconds,
            cwd=cwd,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(
            f"{' '.join(command[1:])} did not answer within {timeout_seconds:g} s",
            hint="if it really takes so long, raise the limit in the supervisor section of the job",
        ) from error
    said = done.stderr.decode("utf-8", "replace").splitlines()
    answers = [line for line in done.stdout.splitlines() if line.strip()]
    answer = answers[-1] if answers else b""
    if failure := _failure(answer, done.returncode, said):
        raise failure
    if done.returncode != 0:
        cause = Ending(pid=0, returncode=done.returncode).cause()
        raise Unavailable(f"{' '.join(command[1:])} {cause}:\n" + "\n".join(said[-15:]))
    try:
        value = json.loads(answer)
    except ValueError as error:
        raise Corrupt(f"{' '.join(command[1:])} answered {answer[:200]!r}") from error
    if not isinstance(value, dict):
        raise Corrupt(f"{' '.join(command[1:])} answered {answer[:200]!r}")
    return value


def _failure(answer: bytes, returncode: int, said: list[str]) -> RetomaError | None:
    with suppress(ValidationError):
        message = decode_message(answer)
        if isinstance(message, Failed):
            return Ending(pid=0, returncode=returncode, failed=message, tail=tuple(said[-15:])).error()
    return None
