"""Loads a registered model from the run's store: the loader behind `mlflow.pyfunc.load_model`.

A registered version holds no weights and no code, only `data/pointer.json`. Nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field, ValidationError
from torch import Tensor, nn

from training.checkpoint.restore import restore_checkpoint
from training.checkpoint.store import open_store
from training.config import Frozen
from training.errors import Corrupt, Invalid
from training.job import load_job
from training.state import apply_model

POINTER_FILE = "pointer.json"


class Pointer(Frozen):
    """One checkpoint in a store, and the job that builds its model."""

    store_url: str
    run: str
    token: int = Field(ge=1)
    sequence: int = Field(ge=0)
    digest: str
    job: str
    params: dict[str, Any]


class ServedModel:
    """A restored model in eval mode on the CPU.

    Attributes:
        pointer: where the weights came from.
        module: the job's model.
    """

    def __init__(self, pointer: Pointer, module: nn.Module) -> None:
        self.pointer = pointer
        self.module = module.eval()

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Run the model without gradients.

        Args:
            model_input: a numpy array, nested lists of numbers, or a DataFrame of numbers, in the shape that the
                model's `forward` takes. Floats become float32; integers and booleans int64.
            params: unused; there are no inference parameters.

        Returns:
            A numpy array, or dicts, tuples and lists of arrays as the model returns them.

        Raises:
            Invalid: the input is not numeric, or the model does not take its shape.
        """
        del params
        batch = _tensor(model_input)
        with torch.inference_mode():
            try:
                return _arrays(self.module(batch))
            except (RuntimeError, IndexError) as error:
                raise Invalid(
                    f"the model of {self.pointer.job} does not take an input of shape {tuple(batch.shape)}, "
                    f"{batch.dtype}: {error}"
                ) from error


def load_model(pointer: Pointer) -> ServedModel:
    """Restore a checkpoint's weights, read-only, every byte verified.

    Raises:
        Corrupt: the store holds another checkpoint than the registered one, or damaged bytes.
        Unavailable: the store did not answer.
        Invalid: the job cannot be imported, or builds another model than the one that was saved.
    """
    state = restore_checkpoint(open_store(pointer.store_url), pointer.token, pointer.sequence, pointer.run)
    found = state.checkpoint.ref.digest
    if found != pointer.digest:
        raise Corrupt(
            f"the registered checkpoint has digest {pointer.digest}, the one in {pointer.store_url} has {found}",
            hint="the store was replaced since: register the run's head again, and load that version",
            run=pointer.run,
            token=pointer.token,
            sequence=pointer.sequence,
        )
    module = load_job(pointer.job, pointer.params, None).model()
    apply_model(module, state["model"])
    return ServedModel(pointer, module)


def _load_pyfunc(path: str) -> ServedModel:
    """What MLflow calls, with the folder of the version's `data`."""
    folder = Path(path)
    file = folder if folder.is_file() else folder / POINTER_FILE
    try:
        pointer = Pointer.model_validate(json.loads(file.read_text()))
    except FileNotFoundError as error:
        raise Invalid(f"{folder} holds no {POINTER_FILE}: not a model that retoma registered") from error
    except (ValueError, ValidationError) as error:
        raise Invalid(f"{file} does not point at a checkpoint: {error}") from error
    return load_model(pointer)


def _tensor(value: Any) -> Tensor:
    numbers = value.to_numpy() if hasattr(value, "to_numpy") else np.asarray(value)
    if numbers.dtype.kind == "f":
        return torch.from_numpy(np.array(numbers, np.float32))
    if numbers.dtype.kind in "iub":
        return torch.from_numpy(np.array(numbers, np.int64))
    raise Invalid(f"the input holds {numbers.dtype}, not numbers")


def _arrays(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().float().numpy() if value.dtype == torch.bfloat16 else value.detach().numpy()
    if isinstance(value, Mapping):
        return {key: _arrays(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_arrays(item) for item in value]
    return tuple(_arrays(item) for item in value) if isinstance(value, tuple) else value
