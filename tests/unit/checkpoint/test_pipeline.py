"""The background of a save: what is in flight, what fails, and what training notices of it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.support.cuts import mnist_config, write_digits
from tests.support.faults import Gate, RuledStore, fail_on
from training.checkpoint import IncrementalCheckpointer, MetricPoint
from training.checkpoint.coding.choices import Choices
from training.checkpoint.coding.encode import FRAMES_IN_FLIGHT
from training.checkpoint.history import read_lineage
from training.checkpoint.manifest import FRAME_BYTES, PackName
from training.checkpoint.pack import PACK_BYTES, PackWriter, write_packs
from training.checkpoint.restore import restore_checkpoint
from training.checkpoint.state.buffers import SnapshotBuffers
from training.checkpoint.store import LocalStore, MemoryStore, NoSpace
from training.errors import Corrupt, Invalid, Unavailable
from training.ports import Message
from training.session import train_range


def state(step: int, items: int = 20_000) -> dict[str, torch.Tensor]:
    return {"w": torch.randn(items, generator=torch.Generator().manual_seed(step))}


def test_skip_returns_at_once_and_counts_what_it_left_out() -> None:
    gate = Gate("put", "packs/")
    store = RuledStore(MemoryStore(), gate)
    with IncrementalCheckpointer(store, on_busy="skip") as checkpointer:
        assert checkpointer.save(state(0), metrics=[MetricPoint(step=0, values={"a": 0.0})]) is not None
        assert gate.reached.wait(10)
        for step in (1, 2):
            assert checkpointer.save(state(step), metrics=[MetricPoint(step=step, values={"a": 1.0})]) is None
        assert checkpointer.skipped_saves == 2
        gate.opened.set()
        checkpointer.wait()
        assert checkpointer.save(state(3)) is not None
        head = checkpointer.wait()
    assert head is not None
    assert head.manifest.sequence == 1
    assert head.manifest.decision.skipped_saves == 2
    assert [point.step for point in head.manifest.metrics] == [1, 2], "metrics of skipped saves are lost"


def test_wait_does_not_copy_before_the_save_before_is_done() -> None:
    gate = Gate("put", "packs/")
    with IncrementalCheckpointer(RuledStore(MemoryStore(), gate)) as checkpointer:
        checkpointer.save(state(0))
        second = threading.Thread(target=checkpointer.save, args=(state(1),))
        second.start()
        assert gate.reached.wait(10)
        second.join(0.2)
        assert second.is_alive(), "a second save is in flight beside the first"
        gate.opened.set()
        second.join(10)
        assert checkpointer.wait() is not None
        assert checkpointer.skipped_saves == 0


class TestFailedSaves:
    def test_each_is_told_and_the_limit_stops_with_a_clear_error(self) -> None:
        told: list[tuple[str, int]] = []
        store = RuledStore(MemoryStore(), fail_on("put", "packs/", Unavailable("503 SlowDown"), times=100))
        checkpointer = IncrementalCheckpointer(
            store, max_failed_saves=2, on_failed=lambda error, count: told.append((error.message, count))
        )
        for step in range(3):
            checkpointer.save(state(step))
        with pytest.raises(Unavailable, match="3 saves in a row failed; the last one: 503 SlowDown"):
            checkpointer.save(state(3))
        assert [count for _, count in told] == [1, 2, 3]
        checkpointer.close()
        assert not store.list("manifests/")
        assert not store.list("packs/")

    def test_a_success_starts_the_count_anew_and_metrics_arrive_once(self) -> None:
        store = RuledStore(MemoryStore(), fail_on("put", "packs/", Unavailable("away"), times=2))
        with IncrementalCheckpointer(store, max_failed_saves=2) as checkpointer:
            for step in range(6):
                checkpointer.save(state(step), metrics=[MetricPoint(step=step, values={"a": 0.0})])
        chain = read_lineage(store).chain
        assert [c.manifest.sequence for c in chain] == [2, 3, 4, 5]
        assert [p.step for c in chain for p in c.manifest.metrics] == list(range(6))
        assert chain[0].manifest.decision.failed_saves == 2

    def test_by_default_the_next_call_raises_and_the_one_after_goes_on(self) -> None:
        store = RuledStore(MemoryStore(), fail_on("put", "packs/", Unavailable("away")))
        checkpointer = IncrementalCheckpointer(store)
        checkpointer.save(state(0))
        with pytest.raises(Unavailable, match=r"^away"):
            checkpointer.save(state(1))
        checkpointer.save(state(1))
        checkpointer.close()
        assert torch.equal(restore_checkpoint(store, 1, 1)["w"], state(1)["w"])

    def test_the_last_save_is_never_forgiven(self) -> None:
        store = RuledStore(MemoryStore(), fail_on("put", "packs/", Unavailable("away"), times=100))
        checkpointer = IncrementalCheckpointer(store, max_failed_saves=10)
        checkpointer.save(state(0))
        with pytest.raises(Unavailable):
            checkpointer.close()

    def test_one_that_finds_the_store_full_half_way_leaves_no_pack_behind(self) -> None:
        packs = 3
        large = {"w": torch.randint(0, 2**31, (packs * PACK_BYTES // 4,), dtype=torch.int32)}
        inner = MemoryStore()
        puts: list[str] = []

        def fail_on_the_last(operation: str, key: str) -> None:
            if operation == "put":
                puts.append(key)
                if len(puts) == packs:
                    raise NoSpace("the last pack")

        checkpointer = IncrementalCheckpointer(RuledStore(inner, fail_on_the_last))
        checkpointer.save(large)
        with pytest.raises(NoSpace, match="the last pack"):
            checkpointer.close()
        assert len(puts) == packs
        assert not inner.list("packs/")
        assert not inner.list("manifests/")

    def test_one_that_fails_otherwise_deletes_nothing(self) -> None:
        """The store is away, or what lies under the key is another writer's."""
        theirs, inner = state(7), MemoryStore()
        with IncrementalCheckpointer(inner) as first:
            first.save(theirs)
            first.wait()
            store = RuledStore(inner)
            for error in (Unavailable("away"), Corrupt("holds other bytes")):
                writer = PackWriter(store, PackName(1, 0), ThreadPoolExecutor(1))
                store.rule = fail_on("put", "packs/", error)
                executor = ThreadPoolExecutor(1)
                snapshot, _ = SnapshotBuffers().take(state(8), {}, executor)
                with pytest.raises(type(error)):
                    write_packs(snapshot, None, writer, executor, choices=Choices())
        assert not [key for operation, key in store.operations if operation == "delete"]
        assert torch.equal(restore_checkpoint(inner, 1, 0)["w"], theirs["w"])

    def test_training_goes_on_and_the_supervisor_hears_of_it(self, tmp_path: Path) -> None:
        digits = write_digits(tmp_path / "digits")
        store = RuledStore(LocalStore(tmp_path / "store"), fail_on("put", "packs/", Unavailable("away"), times=2))
        heard: list[Message] = []
        config = mnist_config(epochs=2, checkpoint={"every_steps": 1, "max_failed_saves": 2})
        done = train_range(config, store, "r", data_folder=digits, report=heard.append)
        assert [m.failures_in_a_row for m in heard if m.kind == "save_failed"] == [1, 2]
        straight = train_range(config, str(tmp_path / "straight"), "r", data_folder=digits)
        assert done.state_digest == straight.state_digest

    def test_errors_that_a_person_must_mend_are_never_forgiven(self) -> None:
        store = RuledStore(MemoryStore(), fail_on("put", "packs/", Invalid("access denied"), times=1))
        checkpointer = IncrementalCheckpointer(store, max_failed_saves=10)
        checkpointer.save(state(0))
        with pytest.raises(Invalid, match="access denied"):
            checkpointer.save(state(1))
        checkpointer.close()


def test_a_pack_is_on_its_way_while_the_rest_is_coded() -> None:
    """The first put begins long before the last frame is there: seen by a put that is held back."""
    frames = 3 * PACK_BYTES // FRAME_BYTES
    gate = Gate("put", "packs/")
    store = RuledStore(MemoryStore(), gate)
    digests: list[int] = []
    with IncrementalCheckpointer(store, upload_threads=1) as checkpointer:
        checkpointer.save({"w": torch.randint(0, 2**31, (frames * FRAME_BYTES // 4,), dtype=torch.int32)})
        assert gate.reached.wait(30)
        digests.append(len(store.operations))
        assert checkpointer.busy
        gate.opened.set()
        head = checkpointer.wait()
    assert head is not None
    assert len(head.manifest.packs) >= 3
    assert FRAMES_IN_FLIGHT * FRAME_BYTES < PACK_BYTES, "coding would be done before the first pack is full"


def test_a_prepared_snapshot_is_like_any_other_and_preparing_twice_does_nothing() -> None:
    with IncrementalCheckpointer(MemoryStore()) as checkpointer:
        checkpointer.prepare(state(0, items=3_000_000))
        checkpointer.prepare(state(1, items=3_000_000))
        checkpointer.save(state(2, items=3_000_000))
        checkpointer.save(state(3, items=3_000_000))
        checkpointer.wait()
        restored = checkpointer.restore()
    assert restored is not None
    assert torch.equal(restored["w"], state(3, items=3_000_000)["w"])


@pytest.mark.parametrize("shape", [(5_000_000,), (3, 2_000_000), (2_500_000, 2)])
def test_large_tensors_are_copied_whole_by_several_threads(shape: tuple[int, ...]) -> None:
    tensors = {"a": torch.randn(shape), "b": torch.randn(shape).t() if len(shape) == 2 else torch.randn(7)}
    with IncrementalCheckpointer(MemoryStore()) as checkpointer:
        checkpointer.save(tensors)
        checkpointer.wait()
        restored = checkpointer.restore()
    assert restored is not None
    assert all(torch.equal(restored[key], tensors[key]) for key in tensors)


@pytest.mark.parametrize("options", [{"on_busy": "drop"}, {"max_failed_saves": -1}, {"upload_threads": 0}])
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(Invalid):
        IncrementalCheckpointer(MemoryStore(), **options)  # type: ignore[arg-type]
