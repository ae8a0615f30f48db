"""torch.distributed.checkpoint over our store: the same calls, and what they did not have before.

Several ranks: `test_dcp_ranks.py`.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.support.bits import bits, random_bits
from tests.support.faults import Gate, RuledStore
from training.checkpoint import IncrementalCheckpointer, Position
from training.checkpoint.adapters.dcp import RetomaReader, RetomaWriter, retoma_error
from training.checkpoint.history import read_lineage
from training.checkpoint.store import LocalStore, MemoryStore, Store
from training.checkpoint.token import token_numbers
from training.errors import Corrupt, Fenced, Invalid, RetomaError, Unavailable

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def a_state(seed: int = 0) -> dict[str, Any]:
    return {
        "model": {
            "weight": random_bits((300, 50), torch.float32, seed),
            "half": random_bits((7,), torch.bfloat16, seed),
            "scale": torch.tensor(2.5),
            "nothing": torch.empty((0, 3)),
            "mask": torch.tensor([True, False]),
        },
        "optimizer": {
            "state": {"weight": {"exp_avg": random_bits((300, 50), torch.float32, seed + 1)}},
            "lr": 1e-3,
        },
        "groups": [{"params": ["weight"], "betas": (0.9, 0.999)}, torch.arange(3)],
        "step": 7 + seed,
        "loss": float("nan"),
        "note": "text",
        "raw": b"\x00\xff",
        "none": None,
        "empty": [],
    }


def a_template() -> dict[str, Any]:
    """The same structure with other values, as a training that has just started has it."""

    def other(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.zeros_like(value)
        if isinstance(value, dict):
            return {key: other(item) for key, item in value.items()}
        return (
            [other(item) for item in value] if isinstance(value, list) else 0 if isinstance(value, int) else value
        )

    template = other(a_state())
    assert isinstance(template, dict)
    return template


def save(state: dict[str, Any], writer: RetomaWriter, **options: Any) -> None:
    dcp_save(state, storage_writer=writer, **options)


def load(store: Any, into: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    into = a_template() if into is None else into
    dcp_load(into, storage_reader=RetomaReader(store, **options))
    return into


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RetomaWriter]:
    with RetomaWriter(tmp_path) as made:
        yield made


def failure(call: Any) -> RetomaError:
    with pytest.raises(CheckpointException) as caught:
        call()
    found = retoma_error(caught.value)
    assert found is not None, str(caught.value)
    return found


def sorted_bits(value: Any) -> Any:
    """DCP loads in the order of keys; the order is not what is compared here."""
    return bits(dict(sorted(value.items())))


def test_what_dcp_saved_dcp_loads_bit_for_bit(tmp_path: Path, writer: RetomaWriter) -> None:
    save(a_state(), writer)
    assert sorted_bits(load(tmp_path)) == sorted_bits(a_state())


def test_a_second_save_is_a_delta_of_one_attempt(tmp_path: Path, writer: RetomaWriter) -> None:
    for seed in (0, 0, 1):
        save(a_state(seed), writer)
    chain = read_lineage(LocalStore(tmp_path)).chain
    assert [committed.manifest.kind for committed in chain] == ["base", "delta", "delta"]
    assert chain[1].manifest.packs == (), "nothing changed, nothing was written"
    assert token_numbers(LocalStore(tmp_path))[0] == {1}
    assert sorted_bits(load(tmp_path)) == sorted_bits(a_state(1))
    assert sorted_bits(load(tmp_path, checkpoint="1/1")) == sorted_bits(a_state(0))


def test_what_dcp_saved_the_engine_restores_with_its_structure(tmp_path: Path, writer: RetomaWriter) -> None:
    save(a_state(), writer)
    with IncrementalCheckpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore()
    assert restored is not None
    assert bits(dict(restored)) == bits(a_state())


def test_what_the_engine_saved_dcp_loads(tmp_path: Path) -> None:
    with IncrementalCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(a_state())
    assert sorted_bits(load(tmp_path)) == sorted_bits(a_state())


def test_a_state_is_loaded_without_a_template(tmp_path: Path, writer: RetomaWriter) -> None:
    """As torch's own converters do."""
    save(a_state(), writer)
    found: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
    _load_state_dict(found, storage_reader=RetomaReader(tmp_path), planner=planner, no_dist=True)
    assert bits(found) == bits(a_state())


def test_a_model_and_an_optimizer_go_on_where_they_were(tmp_path: Path, writer: RetomaWriter) -> None:
    def a_training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        return model, torch.optim.AdamW(model.parameters())

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()

    model, optimizer = a_training()
    step(model, optimizer)
    save({"model": model, "optimizer": optimizer}, writer)
    again, optimizer_again = a_training()
    step(again, optimizer_again)
    step(again, optimizer_again)
    dcp_load({"model": again, "optimizer": optimizer_again}, storage_reader=RetomaReader(tmp_path))
    step(model, optimizer)
    step(again, optimizer_again)
    assert bits(dict(again.state_dict())) == bits(dict(model.state_dict()))


def test_async_save_holds_the_state_of_the_call(tmp_path: Path) -> None:
    gate = Gate("put", "packs/")
    with RetomaWriter(RuledStore(LocalStore(tmp_path), gate)) as writer:
        weight = torch.ones(5000)
        future = dcp_async_save({"w": weight}, storage_writer=writer, checkpoint_id="one")
        weight.add_(1)
        assert gate.reached.wait(30)
        assert not future.done()  # type: ignore[union-attr]
        gate.opened.set()
        future.result(30)  # type: ignore[union-attr]
        dcp_async_save({"w": weight}, storage_writer=writer).result(30)  # type: ignore[union-attr]
    for name, value in (("one", 1.0), (None, 2.0)):
        found = load(tmp_path, {"w": torch.zeros(5000)}, checkpoint=name)
        assert found["w"].unique().tolist() == [value]


def test_a_save_that_was_overtaken_does_not_become_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RetomaWriter(tmp_path) as writer:
        reached, go_on = threading.Event(), threading.Event()
        real = writer.write_data

        def slow(plan: Any, planner: Any) -> Any:
            if threading.current_thread().name == "slow":
                reached.set()
                assert go_on.wait(30)
            return real(plan, planner)

        monkeypatch.setattr(writer, "write_data", slow)
        errors: list[RetomaError] = []
        thread = threading.Thread(
            target=lambda: errors.append(failure(lambda: save({"w": torch.zeros(3)}, writer))), name="slow"
        )
        thread.start()
        assert reached.wait(30)
        save({"w": torch.ones(3)}, writer)
        go_on.set()
        thread.join(30)
        assert "later save" in errors[0].message
    assert load(tmp_path, {"w": torch.zeros(3)})["w"].tolist() == [1, 1, 1]


def test_a_fault_in_the_store_raises_and_leaves_the_head_as_it_was(tmp_path: Path) -> None:
    broken = ""

    def rule(operation: str, key: str) -> None:
        if broken and operation.startswith("put") and key.startswith(broken):
            raise Unavailable(f"no {key}")

    with RetomaWriter(RuledStore(LocalStore(tmp_path), rule)) as writer:
        save(a_state(), writer)
        head = writer.head
        for broken in ("packs/", "manifests/"):  # noqa: B007 - the rule looks at it
            assert isinstance(failure(lambda: save(a_state(1), writer)), Unavailable)
            assert writer.head == head == read_lineage(LocalStore(tmp_path)).head
            assert sorted_bits(load(tmp_path)) == sorted_bits(a_state())
        broken = ""
        save(a_state(1), writer)
    assert sorted_bits(load(tmp_path)) == sorted_bits(a_state(1))


def test_a_newer_writer_fences_an_older_one(tmp_path: Path) -> None:
    old = RetomaWriter(tmp_path)
    with RetomaWriter(tmp_path) as new:
        save(a_state(), old)
        save(a_state(1), new)
        head = new.head
        assert isinstance(failure(lambda: save(a_state(2), old)), Fenced)
        assert read_lineage(LocalStore(tmp_path)).head == head
    with pytest.raises(Fenced):
        old.close()


def test_a_damaged_checkpoint_is_not_loaded_but_the_one_before_it(tmp_path: Path, writer: RetomaWriter) -> None:
    save(a_state(), writer)
    save(a_state(1), writer)
    pack = next(tmp_path.glob("packs/*/00000001-*"))
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    reader, into = RetomaReader(tmp_path), a_template()
    dcp_load(into, storage_reader=reader)
    assert sorted_bits(into) == sorted_bits(a_state())
    assert reader.restored is not None
    assert [skipped.key for skipped in reader.restored.skipped] == ["packs/000001/00000001-r0000-00.pack"]
    before = bits(into)
    error = failure(lambda: dcp_load(into, storage_reader=RetomaReader(tmp_path, "1/1")))
    assert isinstance(error, Corrupt)
    assert bits(into) == before, "nothing unverified reached the state"


def test_an_intact_checkpoint_without_what_is_asked_for_is_named_and_not_half_loaded(
    tmp_path: Path, writer: RetomaWriter
) -> None:
    save({"a": torch.ones(3)}, writer)
    save({"a": torch.zeros(3), "b": torch.ones(2)}, writer)
    pack = next(tmp_path.glob("packs/*/00000001-*"))
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    into = {"a": torch.full((3,), 5.0), "b": torch.zeros(2)}
    error = failure(lambda: load(tmp_path, into))
    assert isinstance(error, Corrupt)
    assert error.message.endswith("manifests/000001/00000000.json has no b")
    assert into["a"].tolist() == [5, 5, 5]


def test_a_loop_can_ask_whether_there_is_anything_to_load(tmp_path: Path) -> None:
    for expected in (False, True):
        with RetomaWriter(tmp_path) as writer:
            assert writer.checkpointer.has_checkpoint() is expected
            save({"a": torch.ones(3)}, writer)
            assert writer.checkpointer.has_checkpoint()
    assert [c.ref.token for c in read_lineage(LocalStore(tmp_path)).chain] == [1, 2]


class Odd:
    def __reduce__(self) -> Any:
        raise AssertionError("it was pickled")


@pytest.mark.parametrize(
    ("odd", "words"),
    [(Odd(), "Odd"), (lambda: 1, "function"), (torch.device("cpu"), "device"), ({1, 2}, "set")],
)
def test_a_value_without_plain_meaning_is_refused_by_name_and_never_pickled(
    tmp_path: Path, writer: RetomaWriter, odd: Any, words: str
) -> None:
    error = failure(lambda: save({"model": {"w": torch.ones(2)}, "extra": {"odd": odd}}, writer))
    assert isinstance(error, Invalid)
    assert error.message.startswith("extra/odd: ")
    assert words in error.message
    assert not list(tmp_path.glob("manifests/*/*"))


def test_nothing_is_pickled_into_the_store(
    tmp_path: Path, writer: RetomaWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("pickled")

    monkeypatch.setattr(torch, "save", forbidden)
    monkeypatch.setattr(pickle, "dumps", forbidden)
    save(a_state(), writer)
    assert not [
        path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes()[:2] in (b"\x80\x02", b"PK")
    ]


def test_a_tensor_is_not_cast_without_being_asked(tmp_path: Path, writer: RetomaWriter) -> None:
    save({"a": torch.ones(3), "b": torch.ones(3)}, writer)
    into = {"a": torch.zeros(3), "b": torch.zeros(3, dtype=torch.bfloat16)}
    error = failure(lambda: load(tmp_path, into))
    assert "b: saved as torch.float32" in error.message
    assert into["a"].tolist() == [0, 0, 0], "nothing was changed"
    assert load(tmp_path, into, cast=True)["b"].tolist() == [1, 1, 1]


def test_plan_caching_does_not_repeat_an_old_save(tmp_path: Path, writer: RetomaWriter) -> None:
    for seed in range(3):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        save(a_state(seed), writer, planner=planner)
        assert sorted_bits(load(tmp_path)) == sorted_bits(a_state(seed))


def test_a_planner_that_does_not_flatten_keeps_whole_values(tmp_path: Path, writer: RetomaWriter) -> None:
    state = {"model": {"w": torch.ones(3)}, "w": torch.zeros(2)}
    save(state, writer, planner=DefaultSavePlanner(flatten_state_dict=False))
    into: dict[str, Any] = {"model": None, "w": torch.ones(2)}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp_load(into, storage_reader=RetomaReader(tmp_path), planner=planner)
    assert sorted_bits(into) == sorted_bits(state)


def test_a_planner_that_transforms_tensors_is_obeyed(tmp_path: Path, writer: RetomaWriter) -> None:
    class Half(DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002 - torch's name
            value = super().transform_object(write_item, object)
            return value.to(torch.bfloat16) if isinstance(value, torch.Tensor) else value

    save({"w": torch.ones(3), "step": 1}, writer, planner=Half())
    assert load(tmp_path, {"w": torch.zeros(3, dtype=torch.bfloat16), "step": 0})["w"].tolist() == [1, 1, 1]


def test_one_checkpointer_serves_both_ways_with_one_attempt(tmp_path: Path) -> None:
    with RetomaWriter(tmp_path) as first:
        save(a_state(), first)
    with IncrementalCheckpointer(tmp_path) as checkpointer:
        into = load(checkpointer)
        with RetomaWriter(checkpointer, position=lambda state: Position(step=state["step"])) as writer:
            save({**into, "step": 8}, writer)
        checkpointer.save(a_state())  # still open
    chain = read_lineage(LocalStore(tmp_path)).chain
    assert [(c.ref.token, c.manifest.kind, c.manifest.position.step) for c in chain] == [
        (1, "base", 0),
        (2, "delta", 8),
        (2, "delta", 0),
    ]


def test_checkpoint_ids_name_checkpoints(tmp_path: Path, writer: RetomaWriter) -> None:
    for seed in range(3):
        save(a_state(seed), writer, checkpoint_id=f"step-{seed}")
    into = a_template()
    dcp_load(into, checkpoint_id="step-1", storage_reader=RetomaReader(tmp_path))
    assert sorted_bits(into) == sorted_bits(a_state(1))
    error = failure(lambda: load(tmp_path, checkpoint="step-9"))
    assert isinstance(error, Corrupt)
    assert "'step-9'" in error.message


@pytest.mark.parametrize("store", [MemoryStore()])
def test_an_empty_store_is_an_error_of_its_own_kind(store: Store) -> None:
    assert isinstance(failure(lambda: load(store)), Invalid)


def test_two_values_under_one_name_of_dcp_are_refused(tmp_path: Path) -> None:
    with IncrementalCheckpointer(tmp_path) as checkpointer:
        checkpointer.save({"a": {"b": 1}, "a.b": 2})
    assert "a.b" in failure(lambda: load(tmp_path, {"a.b": 0})).message


def test_a_writer_does_not_move_to_another_process(writer: RetomaWriter) -> None:
    with pytest.raises(Invalid, match="another process"):
        pickle.dumps(writer)
