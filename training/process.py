"""The training process: `python -m training.process`. Told what to do on stdin, tells what it did in JSON lines.

--messages FD   train a range: a RangeSpec line on stdin, messages on FD; stdin stays open as a lifeline
--check         build the job and say how much there is to train
--evaluate      evaluate the run's newest checkpoint
--export        write a checkpoint to a file
--import        save a file as a checkpoint
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from typing import Any

from training.checkpoint.manifest import Position
from training.checkpoint.store import open_store
from training.config import parse_config
from training.errors import Invalid, RetomaError
from training.guard import die_with_parent, watch_lifeline
from training.ports import Failed, Pause, RangeSpec, encode_message
from training.stopping import insist
from training.voice import Voice


def main() -> None:
    """Run one mode and exit with the code of the error's kind."""
    parser = argparse.ArgumentParser(prog="training.process", description=__doc__)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--messages", type=int, metavar="FD")
    for name in _ANSWERS:
        mode.add_argument(f"--{name}", action="store_const", const=name, dest="answer")
    options = parser.parse_args()
    sys.path.insert(0, str(Path.cwd()))  # jobs are importable from the project's root
    # Threads that wait for work must not spin: beside servers on the same cores that made training 4 times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    die_with_parent()
    if options.messages is not None:
        with os.fdopen(options.messages, "wb", buffering=0) as out:
            sys.exit(_guarded(lambda: _train(out), out.write))
    work = _ANSWERS[options.answer]
    sys.exit(_guarded(lambda: _answer(work(json.loads(sys.stdin.readline()))), sys.stdout.buffer.write))


def _train(out: FileIO) -> None:
    with os.fdopen(0, "rb", buffering=0, closefd=False) as stdin:
        spec = RangeSpec.model_validate_json(stdin.readline())
    voice = Voice(out, spec.config.supervisor)
    signal.signal(signal.SIGTERM, voice.on_sigterm)
    insist(voice.request)
    watch_lifeline(0)
    voice.say(Pause(what="starting", allowance_seconds=spec.config.supervisor.start_seconds))
    from training.session import train_spec  # torch, only after the guards are up

    gc.freeze()  # what was imported lives for ever; collecting it stalls training by 300 ms
    train_spec(spec, voice.say, voice.request)


def _check(question: dict[str, Any]) -> dict[str, Any]:
    from training.checkpoint.state.tree import flatten
    from training.trainer import Trainer

    config = parse_config(question["config"])
    trainer = Trainer(config, _folder(question))
    flatten(trainer.state.capture())
    if config.parallel.world > 1:
        from training.parallel.preflight import check_cut

        check_cut(trainer.model, trainer.job, config.parallel)
    return {
        "steps_per_epoch": trainer.schedule.steps_per_epoch,
        "total_steps": trainer.total_steps,
        "samples": trainer.schedule.samples,
        "params": trainer.job.params.model_dump(mode="json"),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
    }


def _evaluate(question: dict[str, Any]) -> dict[str, Any]:
    from training.checkpoint.restore import restore_newest
    from training.state import apply_model
    from training.trainer import Trainer

    restored = restore_newest(open_store(question["store_url"]), question["run"])
    if restored is None:
        raise Invalid(f"run {question['run']} has no checkpoint to evaluate", run=question["run"])
    trainer = Trainer(parse_config(question["config"]), _folder(question))
    apply_model(trainer.model, restored["model"])
    return {
        "metrics": trainer.evaluate(),
        "state_digest": restored.manifest.state_digest,
        "checkpoint": restored.checkpoint.ref.model_dump(),
    }


def _export(question: dict[str, Any]) -> dict[str, Any]:
    from training.checkpoint.adapters.exporting import export_checkpoint

    checkpoint = question.get("checkpoint")
    done = export_checkpoint(
        open_store(question["store_url"]),
        Path(question["target"]),
        checkpoint=(checkpoint[0], checkpoint[1]) if checkpoint else None,
        file_format=question["file_format"],
        force=question["force"],
    )
    return {**asdict(done), "skipped": [skipped.model_dump() for skipped in done.skipped]}


def _import(question: dict[str, Any]) -> dict[str, Any]:
    from training.checkpoint.adapters.importing import import_checkpoint

    position = question.get("position")
    done = import_checkpoint(
        open_store(question["store_url"]),
        Path(question["source"]),
        run=question.get("run"),
        position=Position.model_validate(position) if position else None,
    )
    return asdict(done)


def _folder(question: dict[str, Any]) -> Path | None:
    return Path(question["data_folder"]) if question.get("data_folder") else None


_ANSWERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "check": _check,
    "evaluate": _evaluate,
    "export": _export,
    "import": _import,
}


def _answer(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)  # noqa: T201 - the answer


def _guarded(work: Callable[[], None], write: Callable[[bytes], Any]) -> int:
    """Run, and turn whatever goes wrong into a Failed line and an exit code."""
    try:
        work()
    except RetomaError as error:
        write(encode_message(Failed(error=error.kind, message=error.message, hint=error.hint)))
        print(error, file=sys.stderr, flush=True)  # noqa: T201
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the last line of this process
        traceback.print_exc()
        write(encode_message(Failed(error=type(error).__name__, message=str(error))))
        return 1
    return 0


if __name__ == "__main__":
    main()
