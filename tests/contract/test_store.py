"""One suite for every store. What lies in a store is read and written here behind the adapter's back."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Protocol

import pytest

from tests.support.faults import RuledStore, failing_fsync, failing_writes, run_script, start_script
from tests.support.s3_servers import RawBucket, S3Server, set_aws
from training.checkpoint.store import LocalStore, MemoryStore, NotFound, ObjectInfo, Store, Unfinished, open_store
from training.checkpoint.store.faulty import FaultyStore
from training.checkpoint.store.metered import MeteredStore
from training.checkpoint.store.retry import RetryingStore
from training.checkpoint.store.s3 import S3Store
from training.errors import Corrupt, Invalid, Unavailable

pytest_plugins = ["tests.support.s3_fixtures"]


class Raw(Protocol):
    """The store's contents, around the adapter."""

    def read(self, key: str) -> bytes: ...
    def write(self, key: str, data: bytes) -> None: ...
    def everything(self) -> dict[str, bytes]: ...


class RawFiles:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, key: str) -> bytes:
        return (self.folder / key).read_bytes()

    def write(self, key: str, data: bytes) -> None:
        (self.folder / key).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / key).write_bytes(data)

    def everything(self) -> dict[str, bytes]:
        """Temporary files included: nothing hides from this."""
        files = (path for path in self.folder.rglob("*") if path.is_file())
        return {path.relative_to(self.folder).as_posix(): path.read_bytes() for path in files}


class RawDict:
    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = objects

    def read(self, key: str) -> bytes:
        return self.objects[key]

    def write(self, key: str, data: bytes) -> None:
        self.objects[key] = data

    def everything(self) -> dict[str, bytes]:
        return dict(self.objects)


WRAPPERS: dict[str, Callable[[Store], Store]] = {
    "retrying": RetryingStore,
    "metered": MeteredStore,
    "faulty": FaultyStore,
    "ruled": RuledStore,
}
SERVERS = ["moto", "seaweed"]
on_s3 = pytest.mark.xdist_group("s3")
STORES = ["local", "memory", *WRAPPERS, *(pytest.param(name, marks=on_s3) for name in SERVERS)]


def _as_it_is(store: Store) -> Store:
    return store


@pytest.fixture(params=STORES)
def stored(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Store, Raw]:
    if request.param == "local":
        return LocalStore(tmp_path / "store"), RawFiles(tmp_path / "store")
    if request.param in SERVERS:
        server: S3Server = request.getfixturevalue(f"{request.param}_process")
        set_aws(monkeypatch, server.url)
        raw = RawBucket(server.client, f"contract/{tmp_path.name.replace('_', '-')}-{os.getpid()}")
        return S3Store(raw.url), raw
    memory = MemoryStore()
    return WRAPPERS.get(request.param, _as_it_is)(memory), RawDict(memory._objects)


Writer = Callable[[Store, str, Sequence[bytes]], None]


def by_put(store: Store, key: str, parts: Sequence[bytes]) -> None:
    store.put(key, parts)


def by_put_if_absent(store: Store, key: str, parts: Sequence[bytes]) -> None:
    store.put_if_absent(key, b"".join(parts))


both_writers = pytest.mark.parametrize("write", [by_put, by_put_if_absent])


def test_an_object_holds_exactly_the_bytes_that_were_put(stored: tuple[Store, Raw]) -> None:
    store, raw = stored
    store.put("packs/000001/a.pack", [b"one", bytearray(b"two"), memoryview(b"three"), b""])
    store.put("packs/000001/empty.pack", [])
    assert store.put_if_absent("tokens/000001.claim.json", b"\x00\xff")
    assert raw.everything() == {
        "packs/000001/a.pack": b"onetwothree",
        "packs/000001/empty.pack": b"",
        "tokens/000001.claim.json": b"\x00\xff",
    }
    assert store.get("packs/000001/a.pack") == b"onetwothree"


def test_views_of_wider_items_are_written_as_their_bytes(stored: tuple[Store, Raw]) -> None:
    store, raw = stored
    store.put("packs/wide", [memoryview(bytes(8)).cast("d")])  # type: ignore[list-item]
    assert raw.read("packs/wide") == bytes(8)


def test_what_is_there_is_never_overwritten(stored: tuple[Store, Raw]) -> None:
    store, raw = stored
    raw.write("a/b", b"first")
    assert store.put_if_absent("a/b", b"second") is False
    with pytest.raises(Corrupt, match="a/b already holds other bytes"):
        store.put("a/b", [b"second"])
    assert raw.everything() == {"a/b": b"first"}


def test_an_empty_object_is_an_object(stored: tuple[Store, Raw]) -> None:
    store, raw = stored
    assert store.put_if_absent("a/empty", b"") is True
    assert store.put_if_absent("a/empty", b"x") is False
    assert store.put_if_absent("a/empty", b"") is False
    raw.write("a/full", b"x")
    assert store.put_if_absent("a/full", b"") is False
    assert store.exists("a/empty")
    assert store.get("a/empty") == store.read("a/empty", 0, 5) == b""
    assert raw.everything() == {"a/empty": b"", "a/full": b"x"}


def test_ages_are_those_of_the_same_listing_and_nothing_new_is_old(stored: tuple[Store, Raw]) -> None:
    store, _ = stored
    assert store.ages("") == []
    store.put("packs/000001/a.pack", [b"12"])
    store.put("packs/000002/b.pack", [b"3"])
    for prefix in ("", "packs/", "packs/000001/"):
        rows = store.ages(prefix)
        assert [ObjectInfo(key, size) for key, size, _ in rows] == store.list(prefix)
        assert all(0 <= age < 30 for _, _, age in rows)
    with pytest.raises(Invalid, match="prefix"):
        store.ages("../")


def test_a_store_where_all_is_finished_has_nothing_unfinished(stored: tuple[Store, Raw]) -> None:
    store, raw = stored
    store.put("packs/000001/a.pack", [b"12"])
    assert store.unfinished() == []
    assert set(raw.everything()) == {"packs/000001/a.pack"}


def test_putting_equal_bytes_again_is_a_no_op(stored: tuple[Store, Raw]) -> None:
    store, raw = stored
    store.put("a/b", [b"sa", b"me"])
    store.put("a/b", [b"same"])
    assert store.put_if_absent("a/b", b"same") is False
    assert raw.everything() == {"a/b": b"same"}


def test_of_eight_threads_exactly_one_wins_and_the_bytes_are_its_own(stored: tuple[Store, Raw]) -> None:
    store, raw = stored
    races = 2 if isinstance(store, S3Store) else 25  # SeaweedFS takes a second for eight at one key
    with ThreadPoolExecutor(8) as executor:
        for race in range(races):
            barrier = Barrier(8)

            def contend(who: int, key: str = f"tokens/{race:06d}.claim.json", start: Barrier = barrier) -> bool:
                start.wait()
                return store.put_if_absent(key, str(who).encode() * 1000)

            won = list(executor.map(contend, range(8)))
            assert won.count(True) == 1
            assert raw.read(f"tokens/{race:06d}.claim.json") == str(won.index(True)).encode() * 1000
    assert len(raw.everything()) == races


def test_reads_of_ranges_end_where_the_object_ends(stored: tuple[Store, Raw]) -> None:
    store, raw = stored
    raw.write("p", bytes(range(100)))
    assert store.read("p", 0, 100) == bytes(range(100))
    assert store.read("p", 10, 5) == bytes(range(10, 15))
    assert store.read("p", 95, 50) == bytes(range(95, 100))
    assert store.read("p", 200, 5) == b""
    assert store.read("p", 3, 0) == b""


def test_a_listing_is_sorted_complete_and_never_cached(stored: tuple[Store, Raw]) -> None:
    store, raw = stored
    assert store.list("") == store.list("tokens/") == []
    raw.write("tokens/000002.seal.json", b"22")
    raw.write("tokens/000001.seal.json", b"1")
    raw.write("tokens2/x", b"")
    raw.write("packs/000001/x.pack", b"123")
    first = [ObjectInfo("tokens/000001.seal.json", 1), ObjectInfo("tokens/000002.seal.json", 2)]
    assert store.list("tokens/") == first
    assert store.list("packs/") == [ObjectInfo("packs/000001/x.pack", 3)]
    assert [key for key, _ in store.list("")] == sorted(raw.everything())
    raw.write("tokens/000003.seal.json", b"")
    assert store.list("tokens/")[2:] == [ObjectInfo("tokens/000003.seal.json", 0)]


BAD_KEYS = ["", "..", "../x", "a/../b", "/a", "a/", "a//b", "A", "a/B", "a b", "a\\b", "a\n"]
BAD_KEYS += [".a", "a/.b", "a.", "~", "é"]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_keys_outside_the_alphabet_reach_no_store(stored: tuple[Store, Raw], key: str) -> None:
    store, raw = stored
    calls: list[Callable[[], object]] = [
        lambda: store.put(key, [b"x"]),
        lambda: store.put_if_absent(key, b"x"),
        lambda: store.get(key),
        lambda: store.read(key, 0, 1),
        lambda: store.exists(key),
        lambda: store.delete(key),
    ]
    for call in calls:
        with pytest.raises(Invalid, match="alphabet"):
            call()
    assert raw.everything() == {}


@pytest.mark.parametrize("prefix", ["..", "../", "/", "/etc/", "a", "A/", "a/../"])
def test_only_folders_of_the_store_are_listed(stored: tuple[Store, Raw], prefix: str) -> None:
    with pytest.raises(Invalid, match="prefix"):
        stored[0].list(prefix)


def test_a_missing_object_is_also_the_builtin_error(stored: tuple[Store, Raw]) -> None:
    store, _ = stored
    calls: list[Callable[[], bytes]] = [lambda: store.get("no/such"), lambda: store.read("no/such", 0, 1)]
    for call in calls:
        with pytest.raises(NotFound, match="no/such") as caught:
            call()
        assert isinstance(caught.value, FileNotFoundError)
        assert isinstance(caught.value, Corrupt)
        assert caught.value.key == "no/such"
    assert store.exists("no/such") is False


def test_a_deleted_object_is_gone_and_deleting_it_again_is_a_no_op(stored: tuple[Store, Raw]) -> None:
    store, raw = stored
    store.put("a/b", [b"x"])
    store.put("a/c", [b"y"])
    store.delete("a/b")
    store.delete("a/b")
    store.delete("no/folder")
    assert store.exists("a/b") is False
    assert raw.everything() == {"a/c": b"y"}


# --- what only a file system does


@both_writers
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("after_bytes", [0, 1000])
def test_a_full_disk_leaves_nothing_and_says_how_much_was_needed(
    tmp_path: Path, write: Writer, number: int, after_bytes: int
) -> None:
    store, raw = LocalStore(tmp_path), RawFiles(tmp_path)
    with failing_writes(number, after_bytes), pytest.raises(Unavailable) as caught:
        write(store, "packs/000001/x.pack", [b"x" * 600, b"y" * 600])
    free_bytes = shutil.disk_usage(tmp_path).free
    message = caught.value.message
    assert str(tmp_path / "packs/000001/x.pack") in message
    assert "1200 bytes needed" in message
    told = int(message.split(" bytes free")[0].rsplit(" ", 1)[1])
    assert abs(told - free_bytes) < 2**30  # others write to this disk too
    assert raw.everything() == {}
    write(store, "packs/000001/x.pack", [b"z"])
    assert raw.everything() == {"packs/000001/x.pack": b"z"}


@both_writers
def test_an_error_of_the_disk_leaves_nothing(tmp_path: Path, write: Writer) -> None:
    store, raw = LocalStore(tmp_path), RawFiles(tmp_path)
    with failing_writes(errno.EIO, 100), pytest.raises(Unavailable, match=r"x\.pack.*Input/output error"):
        write(store, "packs/x.pack", [b"x" * 1000])
    with failing_fsync(errno.EIO, of_folders=False), pytest.raises(Unavailable, match="Input/output error"):
        write(store, "packs/x.pack", [b"x" * 1000])
    assert raw.everything() == {}


@both_writers
def test_putting_again_settles_what_a_failed_sync_of_the_folder_left_open(tmp_path: Path, write: Writer) -> None:
    store, raw = LocalStore(tmp_path), RawFiles(tmp_path)
    (tmp_path / "packs").mkdir()
    for _ in range(2):  # the name is there after the first try: the second must not call that durable
        with failing_fsync(errno.EIO, of_folders=True), pytest.raises(Unavailable):
            write(store, "packs/x.pack", [b"whole"])
        assert set(raw.everything()) <= {"packs/x.pack"}
    write(store, "packs/x.pack", [b"whole"])
    assert raw.everything() == {"packs/x.pack": b"whole"}


@both_writers
def test_any_exception_half_way_leaves_nothing(
    tmp_path: Path, write: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(descriptor: int, data: bytes) -> int:
        raise KeyboardInterrupt

    store = LocalStore(tmp_path)
    monkeypatch.setattr(os, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(store, "packs/x.pack", [b"x" * 1000])
    assert RawFiles(tmp_path).everything() == {}


def test_a_folder_that_cannot_be_listed_is_not_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.put("manifests/000001/00000000.json", [b"x"])
    real = os.scandir

    def scandir(path: str) -> object:
        if str(path).endswith("000001"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(Unavailable, match=r"listing .*000001: Permission denied"):
        store.list("manifests/000001/")
    with pytest.raises(Unavailable):
        store.list("")


def test_a_place_that_is_no_folder_is_a_mistake_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Invalid, match="cannot write"):
        LocalStore(tmp_path / "file").put("a/b", [b"x"])
    assert (tmp_path / "file").read_text() == ""


CONTEND = """
import sys
from training.checkpoint.store import LocalStore
store, who = LocalStore(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
won = [n for n in range(50) if store.put_if_absent(f"tokens/{n:06d}.claim.json", who.encode() * 1000)]
print(*won)
"""


def test_of_four_processes_exactly_one_wins_each_object(tmp_path: Path) -> None:
    contenders = [start_script(CONTEND, tmp_path, who) for who in range(4)]
    for process in contenders:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in contenders:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    winner: dict[int, int] = {}
    for who, process in enumerate(contenders):
        out, _ = process.communicate(timeout=60)
        for number in map(int, out.split()):
            assert number not in winner
            winner[number] = who
    expected = {f"tokens/{n:06d}.claim.json": str(winner[n]).encode() * 1000 for n in range(50)}
    assert RawFiles(tmp_path).everything() == expected


HALF_WAY = """
import os, sys, time
from training.checkpoint.store import LocalStore
real = os.write
def write(descriptor, data):
    done = real(descriptor, memoryview(data)[:1000])
    print("half-way", flush=True)
    time.sleep(60)
    return done
os.write = write
LocalStore(sys.argv[1]).put("packs/000001/x.pack", [b"x" * 100_000])
"""


def test_a_process_killed_in_the_middle_of_a_put_leaves_no_object(tmp_path: Path) -> None:
    process = start_script(HALF_WAY, tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "half-way\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    store = LocalStore(tmp_path)
    leftovers = RawFiles(tmp_path).everything()
    assert [len(data) for data in leftovers.values()] == [1000]  # the kill did hit in the middle
    assert store.list("") == store.list("packs/000001/") == []
    assert store.exists("packs/000001/x.pack") is False
    store.put("packs/000001/x.pack", [b"y"])
    assert store.list("") == [ObjectInfo("packs/000001/x.pack", 1)]
    (left,) = store.unfinished()
    assert (left.name, left.key) == (*leftovers, "packs/000001")
    assert 0 <= left.age_seconds < 60
    store.abort(left)
    store.abort(left)
    assert store.unfinished() == []
    assert RawFiles(tmp_path).everything() == {"packs/000001/x.pack": b"y"}


@pytest.mark.parametrize(
    "name", ["packs/000001/x.pack", "../.tmp-x", "/etc/.tmp-x", "packs/../../.tmp-x", ".tmp-x/a"]
)
def test_nothing_but_a_temporary_file_of_the_store_is_aborted(tmp_path: Path, name: str) -> None:
    store, outside = LocalStore(tmp_path / "store"), tmp_path / ".tmp-x"
    store.put("packs/000001/x.pack", [b"y"])
    outside.write_bytes(b"z")
    with pytest.raises(Invalid):
        store.abort(Unfinished(name, "packs/000001", 0.0))
    assert store.get("packs/000001/x.pack") == b"y"
    assert outside.exists()


def test_ages_in_a_folder_are_by_the_file_system_s_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.put("a", [b"1"])
    store.put("b", [b"1"])
    written = (tmp_path / "a").stat().st_mtime
    os.utime(tmp_path / "a", (written, written - 1000))
    monkeypatch.setattr("time.time", lambda: 0.0)  # a machine whose clock stands
    ages = {key: age for key, _, age in store.ages("")}
    assert 1000 <= ages["a"] < 1060
    assert 0 <= ages["b"] < 60
    assert set(RawFiles(tmp_path).everything()) == {"a", "b"}


def test_ages_in_memory_are_by_the_clock_that_was_given() -> None:
    now = [100.0]
    store = MemoryStore(clock=lambda: now[0])
    store.put("a", [b"1"])
    now[0] = 130.0
    store.put_if_absent("b", b"1")
    store.put_if_absent("a", b"2")
    now[0] = 135.0
    assert [(key, age) for key, _, age in store.ages("")] == [("a", 35.0), ("b", 5.0)]


# --- addresses


def test_a_store_is_opened_by_folder_or_url(tmp_path: Path) -> None:
    folder = tmp_path / "with space and %"
    LocalStore(folder).put("a", [b"x"])
    for address in (folder, str(folder), LocalStore(folder).url):
        assert open_store(address).get("a") == b"x"
    assert open_store("memory://tests-one") is open_store("memory://tests-one")
    assert open_store("memory://tests-one") is not open_store("memory://tests-two")


def test_opening_a_store_writes_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path / "new")
    assert store.list("") == []
    assert not (tmp_path / "new").exists()


def test_an_unknown_scheme_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="no store for 'gopher://x'"):
        open_store("gopher://x")


def test_a_store_opened_elsewhere_sees_every_write_at_once(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert store.list("a/") == []
    script = (
        "import sys; from training.checkpoint.store import LocalStore; LocalStore(sys.argv[1]).put('a/b', [b'12'])"
    )
    run_script(script, tmp_path)
    assert store.list("a/") == [ObjectInfo("a/b", 2)]
    assert store.exists("a/b")
    assert store.get("a/b") == b"12"
