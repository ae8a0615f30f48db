"""What a save of an FSDP2 training on several ranks costs: retoma beside torch.distributed.checkpoint.

The same parameters and moments, the same steps between two saves, gloo ranks on one machine. Each engine in a group
of its own, one at a time.
"""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import statistics
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from benchmarks.measure import MB, size_of
from training.checkpoint import IncrementalCheckpointer
from training.checkpoint.manifest import Position
from training.checkpoint.ranks.tcp import LOOPBACK, TcpExchange, host_store
from training.checkpoint.state.parts import boxes_of
from training.config import JobConfig, load_config
from training.parallel.ranks import standing
from training.state import model_state, optimizer_state
from training.trainer import Trainer

HOME = Path(__file__).parents[1]
CHAIN = 8  # deltas behind the base, in the state that is restored
CHAINS = 3  # saved, one after the other
RESTORES = 3
LONGEST_SECONDS = 600.0  # that the ranks of an engine may take
Metrics = dict[str, float]


class RankEngine(ABC):
    """Saves numbered states of a group into a folder, and restores the last. Every rank makes the same calls."""

    def __init__(self, folder: Path, exchange: TcpExchange) -> None:
        self.folder, self.exchange = folder, exchange
        self.commits_ms: list[float] = []  # on rank 0: what the commit itself takes, see the engines
        self.puts_ms: list[float] = []  # of it in the store
        self.told: list[float] = []  # when this rank had stored its share of each save
        self.posted: list[float] = []  # on rank 0: when all could know of each commit

    def gather(self) -> None:
        """When all is saved. One clock for all ranks, on one machine."""
        told: list[Any] = [None] * self.exchange.size
        dist.all_gather_object(told, self.told)
        if self.posted:
            self.commits_ms = [1000 * (end - max(begun)) for end, *begun in zip(self.posted, *told, strict=True)]

    @abstractmethod
    def save(self, state: dict[str, Any], number: int) -> None:
        """Returns when the training may go on."""

    @abstractmethod
    def wait(self) -> None:
        """Returns when the last save is stored."""

    @abstractmethod
    def restore(self, state: dict[str, Any], number: int) -> None:
        """Read the last state that was saved, sharded as `state` is."""


class Retoma(RankEngine):
    """`IncrementalCheckpointer` with a group, one encoding thread a rank."""

    def __init__(self, folder: Path, exchange: TcpExchange) -> None:
        super().__init__(folder, exchange)
        self._checkpointer = self._open()
        self._checkpointer.restore()  # opens the store: once a run, not a part of a save
        self._time_commits()

    def save(self, state: dict[str, Any], number: int) -> None:
        self._checkpointer.save(state, position=Position(step=number))

    def wait(self) -> None:
        self._checkpointer.wait()

    def restore(self, state: dict[str, Any], number: int) -> None:
        restored = self._checkpointer.restore(boxes_of(state).get)
        assert restored is not None
        assert restored.position.step == number

    def _open(self) -> IncrementalCheckpointer:
        return IncrementalCheckpointer(
            self.folder, run="bench", deltas_per_base=CHAIN, group=self.exchange, split=["model", "optimizer/state"]
        )

    def _time_commits(self) -> None:
        attempt: Any = self._checkpointer._attempt
        messages, write, store = attempt._messages, attempt._write_packs, attempt.store
        put_pack, put, tell_outcome = store.put, store.put_if_absent, messages.tell_outcome
        stored = [0.0]

        def timed_pack(key: str, parts: Any) -> None:
            put_pack(key, parts)
            stored[0] = time.perf_counter()

        def timed_write(*arguments: Any) -> Any:
            written = write(*arguments)  # rank 0 puts the parts together in it: that is a part of the commit
            self.told.append(stored[0])
            return written

        def timed_outcome(sequence: int, outcome: Any) -> None:
            tell_outcome(sequence, outcome)
            self.posted.append(time.perf_counter())

        def timed_put(key: str, data: bytes) -> bool:
            started = time.perf_counter()
            done = put(key, data)
            self.puts_ms.append(1000 * (time.perf_counter() - started))
            return bool(done)

        attempt._write_packs, messages.tell_outcome = timed_write, timed_outcome
        store.put, store.put_if_absent = timed_pack, timed_put


class DcpSave(RankEngine):
    """`dcp.save`, every rank its shards."""

    def save(self, state: dict[str, Any], number: int) -> None:
        save(state, storage_writer=self._writer(number))

    def wait(self) -> None:
        """It waits by itself."""

    def restore(self, state: dict[str, Any], number: int) -> None:
        load(state, checkpoint_id=self.folder / str(number))

    def _writer(self, number: int) -> FileSystemWriter:
        writer = FileSystemWriter(self.folder / str(number))
        finish = writer.finish

        def timed(*arguments: Any, **named: Any) -> None:
            started = time.perf_counter()
            finish(*arguments, **named)
            self.commits_ms.append(1000 * (time.perf_counter() - started))

        writer.finish = timed  # type: ignore[method-assign]
        return writer


class DcpAsyncSave(DcpSave):
    """`dcp.async_save`, with a process group of its own: on that of the training its thread locked all ranks up."""

    _pending: Any = None

    def __init__(self, folder: Path, exchange: TcpExchange) -> None:
        super().__init__(folder, exchange)
        self._group = dist.new_group(backend="gloo")

    def save(self, state: dict[str, Any], number: int) -> None:
        self.wait()
        self._pending = async_save(state, storage_writer=self._writer(number), process_group=self._group)

    def wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


ENGINES: dict[str, Callable[[Path, TcpExchange], RankEngine]] = {
    "retoma": Retoma,
    "dcp.save": DcpSave,
    "dcp.async_save": DcpAsyncSave,
}


def measure_saves(
    name: str, world: int, gap_steps: int, warm_up_steps: int, corpus: Path, scratch: Path
) -> Metrics:
    """Save after every `gap_steps` steps, and restore; on `world` ranks.

    Returns:
        `bytes_ratio`: written by a delta save of all ranks together, in parts of the raw state. `stall_ms`: the
        slowest rank stands still, median of the saves that are deltas, as in all that follow. `save_ms`: until all
        is stored. `commit_ms`: of the first rank's work, see the engines. `restore_ms`: of the slowest rank, after
        `CHAIN` deltas.
    """
    store, port = host_store()
    folder = scratch / f"ranks-{name}"
    folder.mkdir(parents=True)
    arguments = (name, world, gap_steps, warm_up_steps, corpus, folder, port)
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(world)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + LONGEST_SECONDS
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            for one in ranks:
                one.kill()
            raise RuntimeError(f"the ranks of {name} have not ended after {LONGEST_SECONDS:g} s")
        if process.exitcode:
            raise RuntimeError(f"a rank of {name} ended with exit code {process.exitcode}")
    del store
    found: Metrics = json.loads(folder.with_suffix(".json").read_text())
    return found


def config_of(world: int) -> JobConfig:
    """The GPT of the engine's own dense sequence, sharded."""
    sizes = ("params.n_layer=5", "params.d_model=256", "params.context=64", "batch_size=8", "clip_grad_norm=null")
    changes = ["epochs=1000", "threads=1", "params.learning_rate=0.001", "params.warmup_fraction=0", *sizes]
    return load_config(
        HOME / "training/jobs/char_gpt.yaml", [*changes, f"parallel.world={world}", "parallel.data=fsdp"]
    )


def _rank(
    rank: int, name: str, world: int, gap_steps: int, warm_up_steps: int, corpus: Path, folder: Path, port: int
) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    client: Any = dist.TCPStore(LOOPBACK, port, is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", store=dist.distributed_c10d.PrefixStore("bench", client), rank=rank, world_size=world
    )
    exchange = TcpExchange(LOOPBACK, port, rank, world)
    gc.freeze()  # as in ranks of retoma; for all engines, or each would pay for torch's half a million objects
    config = config_of(world)
    trainer = Trainer(config, corpus, standing(config.parallel, exchange, torch.device("cpu")))
    found = _measure(ENGINES[name](folder, exchange), trainer, gap_steps, warm_up_steps, folder)
    if rank == 0:
        folder.with_suffix(".json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _measure(engine: RankEngine, trainer: Trainer, gap_steps: int, warm_up_steps: int, folder: Path) -> Metrics:
    steps = _Steps(trainer)
    steps.take(warm_up_steps)
    stalls, walls, sizes = [], [], []
    saves = CHAINS * (CHAIN + 1)
    for number in range(saves):
        before = size_of(folder)
        dist.barrier()
        started = time.perf_counter()
        engine.save(_state(trainer), number)
        stalls.append(_slowest(time.perf_counter() - started))
        engine.wait()
        walls.append(_slowest(time.perf_counter() - started))
        dist.barrier()
        sizes.append(size_of(folder) - before)
        dist.barrier()
        if number < saves - 1:
            steps.take(gap_steps)
    engine.gather()

    def deltas(values: Sequence[float]) -> list[float]:
        return [value for number, value in enumerate(values) if number % (CHAIN + 1)]

    state = _state(trainer)
    restores = []
    for _ in range(RESTORES):
        dist.barrier()
        started = time.perf_counter()
        engine.restore(state, saves - 1)
        restores.append(_slowest(time.perf_counter() - started))
    state_bytes = _whole_bytes(state)
    found = {
        "bytes_ratio": statistics.fmean(deltas(sizes)) / state_bytes,
        "base_ratio": sizes[0] / state_bytes,
        "stall_ms": 1000 * statistics.median(deltas(stalls)),
        "save_ms": 1000 * statistics.median(deltas(walls)),
        "commit_ms": statistics.median(deltas(engine.commits_ms) or [math.nan]),  # NaN: not told by this engine
        "commit_put_ms": statistics.median(deltas(engine.puts_ms) or [math.nan]),
        "restore_ms": 1000 * statistics.median(restores),
        "state_mb": state_bytes / MB,
    }
    return {name: value for name, value in found.items() if not math.isnan(value)}


class _Steps:
    """Takes optimizer steps of a training, one epoch after the other."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._position = trainer, Position()
        self._batches = trainer.batches(self._position)

    def take(self, count: int) -> None:
        trainer = self._trainer
        for _ in range(count):
            trainer.optimizer_step(self._batches, trainer.schedule.window_at(self._position))
            before, self._position = self._position, trainer.schedule.after(self._position)
            if self._position.epoch != before.epoch:
                self._batches = trainer.batches(self._position)


def _state(trainer: Trainer) -> dict[str, Any]:
    """Parameters and moments, which every engine can save; DCP takes no tuples and no numbers per rank."""
    moments = optimizer_state(trainer.optimizer, trainer.model)["state"]
    return {"model": model_state(trainer.model), "optimizer": {"state": moments}}


def _whole_bytes(state: dict[str, Any]) -> int:
    """Of all ranks together; a tied weight counts once."""
    moments = [value for values in state["optimizer"]["state"].values() for value in values.values()]
    seen: dict[int, Any] = {}
    for tensor in (*state["model"].values(), *moments):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        seen.setdefault(local.data_ptr(), tensor)
    return sum(tensor.numel() * tensor.element_size() for tensor in seen.values())


def _slowest(seconds: float) -> float:
    told = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return float(told.item())
