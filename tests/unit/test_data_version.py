"""Data sets through the real `dvc`, in a throw-away copy of this project's data stages."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import yaml

import tasks.data
from infra import dvc
from tasks.data import DataVersion, ensure_data, verify_data
from training.errors import Invalid

PROJECT = Path(__file__).parents[2]
MNIST = "data/mnist"
IMAGES = Path(MNIST, "images.npy")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A commit as a newcomer gets it: stages and lock, no data, no cache. Tests copy it."""
    root = tmp_path_factory.mktemp("clone")
    (root / ".dvc").mkdir()
    for file in (".dvcignore", ".dvc/config", ".dvc/.gitignore"):
        shutil.copy(PROJECT / file, root / file)
    made = shutil.ignore_patterns("mnist", "stdlib_text", "stdlib_sources.yaml", "*.part", "__pycache__")
    shutil.copytree(PROJECT / "data", root / "data", ignore=made)
    (root / ".gitignore").write_text(".venv\n__pycache__/\n")
    (root / ".venv").symlink_to(sys.prefix)
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", "data stages")
    return root


@pytest.fixture
def root(clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / "site-cache"))
    monkeypatch.setenv("DVC_GLOBAL_CONFIG_DIR", str(tmp_path / "global-config"))
    return Path(shutil.copytree(clone, tmp_path / "project", symlinks=True))


@pytest.fixture(scope="module")
def mnist(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, DataVersion]]:
    """A clone that already has its digits."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DVC_SITE_CACHE_DIR", str(folder / "site-cache"))
        patch.setenv("DVC_GLOBAL_CONFIG_DIR", str(folder / "global-config"))
        root = Path(shutil.copytree(clone, folder / "project", symlinks=True))
        yield root, ensure_data(root, MNIST)


@pytest.fixture
def made(mnist: tuple[Path, DataVersion], root: Path) -> tuple[Path, DataVersion]:
    """A private copy of `mnist`, with its cache."""
    source, version = mnist
    shutil.rmtree(root)
    shutil.copytree(source, root, symlinks=True)
    return root, version


def git(root: Path, *arguments: str) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    command = ["git", *arguments]
    return subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True, text=True).stdout


def type_in(root: Path, command: str | None) -> None:
    """What a person does with a hint: paste it into a shell in the root, no environment activated."""
    assert command is not None
    environment = os.environ | {"PATH": "/usr/bin:/bin", "SHELL": "/bin/sh"}
    done = subprocess.run(
        ["/bin/sh", "-c", command], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def locked_digest(root: Path, stage: str) -> str:
    lock = yaml.safe_load((root / "data/dvc.lock").read_text())
    return f"md5:{lock['stages'][stage]['outs'][0]['md5']}"


def forbid_dvc(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError(f"dvc was called: {arguments}")

    monkeypatch.setattr(tasks.data, "run_dvc", refuse)


def test_a_fresh_clone_gets_the_recorded_digits_and_git_stays_clean(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = locked_digest(root, "mnist")
    version = ensure_data(root, f"./{MNIST}/")
    assert version.path == MNIST
    assert version.digest == before == locked_digest(root, "mnist")
    assert version.revision == git(root, "rev-parse", "HEAD").strip()
    assert (version.dirty, version.files, version.bytes) == (False, 2, 3_925_256)
    assert git(root, "status", "--porcelain") == ""
    assert not (root / "data/stdlib_text").exists()

    forbid_dvc(monkeypatch)  # what is there and right is neither made again nor asked about
    assert ensure_data(root, MNIST) == version
    assert verify_data(root, version) == root / MNIST


def test_the_text_records_its_python_and_both_stages_write_the_same_bytes_again(root: Path) -> None:
    version = ensure_data(root, "data/stdlib_text")
    lock = yaml.safe_load((root / "data/dvc.lock").read_text())
    sources = lock["stages"]["stdlib_text"]["params"]["stdlib_sources.yaml"]
    assert sources["python"].split()[1] == ".".join(map(str, sys.version_info[:3]))
    assert version.digest == locked_digest(root, "stdlib_text")
    assert 1_000_000 < version.bytes < 3_000_000
    # Another Python than the committed lock's is another data version, which git shows.
    committed = yaml.safe_load(git(root, "show", "HEAD:data/dvc.lock"))
    assert version.dirty == (committed != lock)

    first = (root / "data/dvc.lock").read_bytes()
    type_in(root, ".venv/bin/dvc repro --quiet --force data/dvc.yaml")
    assert (root / "data/dvc.lock").read_bytes() == first
    verify_data(root, version)


def flip_unseen(root: Path) -> str:
    """One byte, with size and modification time kept: `dvc status` finds nothing."""
    before = (root / IMAGES).stat()
    content = bytearray((root / IMAGES).read_bytes())
    content[5000] ^= 1
    (root / IMAGES).write_bytes(content)
    os.utime(root / IMAGES, ns=(before.st_atime_ns, before.st_mtime_ns))
    return "images.npy is changed"


def truncate(root: Path) -> str:
    os.truncate(root / IMAGES, 100_000)
    return "images.npy is changed"


def add_a_file(root: Path) -> str:
    (root / MNIST / "deep").mkdir()
    (root / MNIST / "deep/extra.npy").write_bytes(b"extra")
    return "deep/extra.npy is extra"


def remove_a_file(root: Path) -> str:
    (root / IMAGES).unlink()
    return "images.npy is missing"


@pytest.mark.parametrize("damage", [flip_unseen, truncate, add_a_file, remove_a_file])
def test_damage_is_refused_by_name_and_the_hint_repairs_it(
    made: tuple[Path, DataVersion], damage: Callable[[Path], str]
) -> None:
    root, version = made
    finding = damage(root)
    with pytest.raises(Invalid, match=finding) as refused:
        ensure_data(root, MNIST)
    assert version.digest in refused.value.message
    assert refused.value.hint == ".venv/bin/dvc repro --force data/dvc.yaml:mnist"
    with pytest.raises(Invalid, match=finding) as on_the_node:
        verify_data(root, version)
    assert on_the_node.value.hint == refused.value.hint

    type_in(root, refused.value.hint)
    assert ensure_data(root, MNIST) == version
    assert git(root, "status", "--porcelain") == ""


def test_a_damaged_cache_is_not_trusted_and_the_hint_repairs_it(made: tuple[Path, DataVersion]) -> None:
    root, version = made
    corrupt(cached(root, IMAGES))
    shutil.rmtree(root / MNIST)
    with pytest.raises(Invalid, match=r"images\.npy is changed") as refused:
        ensure_data(root, MNIST)  # dvc restores from its cache and reports success
    type_in(root, refused.value.hint)
    assert ensure_data(root, MNIST) == version


def test_own_data_comes_back_from_a_remote_even_past_a_damaged_cache(root: Path, tmp_path: Path) -> None:
    (root / "own/sub").mkdir(parents=True)
    (root / "own/b.txt").write_text("b\n")
    (root / "own/sub/ä b.txt").write_text("a\n")
    (root / "own/sub/empty").touch()
    with pytest.raises(Invalid, match="own is not tracked by DVC") as untracked:
        ensure_data(root, "own")
    assert untracked.value.hint == ".venv/bin/dvc add own"
    type_in(root, untracked.value.hint)
    type_in(root, f".venv/bin/dvc remote add --default mine {tmp_path}/remote && .venv/bin/dvc push -q")
    version = ensure_data(root, "own")
    assert version.digest == "md5:" + yaml.safe_load((root / "own.dvc").read_text())["outs"][0]["md5"]
    assert (version.dirty, version.files) == (True, 3)  # own.dvc is not committed yet

    shutil.rmtree(root / "own")
    assert ensure_data(root, "own") == version

    corrupt(cached(root, Path("own/b.txt")))
    corrupt(root / "own/b.txt")
    with pytest.raises(Invalid, match=r"b\.txt is changed") as refused:
        ensure_data(root, "own")
    type_in(root, refused.value.hint)
    assert ensure_data(root, "own") == version


def test_a_single_file_has_a_digest_too(root: Path) -> None:
    (root / "words.txt").write_text("one two\n")
    type_in(root, ".venv/bin/dvc add -q words.txt")
    version = ensure_data(root, "words.txt")
    assert (version.files, version.bytes) == (1, 8)
    assert len(version.digest) == len("md5:") + 32
    (root / "words.txt").write_text("one twO\n")
    with pytest.raises(Invalid, match=r"words\.txt is changed"):
        verify_data(root, version)


def test_without_git_as_in_an_image_all_works_and_no_revision_is_claimed(root: Path) -> None:
    shutil.rmtree(root / ".git")
    version = ensure_data(root, MNIST)
    assert (version.revision, version.dirty) == (None, False)
    truncate(root)
    with pytest.raises(Invalid, match=r"images\.npy") as refused:
        verify_data(root, version)
    type_in(root, refused.value.hint)
    verify_data(root, version)


def test_a_node_that_has_only_the_data_verifies_it(
    mnist: tuple[Path, DataVersion], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, version = mnist
    forbid_dvc(monkeypatch)
    with pytest.raises(Invalid, match="data set data/mnist is missing"):
        verify_data(tmp_path, version)
    shutil.copytree(source / MNIST, tmp_path / MNIST)
    verify_data(tmp_path, version)
    truncate(tmp_path)
    with pytest.raises(Invalid, match="which one is unknown"):
        verify_data(tmp_path, version)


def test_a_node_with_another_data_version_says_so(mnist: tuple[Path, DataVersion]) -> None:
    root, version = mnist
    other = version.model_copy(update={"digest": "md5:" + "0" * 32 + ".dir"})
    with pytest.raises(Invalid, match="the run was started with md5:000") as refused:
        verify_data(root, other)
    assert "same state" in (refused.value.hint or "")


def test_two_processes_that_want_absent_data_at_once_both_get_it(root: Path) -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        versions = [future.result() for future in [pool.submit(ensure_data, root, MNIST) for _ in range(2)]]
    assert versions[0] == versions[1]
    assert versions[0].digest == locked_digest(root, "mnist")


def test_a_dvc_command_of_someone_else_is_waited_for(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / ".dvc/tmp").mkdir()
    held = (root / ".dvc/tmp/lock").open("w")
    fcntl.flock(held, fcntl.LOCK_EX)
    waits = []

    def release(seconds: float) -> None:
        waits.append(seconds)
        held.close()

    monkeypatch.setattr(dvc.run_dvc.retry, "sleep", release)
    ensure_data(root, MNIST)
    assert len(waits) == 1


def test_a_stage_that_fails_tells_why_and_leaves_no_half_data_set(root: Path) -> None:
    params = root / "data/params.yaml"
    params.write_text(params.read_text().replace("6a6dab69", "00000000"))
    with pytest.raises(Invalid, match=r"params\.yaml says 0000") as failed:
        ensure_data(root, MNIST)
    assert "dvc repro --force data/dvc.yaml:mnist" in (failed.value.hint or "")
    assert not (root / MNIST).exists()


@pytest.mark.parametrize("path", ["/etc", "../data", "data/../..", "."])
def test_a_path_outside_the_project_is_refused(root: Path, path: str) -> None:
    with pytest.raises(Invalid, match="must be a relative path inside"):
        ensure_data(root, path)


def test_a_misspelt_data_set_is_answered_with_the_near_one(root: Path) -> None:
    with pytest.raises(Invalid, match="tracked are: data/mnist") as refused:
        ensure_data(root, "data/mnits")
    assert refused.value.hint == "did you mean data/mnist?"


def test_a_change_of_the_maker_makes_the_version_dirty(made: tuple[Path, DataVersion]) -> None:
    root, version = made
    (root / "README.md").write_text("not a part of the data\n")
    assert not ensure_data(root, MNIST).dirty
    maker = root / "data/make_mnist.py"
    maker.write_text(maker.read_text() + "\n# changed\n")
    assert ensure_data(root, MNIST) == version.model_copy(update={"dirty": True})


def cached(root: Path, file: Path) -> Path:
    md5 = tasks.data._file_md5(root / file)
    return root / ".dvc/cache/files/md5" / md5[:2] / md5[2:]


def corrupt(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.chmod(0o644)
    file.write_bytes(content)
    file.chmod(0o444)
