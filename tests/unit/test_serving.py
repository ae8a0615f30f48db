"""Loading a registered checkpoint from its store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from training.checkpoint.checkpointer import IncrementalCheckpointer
from training.checkpoint.manifest import Position
from training.checkpoint.store import LocalStore
from training.errors import Corrupt, Invalid
from training.job import Job, Params
from training.serving import ServedModel, _load_pyfunc
from training.state import model_state


class LineParams(Params):
    width: int = 3


class LineJob(Job[LineParams]):
    """Batch normalisation and dropout: training mode would show."""

    Params = LineParams

    def model(self) -> nn.Module:
        width = self.params.width
        return nn.Sequential(nn.Linear(width, 4), nn.BatchNorm1d(4), nn.Dropout(0.9), nn.Linear(4, 2))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1)

    def train_data(self) -> Any:
        return [torch.zeros(self.params.width)]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return torch.as_tensor(model(batch)).mean()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {}


JOB = f"{__name__}:LineJob"


def saved_run(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """A base and a delta of a model; the model as of the delta, and the pointer to it."""
    torch.manual_seed(3)
    model = LineJob(LineParams(), None).model()
    store = LocalStore(folder / "store")
    with IncrementalCheckpointer(store, run="run-1") as checkpointer:
        checkpointer.restore()
        for step in (1, 2):
            model.train()
            model(torch.randn(8, 3))
            checkpointer.save({"model": model_state(model)}, position=Position(step=step))
        checkpointer.wait()
        head = checkpointer.head
    assert head is not None
    pointer = {
        "store_url": store.url,
        "run": "run-1",
        "token": head.ref.token,
        "sequence": head.ref.sequence,
        "digest": head.ref.digest,
        "job": JOB,
        "params": {"width": 3},
    }
    return model.eval(), pointer


def load(folder: Path, pointer: dict[str, Any]) -> ServedModel:
    data = folder / "data"
    data.mkdir(exist_ok=True)
    (data / "pointer.json").write_text(json.dumps(pointer))
    return _load_pyfunc(str(data))


def test_predictions_equal_those_of_the_trained_model_in_eval_mode(tmp_path: Path) -> None:
    model, pointer = saved_run(tmp_path)
    served = load(tmp_path, pointer)
    numbers = np.random.default_rng(1).random((5, 3))
    with torch.no_grad():
        expected = model(torch.from_numpy(numbers.astype(np.float32))).numpy()
    np.testing.assert_array_equal(served.predict(numbers), expected)
    np.testing.assert_array_equal(served.predict(pd.DataFrame(numbers), params={}), expected)
    np.testing.assert_array_equal(served.predict(numbers.tolist()), expected)
    assert isinstance(served.predict(numbers), np.ndarray)


def test_loading_writes_nothing_and_fences_nobody(tmp_path: Path) -> None:
    _, pointer = saved_run(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*")}
    load(tmp_path, pointer)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*")} == before


def test_another_checkpoint_under_the_same_name_is_refused(tmp_path: Path) -> None:
    _, pointer = saved_run(tmp_path)
    with pytest.raises(Corrupt, match="registered checkpoint has digest"):
        load(tmp_path, {**pointer, "digest": "xxh3_128:" + "0" * 32})


def test_a_damaged_pack_is_refused(tmp_path: Path) -> None:
    _, pointer = saved_run(tmp_path)
    pack = max((tmp_path / "store" / "packs").rglob("*.pack"), key=lambda path: path.stat().st_size)
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    with pytest.raises(Corrupt):
        load(tmp_path, pointer)


def test_another_model_than_the_saved_one_is_refused(tmp_path: Path) -> None:
    _, pointer = saved_run(tmp_path)
    with pytest.raises(Invalid):
        load(tmp_path, {**pointer, "params": {"width": 4}})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"store_url": "x"}'])
def test_a_file_that_is_no_pointer_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "pointer.json").write_text(text)
    with pytest.raises(Invalid, match="does not point at a checkpoint"):
        _load_pyfunc(str(tmp_path))
    with pytest.raises(Invalid, match=r"holds no pointer\.json"):
        _load_pyfunc(str(tmp_path / "elsewhere"))


def test_input_that_does_not_fit_is_named(tmp_path: Path) -> None:
    _, pointer = saved_run(tmp_path)
    served = load(tmp_path, pointer)
    with pytest.raises(Invalid, match=r"shape \(2, 7\)"):
        served.predict(np.zeros((2, 7)))
    with pytest.raises(Invalid, match="not numbers"):
        served.predict(np.array([["a", "b", "c"]]))
