"""F4: after a power cut, a name that is there holds its bytes, and what was acknowledged is there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.faults import PowerCut
from training.checkpoint import IncrementalCheckpointer
from training.checkpoint.store import LocalStore


def test_an_object_survives_a_power_cut_as_soon_as_it_was_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = PowerCut(tmp_path, monkeypatch)
    store = LocalStore(tmp_path / "new" / "folders")
    for key in ("packs/000001/a.pack", "packs/000001/b.pack", "packs/000002/a.pack"):
        store.put(key, [b"x"])
        assert disk.survives(store.folder / key)
    for key in ("retoma.json", "tokens/000001.claim.json"):
        store.put_if_absent(key, b"x")
        assert disk.survives(store.folder / key)


def test_a_name_never_appears_before_its_bytes_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = PowerCut(tmp_path, monkeypatch)
    LocalStore(tmp_path).put("packs/000001/a.pack", [b"x" * 1000])
    events = [(what, source if what == "name" else path) for what, path, source in disk.log]
    temporary = next(source for what, path, source in disk.log if path.name == "a.pack")
    assert events.index(("sync", temporary)) < events.index(("name", temporary))


def test_at_the_commit_all_packs_are_durable_and_at_the_acknowledgement_the_manifest_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = PowerCut(tmp_path, monkeypatch)
    weight = torch.zeros(30_000)
    with IncrementalCheckpointer(tmp_path / "run") as checkpointer:
        for step in range(3):
            weight += 1
            checkpointer.save({"weight": weight})
            committed = checkpointer.wait()
            assert committed is not None
            assert disk.survives(tmp_path / "run" / committed.manifest.key)
            commit = next(at for at, event in enumerate(disk.log) if event[1].name == f"{step:08d}.json")
            packs = [tmp_path / "run" / key for key in committed.manifest.pack_keys()]
            assert packs
            assert all(disk.survives(pack, moment=commit) for pack in packs)


def test_the_spy_would_see_a_missing_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = PowerCut(tmp_path, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr("training.checkpoint.store.local._fsync_folder", lambda folder: None)
        LocalStore(tmp_path).put("a", [b"x"])
    assert not disk.survives(tmp_path / "a")
