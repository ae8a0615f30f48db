"""The whole of a training, never interrupted: what a drill compares with.

`python -m training.straight` reads one JSON line (config, data_folder, store_url, run) and answers with one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from training.checkpoint.store import open_store
from training.checkpoint.token import claim, mark_run
from training.config import JobConfig, parse_config
from training.errors import RetomaError
from training.guard import die_with_parent
from training.ports import Done, Failed, RangeSpec, decode_message


def main() -> None:
    """Read the question, train, answer."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in a training process
    sys.path.insert(0, str(Path.cwd()))
    die_with_parent()
    question: dict[str, Any] = json.loads(sys.stdin.readline())
    config = parse_config(question["config"])
    train = _train if config.parallel.world == 1 else _train_group
    done = train(config, question["store_url"], question["run"], question["data_folder"])
    print(json.dumps({"state_digest": done.state_digest, "step": done.position.step}), flush=True)  # noqa: T201


def _train(config: JobConfig, store_url: str, run: str, folder: str | None) -> Done:
    from training.session import train_range

    return train_range(config, store_url, run, data_folder=Path(folder) if folder else None)


def _train_group(config: JobConfig, store_url: str, run: str, folder: str | None) -> Done:
    """By a launcher, as in a range. Raises what it failed with."""
    store = open_store(store_url)
    mark_run(store, run)
    spec = RangeSpec(
        run=run,
        start=0,
        stop=config.epochs,
        token=claim(store, run, {}),
        store_url=store_url,
        config=config,
        data_folder=folder,
    )
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "training.group", "--messages", str(writing)]
    group = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr, pass_fds=[writing])
    os.close(writing)
    assert group.stdin is not None  # noqa: S101 - it is a pipe
    group.stdin.write(spec.model_dump_json().encode() + b"\n")
    group.stdin.flush()
    last: Any = None
    with os.fdopen(reading, "rb") as messages:
        for line in messages:
            last = decode_message(line)
    group.wait()
    if isinstance(last, Failed):
        raise last.exception()
    if not isinstance(last, Done):
        raise RetomaError(f"the straight group ended with exit code {group.returncode} and without a word")
    return last


if __name__ == "__main__":
    main()
