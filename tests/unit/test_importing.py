"""Files of others become checkpoints of ours: bit for bit, and nothing in them is ever run."""

from __future__ import annotations

import ast
import json
import pickle
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import training.checkpoint
from tests.support.bits import bits, random_bits
from training.checkpoint import IncrementalCheckpointer, Position
from training.checkpoint.adapters.dcp_folder import read_dcp_folder
from training.checkpoint.adapters.exporting import export_checkpoint
from training.checkpoint.adapters.importing import import_checkpoint, read_foreign
from training.checkpoint.history import read_lineage
from training.checkpoint.restore import restore_newest
from training.checkpoint.store import MemoryStore
from training.errors import Corrupt, Invalid

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

MARK: list[str] = []


def run_me(text: str) -> str:
    MARK.append(text)
    return text


class Bomb:
    """Runs something when it is unpickled."""

    def __init__(self, function: Callable[..., Any] = run_me, *arguments: Any) -> None:
        self.call = function, arguments or ("boom",)

    def __reduce__(self) -> Any:
        return self.call


class Options:
    depth = 3


def a_state(seed: int = 0) -> dict[str, Any]:
    weight = random_bits((200, 30), torch.float32, seed)
    return {
        "model": {"embed": weight, "head": weight, "half": random_bits((4, 2), torch.bfloat16, seed)},
        "optimizer": {"state": {"embed": {"exp_avg": random_bits((200, 30), torch.float32, seed + 1)}}, "lr": 0.1},
        "list": [torch.arange(3), {"x": 1}],
        "nan": float("nan"),
        "step": 7,
    }


def imported(source: Path, **options: Any) -> Any:
    store = MemoryStore()
    import_checkpoint(store, source, run="run-1", **options)
    restored = restore_newest(store, "run-1")
    assert restored is not None
    return restored


@pytest.fixture
def dcp_folder(tmp_path: Path) -> Path:
    dcp_save(a_state(), checkpoint_id=tmp_path / "dcp")
    return tmp_path / "dcp"


@pytest.mark.parametrize("zipped", [True, False])
def test_a_torch_file_is_imported_bit_for_bit(tmp_path: Path, zipped: bool) -> None:
    torch.save(OrderedDict(a_state()), tmp_path / "in.pt", _use_new_zipfile_serialization=zipped)
    restored = imported(tmp_path / "in.pt")
    assert bits(dict(restored)) == bits(a_state())
    assert restored["model"]["embed"] is restored["model"]["head"]
    assert restored.manifest.kind == "base"


def test_a_dcp_folder_is_imported_bit_for_bit(dcp_folder: Path) -> None:
    assert bits(dict(imported(dcp_folder))) == bits(a_state())


def test_a_dcp_folder_of_two_ranks_is_put_together(tmp_path: Path) -> None:
    """Its metadata is made by hand: two ranks hold a half each."""
    whole = random_bits((6, 4), torch.float32)
    dcp_save({"a": whole[:4], "b": whole[4:]}, checkpoint_id=tmp_path / "dcp")
    metadata = load_metadata(tmp_path / "dcp")
    a, b = metadata.state_dict_metadata["a"], metadata.state_dict_metadata.pop("b")
    b.chunks[0].offsets = torch.Size([4, 0])
    a.chunks.append(b.chunks[0])
    a.size = torch.Size([6, 4])
    index = next(key for key in metadata.storage_data if key.fqn == "b")
    place = metadata.storage_data.pop(index)
    metadata.storage_data[type(index)("a", torch.Size([4, 0]))] = place
    metadata.planner_data.pop("b")
    store_metadata(tmp_path / "dcp", metadata)
    assert bits(read_foreign(tmp_path / "dcp").state) == bits({"a": whole})

    b.chunks[0].offsets = torch.Size([3, 0])
    store_metadata(tmp_path / "dcp", metadata)
    with pytest.raises(Corrupt, match=r"a: the parts at .* overlap"):
        read_foreign(tmp_path / "dcp")
    a.chunks.pop()
    store_metadata(tmp_path / "dcp", metadata)
    with pytest.raises(Corrupt, match="a: 1 parts do not make up"):
        read_foreign(tmp_path / "dcp")


def test_a_safetensors_file_is_imported_under_its_names(tmp_path: Path) -> None:
    tensors = {"model.w": random_bits((30, 4), torch.float16), "model.b": torch.ones(3)}
    save_file(tensors, tmp_path / "in.safetensors")
    assert sorted(imported(tmp_path / "in.safetensors")) == ["model.b", "model.w"]
    assert bits(imported(tmp_path / "in.safetensors")["model.w"]) == bits(tensors["model.w"])


def test_an_export_of_ours_comes_back_with_its_place_in_the_training(tmp_path: Path) -> None:
    position = Position(epoch=2, step=20, sample=640)
    store = MemoryStore()
    with IncrementalCheckpointer(store, job={"name": "job"}, data={"digest": "md5:1"}) as checkpointer:
        checkpointer.save(a_state(), position=position)
    exported = export_checkpoint(store, tmp_path / "out")
    restored = imported(tmp_path / "out")
    assert bits(dict(restored)) == bits(a_state())
    assert restored.position == position
    assert (restored.manifest.job, restored.manifest.data) == ({"name": "job"}, {"digest": "md5:1"})
    assert restored.manifest.meta["imported"]["state_digest"] == exported.state_digest
    assert imported(tmp_path / "out", position=Position(epoch=1)).position == Position(epoch=1)


def test_an_import_into_a_run_that_is_there_becomes_its_head_and_keeps_its_history(tmp_path: Path) -> None:
    store = MemoryStore()
    with IncrementalCheckpointer(store, run="run-1", job={"name": "job"}) as checkpointer:
        checkpointer.save(a_state())
    torch.save(a_state(1), tmp_path / "in.pt")
    done = import_checkpoint(store, tmp_path / "in.pt", position=Position(epoch=3, step=30))
    chain = read_lineage(store).chain
    assert [str(committed.ref) for committed in chain] == ["000001/00000000", "000002/00000001"]
    assert done.checkpoint == "000002/00000001"
    assert chain[-1].manifest.position == Position(epoch=3, step=30)
    assert chain[-1].manifest.job == {"name": "job"}
    with IncrementalCheckpointer(store) as later:
        assert bits(dict(later.restore() or {})) == bits(a_state(1))


def load_metadata(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 - made by this test


def store_metadata(folder: Path, metadata: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def torch_zip(folder: Path, bomb: Any) -> Path:
    torch.save({"model": {"w": torch.ones(2)}, "extra": bomb}, folder / "in.pt")
    return folder / "in.pt"


def torch_old(folder: Path, bomb: Any) -> Path:
    torch.save({"w": torch.ones(2), "extra": bomb}, folder / "in.pt", _use_new_zipfile_serialization=False)
    return folder / "in.pt"


def bare_pickle(folder: Path, bomb: Any) -> Path:
    (folder / "in.pt").write_bytes(pickle.dumps(bomb, protocol=2))
    return folder / "in.pt"


def dcp_value(folder: Path, bomb: Any) -> Path:
    dcp_save({"w": torch.ones(2), "extra": bomb}, checkpoint_id=folder / "dcp")
    return folder / "dcp"


def dcp_metadata(folder: Path, bomb: Any) -> Path:
    dcp_save({"w": torch.ones(2)}, checkpoint_id=folder / "dcp")
    metadata = load_metadata(folder / "dcp")
    metadata.storage_meta = bomb
    store_metadata(folder / "dcp", metadata)
    return folder / "dcp"


def dcp_only_metadata(folder: Path, bomb: Any) -> Path:
    (folder / "dcp").mkdir()
    store_metadata(folder / "dcp", bomb)
    return folder / "dcp"


WAYS = [torch_zip, torch_old, bare_pickle, dcp_value, dcp_metadata, dcp_only_metadata]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("command", ["system", "own", "eval"])
def test_a_malicious_file_is_refused_by_name_and_never_run(
    tmp_path: Path, way: Callable[[Path, Any], Path], command: str
) -> None:
    import os

    proof = tmp_path / "proof"
    bomb, name = {
        "system": (Bomb(os.system, f"touch {proof}"), "system"),
        "own": (Bomb(), "run_me"),
        "eval": (Bomb(eval, f"open({str(proof)!r}, 'w')"), "eval"),
    }[command]
    source = way(tmp_path, bomb)
    MARK.clear()
    store = MemoryStore()
    with pytest.raises(Invalid) as caught:
        import_checkpoint(store, source)
    assert name in caught.value.message
    assert "not run" in caught.value.message
    assert caught.value.hint
    assert not proof.exists()
    assert MARK == []
    assert store.list("") == [], "nothing was claimed for it"


@pytest.mark.parametrize("way", WAYS)
def test_the_proof_of_a_run_would_be_seen(tmp_path: Path, way: Callable[[Path, Any], Path]) -> None:
    """The bombs above are live: whoever trusts the file runs them."""
    source = way(tmp_path, Bomb())
    MARK.clear()
    if source.is_dir() and way is not dcp_value:
        load_metadata(source)
    elif way is dcp_value:
        data = next(source.glob("*.distcp")).read_bytes()
        assert b"run_me" in data
        return
    elif way is bare_pickle:
        pickle.loads(source.read_bytes())  # noqa: S301
    else:
        torch.load(source, weights_only=False)
    assert MARK == ["boom"]


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_a_bare_pickle_is_refused_in_every_protocol(tmp_path: Path, protocol: int) -> None:
    (tmp_path / "in").write_bytes(pickle.dumps({"extra": Bomb()}, protocol))
    MARK.clear()
    with pytest.raises(Invalid, match="not run"):
        read_foreign(tmp_path / "in")
    assert MARK == []


def test_a_class_of_others_is_refused_by_name(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "options": Options()}, tmp_path / "in.pt")
    with pytest.raises(Invalid, match=r"Options"):
        import_checkpoint(MemoryStore(), tmp_path / "in.pt")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"w": torch.ones(2), "odd": {1, 2}}, "odd: a builtins.set cannot be saved"),
        ({"w": torch.ones(2).to_sparse()}, "w: a float32 tensor of layout sparse_coo"),
        ([torch.ones(2)], "holds a list"),
        (torch.ones(2), "holds a Tensor"),
    ],
)
def test_what_is_no_state_is_refused_before_anything_is_claimed(tmp_path: Path, value: Any, words: str) -> None:
    torch.save(value, tmp_path / "in.pt")
    store = MemoryStore()
    with pytest.raises(Invalid, match=words):
        import_checkpoint(store, tmp_path / "in.pt")
    assert store.list("") == []


@pytest.mark.parametrize("content", [b"", b"text", b"\xff" * 100, b"\x10" + b"\0" * 7 + b"x"])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "in").write_bytes(content)
    with pytest.raises(Invalid, match="neither"):
        read_foreign(tmp_path / "in")


def test_a_missing_file_and_a_folder_without_metadata_are_refused(tmp_path: Path) -> None:
    for source, words in ((tmp_path / "no", "does not exist"), (tmp_path, "no finished checkpoint")):
        with pytest.raises(Invalid, match=words):
            read_foreign(source)


def test_a_cut_file_is_corrupt(tmp_path: Path, dcp_folder: Path) -> None:
    torch.save(a_state(), tmp_path / "in.pt")
    save_file({"w": torch.ones(1000)}, tmp_path / "in.safetensors")
    data = next(dcp_folder.glob("*.distcp"))
    for path, source in (
        (tmp_path / "in.pt", tmp_path / "in.pt"),
        (tmp_path / "in.safetensors", tmp_path / "in.safetensors"),
        (data, dcp_folder),
        (dcp_folder / ".metadata", dcp_folder),
    ):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(Corrupt, match=str(path)):
            read_foreign(source)
        path.write_bytes(whole)
    data.unlink()
    with pytest.raises(Corrupt, match="missing"):
        read_foreign(dcp_folder)


def test_a_flipped_bit_in_an_export_of_ours_is_found(tmp_path: Path) -> None:
    store = MemoryStore()
    with IncrementalCheckpointer(store) as checkpointer:
        checkpointer.save(a_state())
    export_checkpoint(store, tmp_path / "out")
    data = bytearray((tmp_path / "out").read_bytes())
    data[-100] ^= 1
    (tmp_path / "out").write_bytes(data)
    with pytest.raises(Corrupt, match=r"expected digest .*, actual"):
        read_foreign(tmp_path / "out")


@pytest.mark.parametrize(
    "change",
    [
        {"tree": {"d": [["w", {"t": 7}]]}},
        {"tree": {"?": 1}},
        {"tree": []},
        {"values": [{"float": "zz"}], "tree": {"d": [["w", {"v": 0}]]}},
        {"tensors": ["no"], "digests": ["x"]},
        {"form": 9},
        {"position": "soon"},
    ],
    ids=str,
)
def test_a_description_that_does_not_fit_its_file_is_an_error_of_ours(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    store = MemoryStore()
    with IncrementalCheckpointer(store) as checkpointer:
        checkpointer.save({"w": torch.ones(3)})
    export_checkpoint(store, tmp_path / "out")
    with safe_open(tmp_path / "out", framework="pt") as file:
        facts = json.loads(file.metadata()["retoma"])
    save_file({"w": torch.ones(3)}, tmp_path / "bad", {"retoma": json.dumps({**facts, **change})})
    with pytest.raises((Corrupt, Invalid), match=r"bad|unknown node"):
        import_checkpoint(MemoryStore(), tmp_path / "bad")


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/../../secret"])
def test_a_dcp_folder_cannot_point_out_of_itself(dcp_folder: Path, name: str) -> None:
    shutil.copy(next(dcp_folder.glob("*.distcp")), dcp_folder.parent / "secret")
    metadata = load_metadata(dcp_folder)
    for place in metadata.storage_data.values():
        place.relative_path = name
    store_metadata(dcp_folder, metadata)
    with pytest.raises(Invalid, match="points out of its folder"):
        read_foreign(dcp_folder)


@pytest.mark.parametrize(
    "path", [("model", 10**9), ("model", -1), ("model", 1.5), 7], ids=["huge", "negative", "float", "no path"]
)
def test_paths_of_a_hostile_dcp_folder_are_refused(dcp_folder: Path, path: Any) -> None:
    metadata = load_metadata(dcp_folder)
    metadata.planner_data["step"] = path
    store_metadata(dcp_folder, metadata)
    with pytest.raises(Corrupt, match="not what"):
        read_foreign(dcp_folder)


def test_reading_a_dcp_folder_changes_no_class_of_torch(dcp_folder: Path) -> None:
    """A pickle may set attributes of the classes that it names; it gets stand-ins to do it to."""
    from torch.distributed.checkpoint.metadata import Metadata

    before = dict(vars(Metadata))
    opcodes = (
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n"
        b"N}X\x05\x00\x00\x00proofX\x04\x00\x00\x00gone s\x86b."
    ).replace(b"gone ", b"gone")
    (dcp_folder / ".metadata").write_bytes(opcodes)
    with pytest.raises(Corrupt):
        read_foreign(dcp_folder)
    assert dict(vars(Metadata)) == before


def test_only_the_adapters_touch_a_pickle_and_nothing_of_the_engine_needs_them() -> None:
    engine = Path(training.checkpoint.__file__).parent
    for module in engine.rglob("*.py"):
        tree = ast.parse(module.read_text())
        inside = module.parent.name == "adapters"
        for node in ast.walk(tree):
            imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            imported += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert inside or not any("adapters" in name for name in imported), module
            assert module.name == "plain_load.py" or "pickle" not in imported, module
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "load"):
                assert module.name == "plain_load.py", module
                assert "weights_only=True" in ast.unparse(node), module


@pytest.mark.parametrize("owner", [Path, dict, Metadata])
def test_an_attribute_is_never_looked_up_for_a_dcp_folder(tmp_path: Path, owner: Any) -> None:
    """Some Pythons pickle a member of an enumeration by getattr: that name alone must open no door."""

    class Asks:
        def __reduce__(self) -> Any:
            return getattr, (owner, "mro")

    (tmp_path / ".metadata").write_bytes(pickle.dumps({"x": Asks()}))
    with pytest.raises(Invalid, match="was not run"):
        read_dcp_folder(tmp_path)
