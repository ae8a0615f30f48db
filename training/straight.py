"""The whole of a training, never disturbed: what a drill compares with.

`python -m training.straight` reads one JSON line (config, data_folder, store_url, run, segments) and answers
with one.

The sums of gradients depend on the number of ranks. Where that has changed, `segments` tells which number made
which steps. The straight run makes the same: it saves at the last step of each segment, and goes on with the next
number.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from training.checkpoint.history import head_ref, read_committed
from training.checkpoint.store import open_store
from training.checkpoint.token import claim, mark_run
from training.config import JobConfig, parse_config
from training.errors import Preempted, RetomaError
from training.guard import die_with_parent
from training.ports import Done, Failed, RangeSpec, decode_message

DRILLED = "training.jobs.drilled:Drilled"


class Segment(NamedTuple):
    """Steps of a training that as many ranks have made.

    Attributes:
        ranks: how many.
        step: the last one of them, counted from the begin of the training.
    """

    ranks: int
    step: int


class Whole(NamedTuple):
    """One training, from its begin to its end."""

    config: JobConfig
    store_url: str
    run: str
    folder: str | None


def main() -> None:
    """Read the question, train, answer."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in a training process
    sys.path.insert(0, str(Path.cwd()))
    die_with_parent()
    question: dict[str, Any] = json.loads(sys.stdin.readline())
    config = parse_config(question["config"])
    whole = Whole(config, question["store_url"], question["run"], question["data_folder"])
    segments = [Segment(*segment) for segment in question.get("segments", ())]
    done = replay(whole, segments) if segments else train(whole)
    print(json.dumps({"state_digest": done.state_digest, "step": done.position.step}), flush=True)  # noqa: T201


def train(whole: Whole) -> Done:
    """With the same number of ranks all the time."""
    if whole.config.parallel.world > 1:
        return _finished(whole, on_one_node(whole.config, whole.config.parallel.world))
    from training.session import train_range

    folder = Path(whole.folder) if whole.folder else None
    return train_range(whole.config, whole.store_url, whole.run, data_folder=folder)


def replay(whole: Whole, segments: list[Segment]) -> Done:
    """With the numbers of ranks of another training. `store_url` is a folder.

    Raises:
        RetomaError: a segment did not end where it should.
    """
    folder = Path(f"{whole.store_url}-replay")  # the same for all segments: it is a part of the run's identity
    leave, begun = folder / "orders" / "leave", 0
    leave.parent.mkdir(parents=True, exist_ok=True)
    params = {"job": whole.config.job, "params": whole.config.params, "folder": str(folder)}
    drilled = whole.config.model_copy(update={"job": DRILLED, "params": params})
    for ranks, step in segments[:-1]:
        leave.write_text(str(step - begun))
        last = _train_group(whole, on_one_node(drilled, ranks))
        if not (isinstance(last, Failed) and last.error == Preempted.__name__):
            raise RetomaError(f"the replay with {ranks} ranks did not leave at step {step}: {last}")
        if (begun := _head_step(whole)) != step:
            raise RetomaError(f"the replay with {ranks} ranks left at step {begun} instead of {step}")
    leave.unlink(missing_ok=True)
    return _finished(whole, on_one_node(drilled, segments[-1].ranks))


def on_one_node(config: JobConfig, ranks: int) -> JobConfig:
    """The same training with so many ranks, all of them here."""
    parallel = config.parallel.on(ranks // config.parallel.ranks_per_node)
    values = {**parallel.model_dump(), "nodes": 1, "min_nodes": None}
    return config.model_copy(update={"parallel": type(parallel).model_validate(values)})


def _head_step(whole: Whole) -> int:
    store = open_store(whole.store_url)
    head = head_ref(store)
    return read_committed(store, head.token, head.sequence).manifest.position.step if head else 0


def _finished(whole: Whole, config: JobConfig) -> Done:
    """Train to the end. Raises what it failed with."""
    last = _train_group(whole, config)
    if isinstance(last, Failed):
        raise last.exception()
    return last


def _train_group(whole: Whole, config: JobConfig) -> Done | Failed:
    """By a launcher, as in a range, from the newest checkpoint. Returns its last word."""
    store = open_store(whole.store_url)
    mark_run(store, whole.run)
    spec = RangeSpec(
        run=whole.run,
        start=0,
        stop=config.epochs,
        token=claim(store, whole.run, {}),
        store_url=whole.store_url,
        config=config,
        data_folder=whole.folder,
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
    group.stdin.close()
    if not isinstance(last, Done | Failed):
        raise RetomaError(f"the straight group ended with exit code {group.returncode} and without a word")
    return last


if __name__ == "__main__":
    main()
