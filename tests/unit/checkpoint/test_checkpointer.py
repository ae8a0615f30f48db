"""The face of the engine, as a stranger's training loop uses it."""

from __future__ import annotations

import runpy
import signal
import threading
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.bits import bits
from tests.support.faults import Gate, RuledStore, fail_on, run_script, start_script
from training.checkpoint import Health, IncrementalCheckpointer, MetricPoint, Position
from training.checkpoint.history import read_lineage
from training.checkpoint.store import LocalStore, MemoryStore
from training.errors import Fenced, Invalid, Unavailable


def test_the_two_argument_form_gives_the_newest_state_back_here_and_in_a_new_object(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    checkpointer = IncrementalCheckpointer(save_dir=str(tmp_path / "checkpoints"), interval=5)
    for epoch in range(1, 11):
        with torch.no_grad():
            model.weight += 1
        if checkpointer.due(epoch):
            checkpointer.save_checkpoint(model.state_dict(), epoch=epoch)
    state = checkpointer.restore()
    assert state is not None
    assert state.epoch == 10
    assert bits(dict(state)) == bits(dict(model.state_dict()))
    checkpointer.close()
    with IncrementalCheckpointer(save_dir=str(tmp_path / "checkpoints"), interval=5) as later:
        again = later.restore()
    assert again is not None
    assert again.epoch == 10
    fresh = nn.Linear(3, 2)
    fresh.load_state_dict(again)
    assert bits(dict(fresh.state_dict())) == bits(dict(model.state_dict()))
    assert len(LocalStore(tmp_path / "checkpoints").list("manifests/")) == 2


FOREIGN_LOOP = """
import sys, torch
from training.checkpoint import IncrementalCheckpointer
torch.manual_seed(0)
model = torch.nn.Linear(4, 1); optimizer = torch.optim.Adam(model.parameters())
checkpointer = IncrementalCheckpointer(sys.argv[1])
state = checkpointer.restore()
if state is not None:
    model.load_state_dict(state["model"]); optimizer.load_state_dict(state["optimizer"])
for epoch in range(state.epoch if state is not None else 0, int(sys.argv[2])):
    optimizer.zero_grad(); model(torch.ones(2, 4) * epoch).sum().backward(); optimizer.step()
    checkpointer.save_checkpoint({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, epoch + 1)
checkpointer.close()
"""


def test_a_foreign_loop_of_a_dozen_lines_resumes_bit_exact_in_a_new_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "loop.py"
    script.write_text(FOREIGN_LOOP)
    for folder, epochs in (("straight", "5"), ("cut", "2")):
        monkeypatch.setattr("sys.argv", ["loop.py", str(tmp_path / folder), epochs])
        runpy.run_path(str(script))
    run_script(FOREIGN_LOOP, tmp_path / "cut", 5)
    heads = [read_lineage(LocalStore(tmp_path / name)).head for name in ("straight", "cut")]
    assert heads[0] is not None
    assert heads[1] is not None
    assert heads[1].manifest.state_digest == heads[0].manifest.state_digest
    assert heads[1].ref.token == 2
    assert len(FOREIGN_LOOP.strip().splitlines()) < 15


WITHOUT_CLOSE = """
import sys, time, torch
from training.checkpoint import IncrementalCheckpointer, open_store
class Slow:
    def __init__(self, inner): self.inner, self.url = inner, inner.url
    def __getattr__(self, name): return getattr(self.inner, name)
    def put_if_absent(self, key, data):
        if key.startswith("manifests/"): time.sleep(0.3)
        return self.inner.put_if_absent(key, data)
checkpointer = IncrementalCheckpointer(Slow(open_store(sys.argv[1])))
for n in range(2):
    checkpointer.save({f"w{i}": torch.full((100_000,), float(i + n)) for i in range(5)})
raise SystemExit("a loop that fails")
"""


def test_a_script_that_ends_without_close_still_commits_the_save_in_flight(tmp_path: Path) -> None:
    assert run_script(WITHOUT_CLOSE, tmp_path, check=False).stderr == "a loop that fails\n"
    with IncrementalCheckpointer(tmp_path) as later:
        state = later.restore()
    assert state is not None
    assert state.checkpoint.ref.sequence == 1
    assert [state[f"w{i}"][0].item() for i in range(5)] == [1.0, 2.0, 3.0, 4.0, 5.0]


KILLED = """
import sys, torch
from training.checkpoint import IncrementalCheckpointer
told = lambda committed: print(committed.ref.sequence, flush=True)
checkpointer = IncrementalCheckpointer(sys.argv[1], deltas_per_base=3, on_saved=told)
weight = torch.zeros(50_000)
while True:
    weight += 1
    checkpointer.save({"weight": weight})
"""


def test_a_process_killed_in_the_middle_leaves_its_acknowledged_state_or_a_newer_one(tmp_path: Path) -> None:
    process = start_script(KILLED, tmp_path)
    assert process.stdout is not None
    acknowledged = [int(process.stdout.readline()) for _ in range(6)][-1]
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    with IncrementalCheckpointer(tmp_path) as later:
        state = later.restore()
    assert state is not None
    assert state.skipped == ()
    assert state.checkpoint.ref.sequence >= acknowledged
    assert state["weight"].unique().tolist() == [state.checkpoint.ref.sequence + 1.0]


def test_save_returns_before_the_store_has_anything_and_the_next_save_waits_for_it() -> None:
    gate = Gate("put", "packs/")
    store = RuledStore(MemoryStore(), gate)
    done = threading.Event()
    checkpointer = IncrementalCheckpointer(store)
    checkpointer.save({"w": torch.ones(3)})
    assert gate.reached.wait(60)
    assert store.list("manifests/") == []

    def second() -> None:
        checkpointer.save({"w": torch.zeros(3)})
        done.set()

    thread = threading.Thread(target=second)
    thread.start()
    assert not done.wait(0.2)  # cannot be early: the first is still behind the gate
    gate.opened.set()
    thread.join(60)
    checkpointer.close()
    assert len(store.list("manifests/")) == 2


def test_a_fenced_attempt_stays_fenced_and_writes_no_manifest() -> None:
    store = MemoryStore()
    old = IncrementalCheckpointer(store)
    old.save({"w": torch.zeros(3)})
    old.wait()
    with IncrementalCheckpointer(store) as new:
        new.restore()
        old.save({"w": torch.ones(3)})
        for _ in range(3):
            with pytest.raises(Fenced):
                old.save({"w": torch.ones(3)})
        for call in (old.wait, old.restore, old.close):
            with pytest.raises(Fenced):
                call()
        new.save({"w": torch.full((3,), 2.0)})
    assert [key for key, _ in store.list("manifests/")] == [
        "manifests/000001/00000000.json",
        "manifests/000002/00000001.json",
    ]


def test_metrics_health_and_position_come_back_also_when_they_are_not_finite() -> None:
    store = MemoryStore()
    with IncrementalCheckpointer(store, job={"name": "j"}, data={"digest": "d"}) as checkpointer:
        checkpointer.save(
            {},
            position=Position(epoch=3, step=40, sample=999),
            metrics=[MetricPoint(step=39, values={"loss": float("nan"), "norm": float("inf")})],
            health=Health(finite=False, loss=float("nan")),
            meta={"metrics": {"best": float("-inf"), "none": None}},
        )
    with IncrementalCheckpointer(store) as later:
        state = later.restore()
    assert state is not None
    manifest = state.manifest
    assert state.position == Position(epoch=3, step=40, sample=999)
    assert str(manifest.metrics[0].values) == "{'loss': nan, 'norm': inf}"
    assert str(manifest.health.loss) == "nan"
    assert manifest.meta == {"metrics": {"best": "-Infinity", "none": None}}
    assert (manifest.job, manifest.data) == ({"name": "j"}, {"digest": "d"})


def test_a_state_without_any_key_is_a_checkpoint_too() -> None:
    store = MemoryStore()
    for _ in range(3):
        with IncrementalCheckpointer(store) as checkpointer:
            state = checkpointer.restore()
            assert state == (None if checkpointer.token == 1 else {})
            if checkpointer.token == 1:
                checkpointer.save({})


@pytest.mark.parametrize("epoch", [-1, 1.5, None, "3"])
def test_an_epoch_that_is_no_whole_number_is_refused(epoch: Any) -> None:
    with IncrementalCheckpointer(MemoryStore()) as checkpointer, pytest.raises(Invalid, match="whole number"):
        checkpointer.save_checkpoint({}, epoch=epoch)


def test_an_epoch_held_as_a_tensor_or_numpy_number_is_taken() -> None:
    with IncrementalCheckpointer(MemoryStore()) as checkpointer:
        checkpointer.save_checkpoint({}, epoch=torch.tensor(7))  # type: ignore[arg-type]
        state = checkpointer.restore()
    assert state is not None
    assert state.epoch == 7


@pytest.mark.parametrize("options", [{"interval": 0}, {"deltas_per_base": -1}, {"encode_threads": 0}])
def test_impossible_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(Invalid, match="at least"):
        IncrementalCheckpointer(MemoryStore(), **options)  # type: ignore[arg-type]


def test_a_closed_checkpointer_says_so() -> None:
    store = MemoryStore()
    checkpointer = IncrementalCheckpointer(store)
    checkpointer.save({})
    checkpointer.close()
    checkpointer.close()
    with pytest.raises(Invalid, match="is closed"):
        checkpointer.save({})
    assert checkpointer.restore() == {}
    assert len(store.list("manifests/")) == 1


def test_the_error_of_the_loop_is_not_hidden_by_that_of_the_save() -> None:
    store = RuledStore(MemoryStore(), fail_on("put", "packs/", Unavailable("503")))

    def loop() -> None:
        with IncrementalCheckpointer(store) as checkpointer:
            checkpointer.save({"w": torch.ones(3)})
            raise KeyError("of the loop")

    with pytest.raises(KeyError, match="of the loop"):
        loop()


def test_an_interrupted_wait_keeps_the_save_and_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate("put", "packs/")

    def rule(operation: str, key: str) -> None:
        gate(operation, key)
        if operation == "put":
            raise Unavailable("503")

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    checkpointer = IncrementalCheckpointer(RuledStore(MemoryStore(), rule))
    checkpointer.save({"w": torch.ones(3)})
    with monkeypatch.context() as patch:
        patch.setattr(futures, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.wait()
    gate.opened.set()
    with pytest.raises(Unavailable, match="503"):
        checkpointer.close()


def test_no_thread_is_left_by_a_closed_checkpointer() -> None:
    before = set(threading.enumerate())
    with IncrementalCheckpointer(MemoryStore(), encode_threads=3) as checkpointer:
        checkpointer.save({f"w{n}": torch.ones(10_000) for n in range(8)})
        checkpointer.restore()
    assert set(threading.enumerate()) == before


class LostAnswer(MemoryStore):
    """Writes the seal, and the answer is lost on the way."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        written = super().put_if_absent(key, data)
        if written and key.endswith("seal.json"):
            raise Unavailable("the answer was lost")
        return written


def test_an_attempt_whose_seal_got_no_answer_can_be_opened_again() -> None:
    ticks = iter(range(1000))
    store = LostAnswer()
    checkpointer = IncrementalCheckpointer(store, clock=lambda: float(next(ticks)))
    with pytest.raises(Unavailable, match="lost"):
        checkpointer.restore()
    assert checkpointer.restore() is None
    checkpointer.save({"w": torch.ones(1)})
    checkpointer.close()
    assert [key for key, _ in store.list("tokens/")] == ["tokens/000001.claim.json", "tokens/000001.seal.json"]


MEMORY = """
import resource, torch, sys
from training.checkpoint import IncrementalCheckpointer
def resident_bytes(): return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
state = {f"w{n}": torch.randn(1_250_000) for n in range(10)}
size_bytes = sum(w.numel() * 4 for w in state.values())
with IncrementalCheckpointer(sys.argv[1], deltas_per_base=10) as checkpointer:
    checkpointer.restore()
    before, peak = resident_bytes(), 0
    for step in range(30):
        for w in state.values(): w.view(-1)[step * 1000 : step * 1000 + 200_000].add_(1e-3)
        checkpointer.save(state)
        peak = max(peak, resident_bytes())
    checkpointer.wait()
    peak = max(peak, resident_bytes())
print((peak - before) / size_bytes)
"""


def test_thirty_saves_of_50_mb_hold_two_copies_and_a_little(tmp_path: Path) -> None:
    """F28: two host copies (the reference and the one in flight) and 64 MiB of packs, however many saves."""
    multiple = float(run_script(MEMORY, tmp_path).stdout)
    assert multiple < 2 + 64 * 2**20 / 50e6 + 0.5


class Overwriting(MemoryStore):
    """A store that takes put-if-absent for put."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        there = self.exists(key)
        self._objects[key] = data
        return not there


def test_a_store_that_overwrites_is_refused_before_anything_is_claimed() -> None:
    store = Overwriting()
    with IncrementalCheckpointer(store) as checkpointer, pytest.raises(Invalid, match="does not honour"):
        checkpointer.restore()
    assert store.list("tokens/") == []


@pytest.mark.parametrize("operation", ["list", "get", "read"])
@pytest.mark.parametrize("prefix", ["manifests/", "packs/", "tokens/"])
def test_a_store_that_does_not_answer_is_never_taken_for_an_empty_one(operation: str, prefix: str) -> None:
    inner = MemoryStore()
    with IncrementalCheckpointer(inner) as checkpointer:
        checkpointer.save({"w": torch.ones(5_000)})
    with IncrementalCheckpointer(inner) as second:
        second.restore()
    store = RuledStore(inner, fail_on(operation, prefix, Unavailable("503")))
    with IncrementalCheckpointer(store) as later:
        try:
            state = later.restore()
        except Unavailable:
            state = later.restore()  # asked again, it answers
        assert state is not None
        assert state.skipped == ()
    assert len(inner.list("tokens/")) == 6  # one claim and one seal each, also where the store was asked twice


def test_a_token_that_nobody_claimed_is_refused_since_nothing_would_fence_it() -> None:
    store = MemoryStore()
    checkpointer = IncrementalCheckpointer(store, token=3)
    with pytest.raises(Invalid, match="token 3 was not claimed"):
        checkpointer.restore()
    assert not store.list("tokens/")
