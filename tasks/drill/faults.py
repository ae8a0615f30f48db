"""The faults: how each is made, how it is taken back, and what must come after it."""

from __future__ import annotations

import contextlib
import resource
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import psutil

from tasks.drill.fault import ANOTHER, OWN, RANKS, WAKE_SECONDS, WIRE, Fault, Undo, must_end, nothing
from tasks.drill.node_faults import NODE_FAULTS, other_of
from tasks.drill.recording import Injected
from tasks.drill.rig import Node
from tasks.drill.scene import Scene, Victim
from tasks.drill.wires import Server
from training.checkpoint.history import head_ref, read_committed
from training.checkpoint.store import Store
from training.errors import Unavailable

SERVER_AWAY_SECONDS = 5.0
FULL_BYTES = 128 * 1024  # less than a pack, more than what the drilled job writes down


def kill_train(_: Scene, victim: Victim) -> Undo:
    """SIGKILL the training process."""
    victim.training.kill()
    return nothing


def freeze_train(scene: Scene, victim: Victim) -> Undo:
    """SIGSTOP the training process; wake it later, if it is still there."""
    victim.training.send_signal(signal.SIGSTOP)
    return lambda: _wake(scene, victim, [victim.training])


def kill_rank(scene: Scene, victim: Victim) -> Undo:
    """SIGKILL one rank."""
    _any_of(scene, victim).kill()
    return nothing


def freeze_rank(scene: Scene, victim: Victim) -> Undo:
    """SIGSTOP one rank: the others wait for it in a collective. Wake it later, if it is still there."""
    rank = _any_of(scene, victim)
    rank.send_signal(signal.SIGSTOP)
    return lambda: _wake(scene, victim, [rank])


def kill_flow(_: Scene, victim: Victim) -> Undo:
    """SIGKILL the supervisor: the flow process of the range."""
    victim.supervisor.kill()
    return nothing


def kill_node(_: Scene, victim: Victim) -> Undo:
    """SIGKILL everything on the node at once, its worker first, as when a machine dies. It is started again."""
    node = _node(victim)
    for process in (node.worker(), victim.supervisor, victim.training):
        if process is not None:
            process.kill()
    return node.start


def kill_parent(scene: Scene, _: Victim) -> Undo:
    """SIGKILL the flow process of the whole training."""
    psutil.Process(scene.parent_pid()).kill()
    return nothing


def freeze_tree(scene: Scene, victim: Victim) -> Undo:
    """SIGSTOP supervisor and training process; wake them when another attempt has taken over."""
    tree = [victim.supervisor, *victim.below]
    for process in tree:
        process.send_signal(signal.SIGSTOP)

    def wake() -> None:
        before = scene.journal.state(victim.flow_run_id)
        order = list(tree)
        scene.rng.shuffle(order)
        _wake(scene, victim, order)
        after = scene.journal.state(victim.flow_run_id)
        if after != before and (before, after) != ("CANCELLING", "CANCELLED"):
            scene.failures.append(f"token {victim.token}: woke, and its state went from {before} to {after}")

    return wake


def hang(kind: Literal["hang", "hang-gil"]) -> Callable[[Scene, Victim], Undo]:
    """The training process hangs at its next step."""

    def make(scene: Scene, victim: Victim) -> Undo:
        order = scene.orders / f"{_any_of(scene, victim).pid}.{kind}"
        order.touch()
        begun = order.with_name(f"{order.name}.begun")
        scene.wait_for(lambda: True if begun.exists() else None, 30, "a step that hangs")
        return order.unlink

    return make


def partition(*servers: Server) -> Callable[[Scene, Victim], Undo]:
    """The node can't reach these servers any more, and nobody is told."""

    def make(_: Scene, victim: Victim) -> Undo:
        wires = _node(victim).wires
        for server in servers:
            wires.cut(server)

        def heal() -> None:
            for server in servers:
                wires.heal(server)

        return heal

    return make


def slow_disk(scene: Scene, victim: Victim) -> Undo:
    """Each fsync takes a second longer; on S3, each piece of data."""
    if victim.node is not None and victim.node.wires.has("store"):
        wires = victim.node.wires
        wires.delay("store", 0.5)
        return lambda: wires.delay("store", 0.0)
    order = scene.orders / "slow-disk"
    order.touch()
    return order.unlink


def full_disk(_: Scene, victim: Victim) -> Undo:
    """No pack fits any more, as when a quota is used up: the training process's files may not grow so large."""
    writers = victim.ranks or (victim.training,)
    before = victim.training.rlimit(resource.RLIMIT_FSIZE)
    for process in writers:
        process.rlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, before[1]))

    def free() -> None:
        for process in writers:
            with contextlib.suppress(psutil.Error):
                process.rlimit(resource.RLIMIT_FSIZE, before)

    return free


def corrupt_object(scene: Scene, victim: Victim) -> Undo:
    """Flip a byte in the newest pack while nobody writes, then SIGKILL the training process."""
    fall_back = partial(_has_two, scene, victim)
    scene.wait_for(fall_back, 60, "a second checkpoint, to fall back from")
    for process in victim.writing:
        process.send_signal(signal.SIGSTOP)
    try:
        flip_newest_byte(scene.store, scene.run)
    finally:
        victim.training.kill()
    return nothing


def _has_two(scene: Scene, victim: Victim) -> bool | None:
    return True if scene.observer.commits(victim.token) > 1 else None


def flip_newest_byte(store: Store, run: str) -> str:
    """Change one byte in the last pack of the head. Returns its key."""
    ref = head_ref(store)
    if ref is None:
        raise Unavailable(f"run {run} has no checkpoint to damage")
    key = read_committed(store, ref.token, ref.sequence, run).manifest.pack_keys()[-1]
    data = bytearray(store.get(key))
    data[len(data) // 2] ^= 1
    store.delete(key)
    store.put(key, [bytes(data)])
    return key


def restart(name: Literal["prefect", "mlflow"]) -> Callable[[Scene, Victim], Undo]:
    """SIGKILL a server, and start it again some seconds later."""

    def make(scene: Scene, _: Victim) -> Undo:
        scene.rig.kill_server(name)
        time.sleep(SERVER_AWAY_SECONDS)
        return lambda: scene.rig.start_server(name)

    return make


def injected(scene: Scene, fault: Fault, victim: Victim) -> tuple[Injected, Undo]:
    """Make a fault, and note what it hit and when."""
    on_parent = fault.answer == "parent"
    of_node: dict[str, Any] = {}
    node = victim.node
    if fault.is_of_a_node:
        other = other_of(victim)
        pids = (other.agent.pid, *(rank.pid for rank in other.ranks))
        of_node = {"ranks": len(victim.ranks), "named": pids, "grows": fault.grows}
        node = other.node
    elif victim.companions and "ranks" in fault.needs:
        node = None  # any rank, on any node
    parents = scene.journal.parents() if on_parent else []
    at = time.time()
    undo = fault.make(scene, victim)
    if fault.name.startswith("hang"):
        at = time.time()  # not when it was ordered
    return (
        Injected(
            fault=fault.name,
            at=at,
            answer=fault.answer,
            token=None if on_parent else victim.token,
            pid=victim.stepping.pid,
            flow_run_id=parents[-1]["id"] if parents else victim.flow_run_id,
            detail=f"on {node.name}" if node else "",
            **of_node,
        ),
        undo,
    )


def _wake(scene: Scene, victim: Victim, processes: list[psutil.Process]) -> None:
    """SIGCONT, in this order. Whoever was given up must end by itself then."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGCONT)
    must_end(scene, victim, processes, WAKE_SECONDS, f"{WAKE_SECONDS:g} s after they woke")


def _any_of(scene: Scene, victim: Victim) -> psutil.Process:
    """A process that trains: of a group, any of its ranks."""
    return scene.rng.choice(victim.ranks or (victim.training,))


def _node(victim: Victim) -> Node:
    if victim.node is None:
        raise Unavailable("the range runs on no node of the drill")
    return victim.node


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill-train", "SIGKILL the training process", kill_train, quick=True),
        Fault("freeze-train", "SIGSTOP the training process, wake it later", freeze_train, quick=True),
        Fault("hang", "the training process hangs, the interpreter's lock free", hang("hang")),
        Fault("hang-gil", "it hangs in C and keeps the interpreter's lock", hang("hang-gil"), quick=True),
        Fault("kill-rank", "SIGKILL one rank of a group", kill_rank, needs=RANKS),
        Fault("freeze-rank", "SIGSTOP one rank of a group, wake it later", freeze_rank, needs=RANKS),
        Fault("hang-rank", "one rank of a group hangs, the others wait", hang("hang"), needs=RANKS),
        *NODE_FAULTS,
        Fault("kill-flow", "SIGKILL the flow process of a range", kill_flow, quick=True),
        Fault("kill-parent", "SIGKILL the flow process of the training", kill_parent, answer="parent"),
        Fault(
            "freeze-tree", "SIGSTOP a range's processes, wake them after the takeover", freeze_tree, needs=ANOTHER
        ),
        Fault("kill-node", "SIGKILL worker, flow process and training process at once", kill_node, needs=ANOTHER),
        Fault(
            "partition-prefect",
            "a node can't reach Prefect",
            partition("prefect"),
            hold_seconds=90,
            needs=ANOTHER,
        ),
        Fault(
            "partition-store",
            "a node can't reach the store for 15 s",
            partition("store"),
            answer="steps",
            hold_seconds=15,
            needs=WIRE,
        ),
        Fault(
            "partition-both",
            "a node can reach neither Prefect nor MLflow nor the store",
            partition("prefect", "mlflow", "store"),
            hold_seconds=120,
            needs=(*WIRE, "spare"),
        ),
        Fault("slow-disk", "the store answers slowly for 10 s", slow_disk, answer="steps", hold_seconds=10),
        Fault(
            "full-disk",
            "the training process may write no more for 5 s",
            full_disk,
            answer="steps",
            hold_seconds=5,
            needs=("folder",),
        ),
        Fault("corrupt-object", "flip a byte in the newest pack, kill the training process", corrupt_object),
        Fault("restart-prefect", "SIGKILL Prefect, start it again", restart("prefect"), answer="steps", needs=OWN),
        Fault("restart-mlflow", "SIGKILL MLflow, start it again", restart("mlflow"), answer="steps", needs=OWN),
    )
}
