"""F3: a full disk or a quota leaves nothing under a good name, and says what is needed and what is free."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.bits import bits
from tests.support.faults import failing_fsync, failing_writes
from training.checkpoint import IncrementalCheckpointer
from training.checkpoint.store import LocalStore
from training.errors import Unavailable


def state_of(kilobytes: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randint(0, 256, (kilobytes * 1024,), dtype=torch.uint8, generator=generator)}


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def assert_explained(error: Unavailable, folder: Path, at_least_bytes: int) -> None:
    needed, free = re.search(r"(\d+) bytes needed, (\d+) bytes free", error.message).groups()  # type: ignore[union-attr]
    assert f"no space to write {folder}/" in error.message
    assert int(needed) >= at_least_bytes
    assert int(free) >= 0
    assert "nothing was committed" in (error.hint or "")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("after_bytes", [0, 1, 100_000])
def test_a_save_without_space_leaves_nothing_and_the_training_can_be_resumed(
    tmp_path: Path, number: int, after_bytes: int
) -> None:
    with IncrementalCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(state_of(200, 0))
        head = checkpointer.wait()
        before = names(tmp_path)
        with failing_writes(number, after_bytes):
            checkpointer.save(state_of(200, 1), base=True)
            with pytest.raises(Unavailable) as caught:
                checkpointer.wait()
        assert_explained(caught.value, tmp_path, 190_000)
        assert names(tmp_path) == before
        assert checkpointer.wait() == head
    with IncrementalCheckpointer(tmp_path) as later:
        restored = later.restore()
    assert restored is not None
    assert bits(dict(restored)) == bits(state_of(200, 0))
    assert restored.skipped == ()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_at_the_fsync_is_a_full_disk_too(tmp_path: Path, number: int) -> None:
    """File systems that allocate late, and NFS, find out there."""
    store = LocalStore(tmp_path)
    with failing_fsync(number, of_folders=False), pytest.raises(Unavailable) as caught:
        store.put("packs/000001/x.pack", [bytes(1000)])
    assert_explained(caught.value, tmp_path, 1000)
    assert names(tmp_path) == set()
    assert store.unfinished() == []


def test_a_folder_that_cannot_be_made_for_want_of_space_is_told_like_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(Unavailable) as caught:
        LocalStore(tmp_path).put_if_absent("manifests/000001/00000000.json", b"x")
    assert_explained(caught.value, tmp_path, 1)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip() or 'not allowed'}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_state_of_2_mib_on_a_disk_of_1_mib(tiny_disk: Path) -> None:
    with IncrementalCheckpointer(tiny_disk) as checkpointer:
        checkpointer.save(state_of(300, 0))
        checkpointer.wait()
        before = names(tiny_disk)
        checkpointer.save(state_of(2048, 1))
        with pytest.raises(Unavailable) as caught:
            checkpointer.wait()
        assert_explained(caught.value, tiny_disk, 2_000_000)
        assert names(tiny_disk) == before
        checkpointer.save(state_of(300, 2))
        checkpointer.wait()
    with IncrementalCheckpointer(tiny_disk) as later:
        restored = later.restore()
    assert restored is not None
    assert bits(dict(restored)) == bits(state_of(300, 2))
