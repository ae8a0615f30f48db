"""F13: nothing is pickled, nothing stored can run code; what has no plain meaning is refused when it is saved."""

from __future__ import annotations

import ast
import io
import json
import pickle
import pickletools
from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import training.checkpoint
from tests.support.bits import bits
from training.checkpoint import IncrementalCheckpointer
from training.checkpoint.store import LocalStore, MemoryStore
from training.errors import Invalid


class Color(Enum):
    RED = "red"


class Level(IntEnum):
    LOW = 1


class Text(str, Enum):  # noqa: UP042 - the old spelling is the one in people's states
    A = "a"


class Point(NamedTuple):
    x: int


@dataclass
class Options:
    depth: int = 3


REFUSED: dict[str, tuple[Any, str]] = {
    "enum": (Color.RED, "Color"),
    "int enum": (Level.LOW, "Level"),
    "str enum": (Text.A, "Text"),
    "dataclass": (Options(), "Options"),
    "named tuple": (Point(1), "Point"),
    "path": (Path("x"), "Path"),
    "lambda": (lambda: 1, "function"),
    "class": (Options, "type"),
    "object array": (np.array([{}], dtype=object), "numpy array of object"),
    "text array": (np.array(["x"]), "numpy array of <U1"),
    "masked array": (np.ma.masked_array([1, 2], [True, False]), "MaskedArray"),
    "long double": (np.longdouble(1), "numpy array of float128"),
    "slice": (slice(1), "slice"),
    "random": (np.random.default_rng(), "Generator"),
    "huge int": (10**5000, "int"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_object_without_plain_meaning_is_refused_by_name_and_nothing_is_written(what: str) -> None:
    value, named = REFUSED[what]
    store = MemoryStore()
    with IncrementalCheckpointer(store) as checkpointer:
        for call in (checkpointer.check, checkpointer.save):
            with pytest.raises(Invalid) as caught:
                call({"options": {"odd": [value]}})
            assert caught.value.message.startswith("options/odd/~i0: ")
            assert named in caught.value.message
        assert store.list("packs/") == store.list("manifests/") == []


def plain_state() -> dict[str, Any]:
    return {
        "scalars": [np.float32(1.5), np.float64("nan"), np.int64(-3), np.bool_(True), np.complex64(1j)],
        "arrays": {"u16": np.arange(5, dtype=np.uint16), "f2": np.ones((2, 0, 3), np.float16), "0d": np.array(7)},
        "swapped": np.arange(3, dtype=">i4"),
        "strided": np.arange(12.0).reshape(3, 4)[::2, ::-1],
        "python": [None, True, 1, -(2**100), 1.5, "text", b"\x00\xff", (1, (2,)), [], {}, {1: "int", "1": "str"}],
        "weight": torch.ones(5000),
    }


def test_numpy_scalars_and_arrays_come_back_with_their_types() -> None:
    with IncrementalCheckpointer(MemoryStore()) as checkpointer:
        checkpointer.save(plain_state())
        restored = checkpointer.restore()
    assert restored is not None
    assert bits(dict(restored)) == bits(plain_state())
    assert [type(value) for value in restored["scalars"]] == [type(value) for value in plain_state()["scalars"]]
    restored["arrays"]["u16"][0] = 9  # an array of its own, writable


def test_a_restore_works_where_unpickling_is_impossible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("something was unpickled or pickled")

    for name in ("load", "loads", "Unpickler", "dump", "dumps", "Pickler"):
        monkeypatch.setattr(pickle, name, forbidden)
    monkeypatch.setattr(torch, "load", forbidden)
    monkeypatch.setattr(torch, "save", forbidden)
    with IncrementalCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(plain_state())
        checkpointer.save(plain_state())
    with IncrementalCheckpointer(tmp_path) as later:
        assert bits(dict(later.restore() or {})) == bits(plain_state())


def test_nothing_in_the_store_is_a_pickle_and_every_document_is_json(tmp_path: Path) -> None:
    with IncrementalCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(plain_state(), meta={"note": "text"})
        checkpointer.save({**plain_state(), "weight": torch.zeros(5000)})
    store = LocalStore(tmp_path)
    objects = {key: store.get(key) for key, _ in store.list("")}
    assert len([key for key in objects if key.endswith(".pack")]) == 2
    for key, data in objects.items():
        if key.endswith(".json"):
            json.loads(data)
        assert not data.startswith((b"\x80", b"PK")), f"{key} looks like a pickle or a zip of one"
        assert not _unpickles(data), key
        for name in (b"cbuiltins", b"ctorch", b"cnumpy", b"_rebuild_tensor", b"__reduce__"):
            assert name not in data


def _unpickles(data: bytes) -> bool:
    try:
        return len(list(pickletools.genops(io.BytesIO(data)))) > 1
    except (ValueError, IndexError, UnicodeDecodeError):
        return False


def test_no_module_of_the_engine_imports_a_pickler() -> None:
    """The adapters read and write others' files, never a store of ours; test_importing.py looks at them."""
    folder = Path(training.checkpoint.__file__).parent
    modules = [file for file in folder.rglob("*.py") if file.parent.name != "adapters"]
    assert len(modules) > 10
    for module in modules:
        for node in ast.walk(ast.parse(module.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {
                "pickle",
                "cloudpickle",
                "dill",
                "shelve",
                "marshal",
            }
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
                assert (called.value.id, called.attr) not in {("torch", "load"), ("torch", "save"), ("np", "load")}
            if isinstance(called, ast.Name):
                assert called.id not in {"eval", "exec", "__import__"}


@pytest.mark.parametrize("meta", [{"x": torch.ones(1)}, {"x": np.float32(1)}, {"x": {1, 2}}, {(1, 2): 3}])
def test_metadata_that_is_not_json_is_refused_when_it_is_given(meta: dict[Any, Any]) -> None:
    store = MemoryStore()
    with IncrementalCheckpointer(store) as checkpointer:
        with pytest.raises(Invalid, match="meta is not plain JSON"):
            checkpointer.save({"w": torch.ones(1)}, meta=meta)
        with pytest.raises(Invalid, match="job is not plain JSON"):
            IncrementalCheckpointer(store, job={"f": len})
    assert store.list("manifests/") == []
