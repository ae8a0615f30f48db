"""States of a training on disk, and a live state that goes through them: all engines see the same tensors.

A file holds what changed since the state before it: whole tensors, or rows where few of them changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.sequences import State, sequence_named

ROWS, VALUES = "\nrows", "\nvalues"


@dataclass(frozen=True)
class Recording:
    """`count` states of one sequence, `gap_steps` apart."""

    folder: Path
    sequence: str
    gap_steps: int
    first_step: int
    count: int

    def start(self) -> State:
        """The first state, in memory of its own."""
        with safe_open(self.file(0), "pt") as file:
            return {path: file.get_tensor(path).clone() for path in file.keys()}  # noqa: SIM118 - not a dict

    def advance(self, live: State, number: int) -> None:
        """Turn state `number - 1` into state `number`, in place, as a training does."""
        with safe_open(self.file(number), "pt") as file:
            for path in file.keys():  # noqa: SIM118 - not a dict
                if path.endswith(ROWS):
                    name = path.removesuffix(ROWS)
                    live[name].index_copy_(0, file.get_tensor(path), file.get_tensor(name + VALUES))
                elif not path.endswith(VALUES):
                    live[path].copy_(file.get_tensor(path))

    def file(self, number: int) -> Path:
        """Where state `number` is."""
        return self.folder / f"{number:02d}.safetensors"


def record(name: str, smoke: bool, corpus: Path, folder: Path, counts: dict[int, int]) -> list[Recording]:
    """Train, and write `counts[gap]` states for each gap, one gap after the other."""
    sequence = sequence_named(name, smoke)
    training = sequence.build(corpus)
    for _ in range(sequence.warm_up_steps):
        training.step()
    step, found = sequence.warm_up_steps, []
    for gap, count in counts.items():
        recording = Recording(folder / f"{sequence.name}-{gap}", sequence.name, gap, step, count)
        recording.folder.mkdir(parents=True)
        before: State = {}
        for number in range(count):
            for _ in range(gap if number else 0):
                training.step()
                step += 1
            state = sequence.state(training)
            save_file(_changes(before, state), recording.file(number))
            before = {path: value.clone() for path, value in state.items()}
        found.append(recording)
    return found


def _changes(before: State, after: State) -> State:
    changes: State = {}
    for path, value in after.items():
        old = before.get(path)
        if old is None:
            changes[path] = value.contiguous()
        elif not torch.equal(old, value):
            rows = (old != value).flatten(1).any(1).nonzero()[:, 0] if value.dim() > 1 else None
            if rows is not None and 4 * len(rows) < len(value):
                changes[path + ROWS], changes[path + VALUES] = rows, value[rows]
            else:
                changes[path] = value.contiguous()
    return changes
