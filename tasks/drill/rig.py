"""Where a drill happens: a stack of its own, with two nodes that train; or the user's stack."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

import psutil

from infra import stack
from infra.deploy import deploy
from infra.processes import PROCESS_MARK, ProcessTable, Record, stop
from infra.servers import Component, ask, components
from infra.settings import Settings
from tasks.drill.folder import NAMESPACES, STACK
from tasks.drill.seaweed import BUCKET, Seaweed
from tasks.drill.wires import PEERS, WIRES, Hub, Server, Wires, hub, wires
from training.errors import Invalid, Unavailable

NODES = ("node-1", "node-2")
OURS = ("RETOMA_", "PREFECT_", "MLFLOW_", "AWS_")
READY_SECONDS = 60.0
POLL_SECONDS = 0.1
Report = Callable[[str], None]


@dataclass
class Node:
    """A machine that trains: a worker of pool gpu with wires of its own to each server."""

    name: str
    wires: Wires
    component: Component
    table: ProcessTable

    def start(self) -> None:
        """Start its worker and wait until the server has heard of it."""
        part = self.component
        record = self.table.start(self.name, part.command, part.environment, part.cwd)
        _wait_ready(part, self.table, record, READY_SECONDS)

    def worker(self) -> psutil.Process | None:
        """Its worker's process, if it lives."""
        found = self.table.find(self.name)
        return found[1] if found else None

    def processes(self) -> list[psutil.Process]:
        """All that lives on it, the worker first."""
        worker = self.worker()
        others = [process for process in self.table.members(self.name) if process != worker]
        return [worker, *others] if worker is not None else others

    def cut(self) -> None:
        """Nothing passes between it and anybody else."""
        for wire in WIRES:
            if self.wires.has(wire):
                self.wires.cut(wire)

    def heal(self) -> None:
        """Everything passes again."""
        for wire in WIRES:
            if self.wires.has(wire):
                self.wires.heal(wire)


@dataclass
class Rig:
    """Servers and nodes for drills.

    Attributes:
        settings: of its stack.
        folder: of the drill: job files, orders, steps.
        own: whether the stack is the drill's own; only then are servers, workers and wires touched.
    """

    settings: Settings
    folder: Path
    own: bool
    nodes: dict[str, Node] = field(default_factory=dict)
    seaweed: Seaweed | None = None
    hub: Hub | None = None

    @property
    def joins_nodes(self) -> bool:
        """Whether a group over several nodes is possible."""
        alike = len({node.wires.kind for node in self.nodes.values()}) <= 1
        return self.own and alike and all(node.wires.reach_each_other for node in self.nodes.values())

    @property
    def parts_nodes(self) -> bool:
        """Whether a node can be cut off from the others."""
        return self.own and all(node.wires.has(PEERS) for node in self.nodes.values())

    def mend(self) -> None:
        """All wires are whole, and each node has a worker."""
        for node in self.nodes.values():
            node.heal()
            if node.worker() is None:
                node.start()

    @property
    def about(self) -> dict[str, str]:
        """What it is made of, for the report."""
        kinds = {node.wires.kind for node in self.nodes.values()}
        return {
            "stack": "of the drill's own" if self.own else "the user's",
            "store": "SeaweedFS (S3)" if self.seaweed else self.settings.checkpoints_url,
            "nodes": f"{len(self.nodes)} gpu workers" if self.nodes else "the stack's gpu worker",
            "partitions by": ", ".join(sorted(kinds)) or "none possible here",
        }

    def node_of(self, process: psutil.Process) -> Node | None:
        """The node that a process lives on."""
        try:
            mark = process.environ().get(PROCESS_MARK, "")
        except psutil.Error:
            return None
        return self.nodes.get(mark.partition(":")[0])

    def kill_server(self, name: str) -> None:
        """SIGKILL a server of the stack."""
        found = ProcessTable(self.settings.state_dir).find(name)
        if found is None:
            raise Unavailable(f"no process {name} in the stack")
        found[1].kill()
        found[1].wait(10)

    def start_server(self, name: str) -> None:
        """Start it again on its old port, and wait until it answers."""
        table = ProcessTable(self.settings.state_dir)
        part = next(part for part in components(self.settings) if part.name == name)
        record = table.start(name, part.command, part.environment, part.cwd)
        _wait_ready(part, table, record, self.settings.start_timeout_seconds)


@contextlib.contextmanager
def own_rig(home: Path, folder: Path, report: Report, *, s3: bool = False) -> Iterator[Rig]:
    """A stack in `folder`, which ends with the block. Until then this process's environment leads to it.

    Raises:
        Invalid: SeaweedFS is wanted and not installed.
        Unavailable: a server does not start.
    """
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith(OURS)]:
        del os.environ[name]  # none of it may lead to the user's servers or stores
    state_dir = folder / STACK
    state_dir.mkdir(parents=True, exist_ok=True)
    table = ProcessTable(state_dir)
    seaweed = Seaweed(table, folder / "seaweed") if s3 else None
    settings = Settings(
        home=home,
        state_dir=state_dir,
        checkpoints_url=f"s3://{BUCKET}" if s3 else str(folder / "checkpoints"),
        s3_endpoint_url=seaweed.url if seaweed else None,
        s3_region="us-east-1" if seaweed else None,
        cpu_limit=8,
    )
    rig = Rig(settings, folder, own=True, seaweed=seaweed)
    try:
        if seaweed is not None:
            report("starting SeaweedFS")
            # it asks for no credentials, but clients do not work without any
            os.environ |= {"AWS_ACCESS_KEY_ID": "drill", "AWS_SECRET_ACCESS_KEY": "drill"}
            os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
            seaweed.start()
        report(f"starting a stack in {state_dir}")
        stack.up(settings)
        deploy(settings)
        settings.export()
        _replace_worker(rig, table)
        report(f"{len(rig.nodes)} nodes; partitions by {rig.about['partitions by']}")
        yield rig
    finally:
        for node in rig.nodes.values():
            node.wires.close()
        if rig.hub is not None:
            rig.hub.close()
        stack.down(settings)
        if seaweed is not None:
            seaweed.remove_sockets()
        os.environ.clear()
        os.environ.update(before)


def users_rig(settings: Settings, folder: Path) -> Rig:
    """The user's own stack, which stays as it is.

    Raises:
        Invalid: its servers are elsewhere, so that nothing of it can be reached from here.
    """
    if settings.prefect_api_url is not None:
        raise Invalid("--here needs the local stack: faults reach processes of this machine only")
    stack.up(settings)
    deploy(settings)
    settings.export()
    return Rig(settings, folder, own=False)


def _replace_worker(rig: Rig, table: ProcessTable) -> None:
    """Two nodes instead of the stack's worker, which has no wires that could be cut."""
    settings = rig.settings
    part = next(part for part in components(settings) if part.name == "worker-gpu")
    stop(table.members(part.name), settings.stop_grace_seconds)
    ports = settings.ports()
    assert ports is not None  # noqa: S101 - it is up
    servers: dict[Server, int] = {"prefect": ports.prefect, "mlflow": ports.mlflow}
    if rig.seaweed is not None:
        servers["store"] = rig.seaweed.port
    rig.hub = hub(rig.folder / NAMESPACES)
    for name in NODES:
        found = wires(servers, rig.folder / NAMESPACES, rig.hub)
        rig.nodes[name] = Node(name, found, _component(part, name, settings, found), table)
        rig.nodes[name].start()


def _component(part: Component, name: str, settings: Settings, found: Wires) -> Component:
    addresses = {
        "RETOMA_PREFECT_API_URL": f"{found.url('prefect')}/api",
        "RETOMA_MLFLOW_URL": found.url("mlflow"),
        "PREFECT_API_URL": f"{found.url('prefect')}/api",
        "MLFLOW_TRACKING_URI": found.url("mlflow"),
        "NO_PROXY": "*",
        "RETOMA_NODE_ADDRESS": found.address,
    }
    if found.has(PEERS):
        addresses["GLOO_SOCKET_IFNAME"] = PEERS  # the machine's name leads to none of its interfaces
    if found.has("store"):
        moved = settings.model_copy(update={"s3_endpoint_url": found.url("store")})
        addresses |= moved.s3_variables()
    command = list(part.command)
    command[command.index("--name") + 1] = name
    return replace(
        part,
        name=name,
        command=(*found.prefix, *command),
        environment={**part.environment, **addresses},
        check=lambda record: _not_heard(settings, name, record),
    )


def _not_heard(settings: Settings, name: str, record: Record) -> str | None:
    """None when the server has heard of this worker since it was started."""
    ports = settings.ports()
    assert ports is not None  # noqa: S101 - it is up
    for worker in ask(ports.prefect, "POST", "/api/work_pools/gpu/workers/filter", {}):
        heard = datetime.fromisoformat(worker["last_heartbeat_time"]).timestamp()
        if worker["name"] == name and heard >= record.started_seconds:
            return None
    return "has not reported to the Prefect server yet"


def _wait_ready(part: Component, table: ProcessTable, record: Record, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            reason = part.check(record)
        except Unavailable as error:
            reason = error.message
        if reason is None:
            return
        if time.monotonic() > deadline or table.find(part.name) is None:
            raise Unavailable(f"{part.name} is not ready: {reason}\n{table.tail(part.name)}")
        time.sleep(POLL_SECONDS)
