"""The small GPT whose ranks write down which samples they were given."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar, cast

from torch.utils.data import Dataset

from training.job import Params
from training.jobs.char_gpt import CharGpt, GptParams


class SeenGptParams(GptParams):
    folder: str


class SeenGpt(CharGpt):
    """See the module. A line for each sample: its index."""

    Params: ClassVar[type[Params]] = SeenGptParams

    def train_data(self) -> Dataset[Any]:
        params: Any = self.params
        return _Seen(super().train_data(), Path(params.folder) / str(os.getpid()))


class _Seen(Dataset[Any]):
    def __init__(self, inside: Dataset[Any], file: Path) -> None:
        self._inside, self._file = inside, file

    def __len__(self) -> int:
        return len(cast("Any", self._inside))

    def __getitem__(self, index: int) -> Any:
        with self._file.open("a") as file:
            file.write(f"{index}\n")
        return self._inside[index]
