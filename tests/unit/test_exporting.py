"""A checkpoint as a file of others: bit for bit, whole or not at all, and never over something else."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.support.bits import bits, random_bits
from tests.support.faults import run_script
from training.checkpoint import IncrementalCheckpointer, Position
from training.checkpoint.adapters.exporting import FileFormat, export_checkpoint
from training.checkpoint.adapters.importing import read_foreign
from training.checkpoint.adapters.safetensors_form import write_safetensors
from training.checkpoint.store import LocalStore, MemoryStore
from training.checkpoint.token import token_numbers
from training.errors import Corrupt, Invalid

SAFETENSORS_DTYPES = """
    bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex64
    float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz
""".split()
FORMATS: list[FileFormat] = ["safetensors", "torch"]


def a_state(seed: int = 0) -> dict[str, Any]:
    weight = random_bits((200, 30), torch.float32, seed)
    return {
        "model": {"embed": weight, "head": weight, "a.b": torch.ones(2), "a": {"b": torch.zeros(3)}},
        "optimizer": {
            "state": {0: {"exp_avg": random_bits((200, 30), torch.bfloat16, seed), "step": torch.tensor(3.0)}}
        },
        "zoo": {
            name: random_bits((5, 3), getattr(torch, name), seed) for name in SAFETENSORS_DTYPES if name != "bool"
        },
        "mask": torch.tensor([[True, False]]),
        "empty": torch.empty((0, 4)),
        "scheduler": {"milestones": Counter([3, 3, 5]), "lrs": [0.1, float("nan")], "big": 2**80, "none": None},
        "raw": b"\x00\xff",
        "betas": (0.9, 0.999),
    }


def saved(store: LocalStore | MemoryStore, *states: dict[str, Any]) -> None:
    with IncrementalCheckpointer(store, run="run-1", job={"name": "job"}) as checkpointer:
        for number, state in enumerate(states):
            checkpointer.save(state, position=Position(epoch=number, step=10 * number, sample=320 * number))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("file_format", FORMATS)
def test_an_export_read_back_is_the_state_bit_for_bit(tmp_path: Path, file_format: FileFormat) -> None:
    store = MemoryStore()
    saved(store, a_state(), a_state(1))
    done = export_checkpoint(store, tmp_path / "out", file_format=file_format)
    assert bits(read_foreign(tmp_path / "out").state) == bits(a_state(1))
    assert (done.run, done.checkpoint, done.position["step"]) == ("run-1", "000001/00000001", 10)
    assert done.size_bytes == (tmp_path / "out").stat().st_size
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("file_format", FORMATS)
def test_any_checkpoint_can_be_exported_and_nothing_is_claimed(tmp_path: Path, file_format: FileFormat) -> None:
    store = MemoryStore()
    saved(store, a_state(), a_state(1), a_state(2))
    before = store.list("")
    export_checkpoint(store, tmp_path / "out", checkpoint=(1, 0), file_format=file_format)
    assert bits(read_foreign(tmp_path / "out").state) == bits(a_state())
    assert store.list("") == before
    assert token_numbers(store)[0] == {1}


def test_any_reader_of_safetensors_finds_the_tensors(tmp_path: Path) -> None:
    store, state = MemoryStore(), a_state()
    saved(store, state)
    export_checkpoint(store, tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert bits(found["model.embed"]) == bits(state["model"]["embed"])
    assert bits(found["optimizer.state.0.exp_avg"]) == bits(state["optimizer"]["state"][0]["exp_avg"])
    with safe_open(tmp_path / "out.safetensors", framework="pt") as file:
        metadata = file.metadata()
    assert metadata["model.head"] == "model.embed", "a tied tensor is written once, under its first name"
    assert "model.head" not in found
    assert json.loads(metadata["retoma"])["position"] == {"epoch": 0, "step": 0, "sample": 0}


def test_two_values_with_one_dotted_name_are_both_there(tmp_path: Path) -> None:
    store = MemoryStore()
    saved(store, a_state())
    export_checkpoint(store, tmp_path / "out")
    found = load_file(tmp_path / "out")
    assert found["model.a.b"].tolist() == [1, 1]
    assert found["~model.a.b"].tolist() == [0, 0, 0]


def test_a_torch_file_is_plain_dicts_and_tensors_and_ties_stay(tmp_path: Path) -> None:
    store = MemoryStore()
    saved(store, {**a_state(), "array": np.arange(3, dtype=np.int16), "scalar": np.float32(1.5)})
    done = export_checkpoint(store, tmp_path / "out.pt", file_format="torch")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert found["model"]["embed"].data_ptr() == found["model"]["head"].data_ptr()
    assert done.converted == ("array", "scalar")
    assert (found["array"].tolist(), found["array"].dtype, found["scalar"].item()) == ([0, 1, 2], torch.int16, 1.5)


def test_small_tensors_do_not_carry_each_others_memory_into_the_file(tmp_path: Path) -> None:
    store = MemoryStore()
    saved(store, {str(number): torch.ones(2000) for number in range(50)})
    for file_format in FORMATS:
        done = export_checkpoint(store, tmp_path / file_format, file_format=file_format)
        assert 400_000 < done.size_bytes < 450_000


@pytest.mark.parametrize("dtype", ["complex128", "complex32", "float8_e8m0fnu"])
def test_a_dtype_that_safetensors_does_not_know_is_refused_by_name(tmp_path: Path, dtype: str) -> None:
    store, state = MemoryStore(), {"model": {"odd": random_bits((3,), getattr(torch, dtype))}}
    saved(store, state)
    with pytest.raises(Invalid, match=f"model.odd: .* {dtype}") as caught:
        export_checkpoint(store, tmp_path / "out")
    assert caught.value.hint == "--format torch"
    assert names(tmp_path) == []
    export_checkpoint(store, tmp_path / "out", file_format="torch")
    assert bits(read_foreign(tmp_path / "out").state) == bits(state)


def test_what_nobody_could_load_safely_is_not_written(tmp_path: Path) -> None:
    store = MemoryStore()
    saved(store, {"w": torch.ones(2), "extra": {"raw": b""}})
    with pytest.raises(Invalid, match="extra/raw"):
        export_checkpoint(store, tmp_path / "out", file_format="torch")
    assert names(tmp_path) == []


@pytest.mark.parametrize("file_format", FORMATS)
def test_a_file_that_is_there_is_not_replaced_without_force(tmp_path: Path, file_format: FileFormat) -> None:
    store, target = MemoryStore(), tmp_path / "out"
    saved(store, a_state())
    target.write_text("precious")
    with pytest.raises(Invalid, match="is there already") as caught:
        export_checkpoint(store, target, file_format=file_format)
    assert "--force" in str(caught.value)
    assert target.read_text() == "precious"
    export_checkpoint(store, target, file_format=file_format, force=True)
    assert bits(read_foreign(target).state) == bits(a_state())
    assert names(tmp_path) == ["out"]


def test_a_file_that_appears_while_we_write_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(state: Any, path: Path, facts: Any) -> int:
        (tmp_path / "out").write_text("precious")
        return real(state, path, facts)

    store, real = MemoryStore(), write_safetensors
    saved(store, a_state())
    monkeypatch.setattr("training.checkpoint.adapters.exporting.write_safetensors", slow)
    with pytest.raises(Invalid, match="in the meantime"):
        export_checkpoint(store, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "precious"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize(("target", "words"), [("no/such/out", "is no folder"), ("", "is a folder")])
def test_a_target_that_cannot_be_written_is_refused_before_anything_is_read(
    tmp_path: Path, target: str, words: str
) -> None:
    with pytest.raises(Invalid, match=words):
        export_checkpoint(MemoryStore(), tmp_path / target)


def test_a_damaged_checkpoint_is_not_exported_and_the_older_one_says_so(tmp_path: Path) -> None:
    folder, target = tmp_path / "store", tmp_path / "out"
    saved(LocalStore(folder), a_state(), a_state(1))
    next(folder.glob("packs/*/00000001-*")).unlink()
    with pytest.raises(Corrupt, match="missing"):
        export_checkpoint(LocalStore(folder), target, checkpoint=(1, 1))
    assert not target.exists()
    done = export_checkpoint(LocalStore(folder), target)
    assert done.checkpoint == "000001/00000000"
    assert "00000001-r0000" in done.skipped[0].key
    assert bits(read_foreign(target).state) == bits(a_state())


def test_a_checkpoint_that_is_not_there_is_a_mistake_of_the_caller(tmp_path: Path) -> None:
    store = MemoryStore()
    saved(store, a_state())
    with pytest.raises(Invalid, match=r"has no manifests/000001/00000009\.json"):
        export_checkpoint(store, tmp_path / "out", checkpoint=(1, 9))


@pytest.mark.parametrize("store", [MemoryStore()])
def test_a_store_without_a_checkpoint_says_so(tmp_path: Path, store: MemoryStore) -> None:
    with pytest.raises(Invalid, match="no run"):
        export_checkpoint(store, tmp_path / "out")


FULL_DISK = """
import resource, signal, sys, torch
from pathlib import Path
from training.checkpoint import IncrementalCheckpointer
from training.checkpoint.adapters.exporting import export_checkpoint
from training.checkpoint.store import MemoryStore
from training.errors import Unavailable
store, folder = MemoryStore(), Path(sys.argv[1])
with IncrementalCheckpointer(store) as checkpointer:
    checkpointer.save({"w": torch.rand(1_000_000)})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
for file_format in ("safetensors", "torch"):
    (folder / "there").write_text("precious")
    for name, force in (("new", False), ("there", True)):
        try:
            export_checkpoint(store, folder / name, file_format=file_format, force=force)
            print("written")
        except Unavailable as error:
            print(error.message)
"""


def test_a_full_disk_leaves_nothing_behind_and_what_was_there(tmp_path: Path) -> None:
    said = run_script(FULL_DISK, tmp_path).stdout.splitlines()
    assert len(said) == 4
    for line in said:
        assert "4000000 bytes needed" in line
        assert "bytes free" in line
    assert names(tmp_path) == ["there"]
    assert (tmp_path / "there").read_text() == "precious"
