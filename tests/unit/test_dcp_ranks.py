"""torch.distributed.checkpoint over our store by several ranks: one checkpoint of all of them, or none."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.bits import bits, random_bits, tensor_bytes
from tests.support.faults import RuledStore
from tests.support.gang import gang, outcomes
from training.checkpoint import IncrementalCheckpointer, Position
from training.checkpoint.adapters.dcp import RetomaReader, RetomaWriter, retoma_error
from training.checkpoint.history import read_lineage
from training.checkpoint.manifest import Committed
from training.checkpoint.ranks.exchange import Exchange
from training.checkpoint.ranks.hosted import host_exchange
from training.checkpoint.restore import restore_newest
from training.checkpoint.state.tree import PerRank
from training.checkpoint.store import LocalStore
from training.errors import Invalid, Unavailable

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
SPLIT = ("model", "optimizer/state")
SOON_SECONDS = 20  # far less than the patience of a rank, and more than a busy machine needs
SHAPES: dict[str, tuple[int, ...]] = {"weight": (300, 70), "bias": (5,), "half": (33, 40), "flags": (9, 3)}
DTYPES = {"half": torch.bfloat16, "flags": torch.bool}


def wholes(step: int) -> dict[str, torch.Tensor]:
    """The sharded tensors of a training after some steps; each changes some rows of every rank's part."""
    made = {name: random_bits(shape, torch.float32, 7) for name, shape in SHAPES.items() if name != "flags"}
    made["weight"][::30] = random_bits((10, 70), torch.float32, step)
    made["half"] = random_bits(SHAPES["half"], torch.bfloat16, 8)
    made["flags"] = torch.arange(27).reshape(9, 3) % 2 == 0
    return made


def placed(name: str, whole: torch.Tensor, strategy: str) -> torch.Tensor:
    """This rank's part of it; without a strategy the whole."""
    if not strategy:
        return whole
    if strategy == "fsdp":
        mesh, placements = init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)]
    else:
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
        placements = [Shard(0), Shard(1) if name == "weight" else Replicate()]  # type: ignore[list-item]
        if name == "half":  # as FSDP2 has what tensor parallelism leaves alone
            mesh, placements = mesh["dp"], [Shard(0)]
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def a_state(step: int, strategy: str, *, blank: bool = False) -> dict[str, Any]:
    """What one rank holds: parts, replicas, scalars, bytes, and what is its own. `blank`: to load into."""
    rank = dist.get_rank() if strategy else 0
    tensors = {k: torch.zeros_like(v) if blank else v for k, v in wholes(step).items()}
    live = {name: placed(name, whole, strategy) for name, whole in tensors.items()}
    return {
        "model": {**live, "table": torch.full((200, 30), 0.0 if blank else 2.5)},
        "optimizer": {
            "state": {"weight": {"exp_avg": placed("weight", tensors["weight"].clone(), strategy)}},
            "groups": [{"lr": 0.0 if blank else 0.1, "betas": (0.9, 0.999), "params": ["weight"]}, torch.arange(3)],
        },
        "mean": torch.full((4,), -1.0 if blank else float(rank)),  # a buffer that differs: rank 0's counts
        "loss": -1.0 if blank else float(rank),
        "step": 0 if blank else step,
        "note": None if blank else "text",
        "raw": b"" if blank else b"\x00\xff",
        "own": PerRank(None if blank else {"generator": torch.full((9,), rank), "rank": rank}),
    }


def of_rank(value: Any) -> Any:
    """A state with parts as plain tensors, in the order of keys, in which DCP loads."""
    if isinstance(value, DTensor):
        return value.to_local()
    if isinstance(value, dict):
        return {key: of_rank(item) for key, item in sorted(value.items())}
    return [of_rank(item) for item in value] if isinstance(value, list) else value


def is_the_state(found: dict[str, Any], step: int, strategy: str, saved_by: int) -> None:
    """Bit for bit what this rank holds of the training at that step."""
    expected, rank = a_state(step, strategy), dist.get_rank()
    expected["mean"], expected["loss"] = torch.zeros(4), 0.0
    expected["own"] = {"generator": torch.full((9,), rank), "rank": rank} if rank < saved_by else None
    assert bits(of_rank(found)) == bits(of_rank(expected))


def step_of(state: dict[str, Any]) -> Position:
    return Position(step=state["step"])


def a_writer(target: Any, group: Exchange, **options: Any) -> RetomaWriter:
    return RetomaWriter(target, group=group, split=SPLIT, position=step_of, **options)


def save(state: dict[str, Any], writer: RetomaWriter, **options: Any) -> None:
    dcp_save(state, storage_writer=writer, **options)


def load(source: Any, strategy: str, saved_by: int, step: int, **options: Any) -> RetomaReader:
    """Load and compare."""
    into, reader = a_state(1, strategy, blank=True), RetomaReader(source, **options)
    dcp_load(into, storage_reader=reader)
    is_the_state(into, step, strategy, saved_by)
    return reader


def failure(call: Callable[[], Any]) -> tuple[str, str, float]:
    """Kind and message of our error, and after how many seconds it came."""
    begun = time.monotonic()
    with pytest.raises(CheckpointException) as caught:
        call()
    found = retoma_error(caught.value)
    assert found is not None, str(caught.value)
    return found.kind, found.message, time.monotonic() - begun


def chain(folder: Path | str) -> list[Committed]:
    return read_lineage(LocalStore(folder)).chain


# What is saved and loaded.


def save_three(exchange: Exchange, folder: str, strategy: str) -> None:
    size = exchange.size
    with a_writer(f"{folder}/dcp", exchange) as writer:
        for step in (1, 2, 2, 3):
            save(a_state(step, strategy), writer, checkpoint_id=f"step-{step}")
        load(f"{folder}/dcp", strategy, size, 3)
        load(f"{folder}/dcp", strategy, size, 2, checkpoint="step-2")
        load(writer.checkpointer, strategy, size, 3)
        staged: Any = dcp_async_save(a_state(4, strategy), storage_writer=writer)
        staged.result(60)
    with host_exchange() as own, native(f"{folder}/native", own) as checkpointer:
        for step in (1, 2, 2, 3, 4):
            checkpointer.save(a_state(step, strategy), position=Position(step=step))


def native(folder: str, exchange: Exchange) -> IncrementalCheckpointer:
    return IncrementalCheckpointer(folder, group=exchange, split=SPLIT)


def load_newest(exchange: Exchange, folder: str, strategy: str, saved_by: int) -> None:
    """From the store, and from a checkpointer that goes on with the chain."""
    load(folder, strategy, saved_by, 3)
    with a_writer(folder, exchange) as writer:
        assert writer.checkpointer.has_checkpoint()
        assert load(writer.checkpointer, strategy, saved_by, 3).restored is not None
        save(a_state(4, strategy), writer)


def is_whole(found: Any, step: int, ranks: int) -> None:
    """What one process restores."""
    model = found["model"]
    for name, whole in wholes(step).items():
        assert tensor_bytes(model[name]) == tensor_bytes(whole), name
    assert [own["rank"] for own in found["own"]] == list(range(ranks))
    assert (found["step"], found["note"], found["raw"], found["loss"]) == (step, "text", b"\x00\xff", 0.0)


@pytest.mark.parametrize(("strategy", "ranks"), [("fsdp", 2), pytest.param("tp-fsdp", 4, marks=pytest.mark.soak)])
def test_many_ranks_save_one_chain_as_the_engine_does_and_load_their_parts(
    strategy: str, ranks: int, tmp_path: Path
) -> None:
    gang(ranks, save_three, str(tmp_path), strategy)
    saved, engines = chain(tmp_path / "dcp"), chain(tmp_path / "native")
    assert [c.manifest.kind for c in saved] == ["base", "delta", "delta", "delta", "delta"]
    assert [c.manifest.position.step for c in saved] == [1, 2, 2, 3, 4]
    assert saved[2].manifest.packs == (), "nothing changed, nothing was written"
    for ours, theirs in zip(saved, engines, strict=True):
        one, other = ours.manifest, theirs.manifest
        assert (one.layout, one.state_digest, one.chunks) == (other.layout, other.state_digest, other.chunks)
        assert one.world_size == other.world_size == ranks
    total = sum(pack.size_bytes for pack in saved[0].manifest.packs)
    assert sum(pack.size_bytes for pack in saved[1].manifest.packs) < total / 5
    is_whole(restore_newest(LocalStore(tmp_path / "dcp"), "default"), 4, ranks)
    into = {"model": {"weight": torch.zeros(300, 70)}, "own": None}
    dcp_load(into, storage_reader=RetomaReader(tmp_path / "dcp"))
    assert tensor_bytes(into["model"]["weight"]) == tensor_bytes(wholes(4)["weight"])  # type: ignore[index]


@pytest.mark.soak
def test_another_sharding_loads_it_and_goes_on_with_the_chain(tmp_path: Path) -> None:
    gang(4, save_only, str(tmp_path), "tp-fsdp", 3)
    gang(2, load_newest, str(tmp_path), "fsdp", 4)
    saved = chain(tmp_path)
    assert [(c.ref.token, c.manifest.kind, c.manifest.world_size) for c in saved] == [
        (1, "base", 4),
        (2, "delta", 2),
    ]
    is_whole(restore_newest(LocalStore(tmp_path), "default"), 4, 2)


def save_only(exchange: Exchange, folder: str, strategy: str, step: int) -> None:
    with a_writer(folder, exchange) as writer:
        save(a_state(step, strategy), writer)


def read_bytes(exchange: Exchange, folder: str) -> tuple[int, int]:
    """Bytes of packs that this rank reads of a large sharded tensor, and of all."""
    whole = torch.randint(0, 2**31, (4096, 2048), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    with RetomaWriter(folder, group=exchange) as writer:
        save({"w": placed("w", whole, "fsdp")}, writer)
    read = 0

    class Counting(LocalStore):
        def read(self, key: str, offset: int, length: int) -> bytes:
            nonlocal read
            read += length
            return super().read(key, offset, length)

    into = {"w": placed("w", torch.zeros_like(whole), "fsdp")}
    dcp_load(into, storage_reader=RetomaReader(Counting(folder)))
    assert torch.equal(into["w"].to_local(), placed("w", whole, "fsdp").to_local())  # type: ignore[attr-defined]
    return read, sum(pack.size_bytes for pack in chain(folder)[-1].manifest.packs)


@pytest.mark.soak
def test_a_rank_reads_the_frames_of_its_part_only(tmp_path: Path) -> None:
    for read, total in gang(2, read_bytes, str(tmp_path)):
        assert 0.45 * total < read < 0.6 * total


# What goes wrong on one rank.


class Halves(DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002 - torch's name
        return super().transform_object(write_item, object)


def fail_everywhere(exchange: Exchange, folder: str) -> dict[str, Any]:
    """One save after another fails on one rank, at every place where it can; then one succeeds."""
    rank, found, broken = exchange.rank, {}, ""

    def rule(operation: str, key: str) -> None:
        if broken and operation.startswith("put") and key.startswith(broken):
            raise Unavailable(f"no {key}")

    def position(state: dict[str, Any]) -> Position:
        if state["step"] == -1:
            raise ArithmeticError("not a step")
        return step_of(state)

    writer = RetomaWriter(RuledStore(LocalStore(folder), rule), group=exchange, split=SPLIT, position=position)
    for whose in (1, 0):  # before and after the attempt is open
        odd = {"odd": {1, 2}} if rank == whose else {"odd": 3}
        found[f"leaf {whose}"] = failure(lambda odd=odd: save({**a_state(1, "fsdp"), **odd}, writer))  # type: ignore[misc]
    save(a_state(1, "fsdp"), writer)
    state = a_state(2, "fsdp")
    found["position"] = failure(lambda: save({**state, "step": -1 if rank == 1 else 2}, writer))
    planner = Halves() if rank == 1 else DefaultSavePlanner()
    found["planner"] = failure(lambda: save(state, writer, planner=planner))
    found["text"] = failure(lambda: save({**state, "note": f"of rank {rank}"}, writer))
    found["keys"] = failure(lambda: save({**state, f"of rank {rank}": 1}, writer))
    found["other step"] = failure(lambda: save({**state, "step": rank}, writer))
    broken = "packs/" if rank == 1 else ""
    found["packs"] = failure(lambda: save(state, writer))
    broken = "manifests/" if rank == 0 else ""
    found["manifest"] = failure(lambda: save(state, writer))
    broken = ""
    assert writer.head is not None
    assert writer.head.manifest.position.step == 1
    save(a_state(3, "fsdp"), writer)
    writer.close()
    load(folder, "fsdp", 2, 3)
    return found


def test_what_fails_on_one_rank_fails_on_all_at_once_and_the_next_save_is_whole(tmp_path: Path) -> None:
    found = gang(2, fail_everywhere, str(tmp_path))
    expected = {
        "leaf 1": ("Invalid", "odd: a builtins.set cannot be saved"),
        "leaf 0": ("Invalid", "odd: a builtins.set cannot be saved"),
        "position": ("ArithmeticError", "not a step"),
        "planner": ("Invalid", "Halves.transform_object would not be asked"),
        "text": ("Invalid", "note: rank 1 has other values than rank 0"),
        "keys": ("Invalid", "rank 1 has other keys than rank 0"),
        "other step": ("Invalid", "rank 1 saves"),
        "packs": ("Unavailable", "no packs/"),
        "manifest": ("Unavailable", "no manifests/"),
    }
    for rank in found:
        assert rank.keys() == expected.keys()
        for name, (kind, words) in expected.items():
            assert words in rank[name][1], name
            assert rank[name][0] in (kind, "RetomaError"), name
            assert rank[name][2] < SOON_SECONDS, name
    assert [c.manifest.position.step for c in chain(tmp_path)] == [1, 3]


class Deadly(LocalStore):
    """Ends the process at its second pack."""

    packs = 0

    def put(self, key: str, parts: Any) -> None:
        if key.startswith("packs/"):
            Deadly.packs += 1
            if Deadly.packs == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        super().put(key, parts)


def die_in_a_save(exchange: Exchange, folder: str) -> tuple[str, float]:
    own = host_exchange(silent_seconds=3)
    writer = a_writer(Deadly(folder) if exchange.rank == 1 else folder, own)
    save(a_state(1, "fsdp"), writer)
    begun = time.monotonic()
    with pytest.raises(BaseException):  # noqa: B017, PT011 - torch's: the process group has lost a rank, too
        save(a_state(2, "fsdp"), writer)
    waited = time.monotonic() - begun
    writer.checkpointer.save(a_state(3, "fsdp"))
    with pytest.raises(Unavailable) as caught:
        writer.checkpointer.wait()
    return str(caught.value), waited


@pytest.mark.soak
def test_a_rank_that_dies_in_a_save_fails_it_on_the_others_and_nothing_is_committed(tmp_path: Path) -> None:
    (survived, told), (ended, how) = outcomes(2, die_in_a_save, str(tmp_path))
    assert survived, told
    assert (ended, how) == (False, "a rank died")
    assert "rank 1 is dead" in told[0]
    assert told[1] < SOON_SECONDS
    assert [c.manifest.position.step for c in chain(tmp_path)] == [1]


# Who may save.


def refuse(exchange: Exchange, folder: str) -> list[str]:
    state = a_state(1, "fsdp")
    alone, together = RetomaWriter(folder), a_writer(folder, exchange)
    own = [dist.new_group([0]), dist.new_group([1])][exchange.rank]
    found = [
        failure(lambda: save(state, alone)),
        failure(lambda: save(state, together, no_dist=True)),
        failure(lambda: save({"step": 1}, together, process_group=own)),
    ]
    for writer in (alone, together):  # without collectives DCP wraps nothing
        with pytest.raises(Invalid) as caught:
            save(state, writer, use_collectives=False)
        found.append(("Invalid", str(caught.value), 0.0))
    return [f"{kind}: {message}" for kind, message, _ in found]


@pytest.mark.soak
def test_ranks_that_are_not_those_of_the_group_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    for one in gang(2, refuse, str(tmp_path)):
        alone, without_others, of_a_part, alone_again, without_collectives = one
        assert all(found.startswith("Invalid: ") for found in one)
        assert "there are several" in alone
        assert "there are several" in alone_again
        assert "group=exchange" in alone_again, "it says what to do"
        for found in (without_others, of_a_part):
            assert "to save" in found
        assert "without the others" in without_collectives
    assert not list(tmp_path.rglob("*.json"))


def save_as_one(exchange: Exchange, folder: str) -> None:
    """A group of one rank needs no exchange."""
    with RetomaWriter(folder) as writer:
        save({"w": placed("w", torch.arange(6.0), "fsdp")}, writer)
    into = {"w": placed("w", torch.zeros(6), "fsdp")}
    dcp_load(into, storage_reader=RetomaReader(folder))
    assert of_rank(into)["w"].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_group_of_one_rank_saves_its_sharded_tensors(tmp_path: Path) -> None:
    gang(1, save_as_one, str(tmp_path))
    found = restore_newest(LocalStore(tmp_path), "default")
    assert found is not None
    assert found["w"].tolist() == [0, 1, 2, 3, 4, 5]


def fence(exchange: Exchange, folder: str) -> tuple[str, str, float]:
    with host_exchange() as own, a_writer(folder, own) as new:
        old = a_writer(folder, exchange)
        save(a_state(1, "fsdp"), old)
        save(a_state(2, "fsdp"), new)
        found = failure(lambda: save(a_state(3, "fsdp"), old))
        save(a_state(4, "fsdp"), new)
    return found


def save_behind(exchange: Exchange, folder: str) -> list[Any]:
    """Saves in threads; a state that changes after the call; one that begins beside another."""
    reached, opened = threading.Event(), threading.Event()

    def rule(operation: str, key: str) -> None:
        if operation == "put" and key.startswith("packs/") and not opened.is_set():
            reached.set()
            assert opened.wait(60)

    with a_writer(RuledStore(LocalStore(folder), rule), exchange) as writer:
        state = a_state(1, "tp-fsdp")
        first: Any = dcp_async_save(state, storage_writer=writer, checkpoint_id="one")
        for tensor in state["model"].values():
            of_rank(tensor).zero_()
        assert reached.wait(30)
        dist.barrier()  # both have begun to write
        second: Any = dcp_async_save(a_state(2, "tp-fsdp"), storage_writer=writer)
        refused = failure(lambda: second.result(30))
        opened.set()
        first.result(30)
        third: Any = dcp_async_save(a_state(3, "tp-fsdp"), storage_writer=writer)
        third.result(30)
    load(folder, "tp-fsdp", exchange.size, 1, checkpoint="one")
    load(folder, "tp-fsdp", exchange.size, 3)
    return [refused]


def cache_plans(exchange: Exchange, folder: str) -> None:
    with a_writer(folder, exchange) as writer:
        for step in (1, 2, 3):
            save(a_state(step, "fsdp"), writer, planner=DefaultSavePlanner(enable_plan_caching=True))
            load(folder, "fsdp", exchange.size, step)


def damage(exchange: Exchange, folder: str) -> list[Any]:
    """A byte of rank 1's part of the newest checkpoint flips."""
    with a_writer(folder, exchange) as writer:
        save(a_state(1, "fsdp"), writer)
        save(a_state(2, "fsdp"), writer)
    if exchange.rank == 0:
        (pack,) = Path(folder).glob("packs/*/00000001-r0001-*")
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 1
        pack.write_bytes(data)
    dist.barrier()
    reader = load(folder, "fsdp", 2, 1)
    into = a_state(1, "fsdp", blank=True)
    before = bits(of_rank(into))
    found = failure(lambda: dcp_load(into, storage_reader=RetomaReader(folder, "1/1")))
    assert bits(of_rank(into)) == before, "nothing was changed on any rank"
    with host_exchange() as own, a_writer(folder, own) as again:
        load(again.checkpointer, "fsdp", 2, 1)
    assert reader.restored is not None
    return [found, str(reader.restored.checkpoint.ref)[:15]]


def several(exchange: Exchange, folder: str) -> dict[str, Any]:
    """Scenarios of their own that share a gang, which takes as long to start as they do."""
    found: dict[str, Any] = {}
    for name, work in {"fence": fence, "behind": save_behind, "cache": cache_plans, "damage": damage}.items():
        with host_exchange() as own:
            found[name] = work(own, f"{folder}/{name}")
    return found


def test_fencing_threads_caches_and_damage_are_as_for_one_rank(tmp_path: Path) -> None:
    for rank in gang(2, several, str(tmp_path)):
        assert rank["fence"][0] == "Fenced"
        assert rank["behind"][0][:2] == ("Invalid", "another save is in flight")
        assert rank["damage"][0][0] == "Corrupt"
        assert rank["damage"][1] == "000001/00000000"
    assert [c.manifest.position.step for c in chain(tmp_path / "fence")] == [1, 2, 4]
    assert [c.manifest.kind for c in chain(tmp_path / "cache")] == ["base", "delta", "delta"]
