"""The small GPT that does what the files in its folder say.

slow    holds seconds: so long takes a micro-batch
late    holds a rank and seconds: so much longer takes one on that rank
hang    holds a rank, which hangs
fail    holds a rank, which raises
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from training.job import Params
from training.jobs.char_gpt import CharGpt, GptParams


class SlowGptParams(GptParams):
    folder: str


class SlowGpt(CharGpt):
    """See the module."""

    Params: ClassVar[type[Params]] = SlowGptParams

    def inputs(self, batch: Any) -> Tensor:
        time.sleep(float(self._told("slow") or 0))
        self._obey()
        return super().inputs(batch)

    def stages(self, model: nn.Module, count: int) -> list[nn.Module]:
        stages = super().stages(model, count)
        for stage in stages:
            stage.register_forward_pre_hook(lambda *_: self._obey())  # only the first rank takes inputs
        return stages

    def _obey(self) -> None:
        rank = os.environ.get("RANK", "0")
        late, _, seconds = (self._told("late") or "").partition(" ")
        if late == rank:
            time.sleep(float(seconds))
        if self._told("hang") == rank:
            threading.Event().wait()
        if self._told("fail") == rank:
            raise ValueError("this batch is bad")

    def _told(self, name: str) -> str | None:
        folder: Any = self.params
        file = Path(folder.folder) / name
        return file.read_text() if file.exists() else None
