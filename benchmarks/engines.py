"""Everything that saves: retoma and its peers, behind the same calls, each used as its documentation says.

A peer whose package is not installed is absent from the results, with the reason on the page.
"""

from __future__ import annotations

import importlib
import inspect
import os
import time
import warnings
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from benchmarks.sequences import State, Training, flatten, nested
from training.checkpoint import IncrementalCheckpointer, restore_checkpoint
from training.checkpoint.care.compact import compact
from training.checkpoint.chain import ChunkPlan, plan_chunks, read_chain
from training.checkpoint.coding.codec import apply_frame, frame_digest
from training.checkpoint.manifest import FRAME_BYTES, Manifest
from training.checkpoint.reader import PackReader

RESTORE_THREADS = 2


class Engine(ABC):
    """Saves numbered states into a folder and restores them.

    Attributes:
        package: what has to be installed.
        deltas: whether a save may be smaller than the state.
        exact: whether a restore gives back every bit.
        overlaps: whether a copy may go on beside the training, once `watch` was called.
    """

    name: ClassVar[str]
    package: ClassVar[str] = "torch"
    deltas: ClassVar[bool] = False
    exact: ClassVar[bool] = True
    overlaps: ClassVar[bool] = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def absent(cls) -> str | None:
        """Why it cannot be measured here, or None."""
        try:
            importlib.import_module(cls.package)
        except ImportError as error:
            return f"{cls.package} is not installed: {error}"
        return None

    def watch(self, training: Training) -> None:  # noqa: B027 - most copy everything at once
        """Told whose steps change the state."""

    @abstractmethod
    def save(self, state: State, number: int) -> None:
        """Returns when the training may go on."""

    def wait(self) -> None:  # noqa: B027 - nothing to wait for, unless it saves in the background
        """Returns when the last save is stored."""

    @abstractmethod
    def restore(self, number: int) -> State:
        """A saved state."""

    def close(self) -> None:  # noqa: B027 - nothing to end, unless it has threads
        """No save comes after this."""

    def compact(self, number: int) -> bool:
        """Make the restore of one state cheaper, if the engine can."""
        del number
        return False

    def encode_seconds(self) -> float | None:
        """Of the last save, on one thread, as the engine itself counts them; None: it does not."""
        return None

    def decode_seconds(self, number: int) -> float | None:
        """Of a restore without reading, on one thread; None: cannot be told apart."""
        del number
        return None

    def decoded_states(self, number: int) -> float:
        """How many states' bytes a restore has to decode."""
        del number
        return 1.0


class Retoma(Engine):
    """`IncrementalCheckpointer` on a local folder, one encoding thread."""

    name = "retoma"
    package = "training"
    deltas = True
    overlaps = True
    bounded: ClassVar[str | None] = None

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.manifests: list[Manifest] = []
        options: dict[str, Any] = {"bounded": self.bounded} if self.bounded else {}
        self._checkpointer = IncrementalCheckpointer(
            folder,
            deltas_per_base=8,
            encode_threads=1,
            on_saved=lambda committed: self.manifests.append(committed.manifest),
            **options,
        )
        self._checkpointer.restore()  # opens the store: once a run, not a part of a save

    @classmethod
    def absent(cls) -> str | None:
        """Bounded codecs are a keyword of the checkpointer."""
        if cls.bounded and "bounded" not in inspect.signature(IncrementalCheckpointer).parameters:
            return "the checkpointer has no bounded codec"
        return None

    def watch(self, training: Training) -> None:
        self._checkpointer.overlap(training.model, *training.optimizers)

    def save(self, state: State, number: int) -> None:
        del number
        self._checkpointer.save(nested(state))

    def wait(self) -> None:
        self._checkpointer.wait()

    def restore(self, number: int) -> State:
        manifest = self.manifests[number]
        store = self._checkpointer.store
        return flatten(dict(restore_checkpoint(store, manifest.token, manifest.sequence, threads=RESTORE_THREADS)))

    def compact(self, number: int) -> bool:
        manifest = self.manifests[number]
        return compact(self._checkpointer.store, manifest.token, manifest.sequence).written

    def close(self) -> None:
        self._checkpointer.close()

    def encode_seconds(self) -> float:
        return self.manifests[-1].costs.encode_seconds

    def decoded_states(self, number: int) -> float:
        decoded = sum(
            plan.frame_bytes(i) * len(s) for plan in self._plans(number) for i, s in enumerate(plan.sources)
        )
        return decoded / self.manifests[number].costs.state_bytes

    def decode_seconds(self, number: int) -> float:
        plans = self._plans(number)
        sources = [source for plan in plans for frame in plan.sources for source in reversed(frame)]
        with PackReader(self._checkpointer.store, sources) as reader:
            encoded = {source: bytes(reader.take(source)) for source in dict.fromkeys(sources)}
        out = np.empty(FRAME_BYTES, np.uint8)
        started = time.perf_counter()
        for plan in plans:
            for frame, links in enumerate(plan.sources):
                view = out[: plan.frame_bytes(frame)]
                for source in reversed(links):
                    apply_frame(source.codec, source.delta, encoded[source], view, plan.item_bytes)
                assert frame_digest(view) == links[0].frame.digest
        return time.perf_counter() - started

    def _plans(self, number: int) -> list[ChunkPlan]:
        manifest = self.manifests[number]
        return list(plan_chunks(read_chain(self._checkpointer.store, manifest.token, manifest.sequence)).values())


class RetomaInt8(Retoma):
    """The same with `bounded="int8"`: not exact, within a bound that the manifest states."""

    name = "retoma-int8"
    exact = False
    bounded = "int8"


class RetomaInt4(Retoma):
    """The same with `bounded="int4"`."""

    name = "retoma-int4"
    exact = False
    bounded = "int4"


class TorchSave(Engine):
    """`torch.save` of the nested state, read with `weights_only`."""

    name = "torch.save"

    def save(self, state: State, number: int) -> None:
        torch.save(nested(state), self.folder / f"{number}.pt")

    def restore(self, number: int) -> State:
        return flatten(torch.load(self.folder / f"{number}.pt", weights_only=True))


class Safetensors(Engine):
    """`save_file` of the flat state."""

    name = "safetensors"
    package = "safetensors"

    def save(self, state: State, number: int) -> None:
        save_file(state, self.folder / f"{number}.safetensors")

    def restore(self, number: int) -> State:
        # load_file maps the file; a copy of it is what a training needs to go on
        return {path: value.clone() for path, value in load_file(self.folder / f"{number}.safetensors").items()}


class DcpSave(Engine):
    """torch.distributed.checkpoint in one process, without a process group."""

    name = "dcp.save"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        self._like: State = {}

    def save(self, state: State, number: int) -> None:
        state_dict_saver.save(nested(state), checkpoint_id=self.folder / str(number))
        self._like = state

    def restore(self, number: int) -> State:
        state = {path: torch.empty_like(value) for path, value in self._like.items()}
        state_dict_loader.load(nested(state), checkpoint_id=self.folder / str(number))
        return state


class DcpAsyncSave(DcpSave):
    """The same by `async_save`."""

    name = "dcp.async_save"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._pending: Any = None

    def save(self, state: State, number: int) -> None:
        self.wait()
        self._pending = state_dict_saver.async_save(nested(state), checkpoint_id=self.folder / str(number))
        self._like = state

    def wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


class ZipNN(Engine):
    """zipnn's XOR delta of the state's bytes against those of the state before; the first in full."""

    name = "zipnn"
    package = "zipnn"
    deltas = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._before: bytes | None = None
        self._like: State = {}

    def save(self, state: State, number: int) -> None:
        # compress() alters what it is given, so it gets bytes of its own
        data = b"".join(_bytes_of(value) for value in state.values())
        if self._before is None:
            encoded = self._zipnn(0).compress(bytearray(data))
        else:
            encoded = self._zipnn("byte").compress(data, delta_second_data=self._before)
        self._file(number).write_bytes(encoded)
        self._before, self._like = data, state

    def restore(self, number: int) -> State:
        data = bytes(self._zipnn(0).decompress(self._file(0).read_bytes()))
        for index in range(1, number + 1):
            data = self._zipnn("byte").decompress(self._file(index).read_bytes(), delta_second_data=data)
        whole, start, state = bytearray(data), 0, {}
        for path, value in self._like.items():
            part = torch.frombuffer(whole, dtype=torch.uint8, count=value.nbytes, offset=start)
            state[path] = part.clone().view(value.dtype).reshape(value.shape)
            start += value.nbytes
        return state

    def decoded_states(self, number: int) -> float:
        return 1.0 + number

    def _file(self, number: int) -> Path:
        return self.folder / f"{number}.znn"

    @staticmethod
    def _zipnn(delta: str | int) -> Any:
        from zipnn import ZipNN as Codec

        return Codec(input_format="byte", bytearray_dtype="float32", delta_compressed_type=delta)


class Moonclip(Engine):
    """`MoonclipManager` as it comes: saved in the background, XOR against the last full snapshot, zstd 3."""

    name = "moonclip"
    package = "moonclip"
    deltas = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from moonclip import MoonclipManager

        self._manager = MoonclipManager(str(folder))
        self._saved: list[str] = []
        self._like: State = {}

    def save(self, state: State, number: int) -> None:
        self._saved.append(self._manager.save_tensors(number, cast("Any", state)))  # stubs know bytes only
        self._like = state

    def wait(self) -> None:
        self._manager.flush()

    def restore(self, number: int) -> State:
        found = self._manager.load(self._saved[number])
        return {
            path: torch.frombuffer(found[path], dtype=value.dtype).reshape(value.shape)
            for path, value in self._like.items()
        }

    def decoded_states(self, number: int) -> float:
        return 2.0 if number else 1.0


class Orbax(Engine):
    """`StandardCheckpointer` on numpy views of the tensors, in the background."""

    name = "orbax"
    package = "orbax.checkpoint"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        os.environ["JAX_PLATFORMS"] = "cpu"
        from orbax import checkpoint as ocp

        self._checkpointer = ocp.StandardCheckpointer()

    def save(self, state: State, number: int) -> None:
        tree = {path: np.asarray(value.numpy()) for path, value in state.items()}
        self._checkpointer.save(self.folder / str(number), tree)

    def wait(self) -> None:
        self._checkpointer.wait_until_finished()

    def restore(self, number: int) -> State:
        found = self._checkpointer.restore(self.folder / str(number))
        return {path: torch.from_numpy(np.asarray(value)) for path, value in found.items()}

    def close(self) -> None:
        self._checkpointer.close()


def _bytes_of(value: torch.Tensor) -> Any:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().data


OURS: tuple[type[Engine], ...] = (Retoma, RetomaInt8, RetomaInt4)
IN_TORCH: tuple[type[Engine], ...] = (TorchSave, Safetensors, DcpSave, DcpAsyncSave)
INSTALLED: tuple[type[Engine], ...] = (ZipNN, Moonclip, Orbax)
ENGINES: dict[str, type[Engine]] = {engine.name: engine for engine in (*OURS, *IN_TORCH, *INSTALLED)}
