"""The launcher of a group of ranks: `python -m training.group --messages FD`. One rank is `training.process`.

To its supervisor it is the training process: the same line on stdin, the same messages, the same lifeline. It forks
the ranks of its node, musters other nodes where there are any (`training.node`), and says who is to blame when a
rank is dead, frozen, or holds up the others. One group, one token: after a failure another process goes on.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from contextlib import ExitStack
from io import FileIO
from pathlib import Path

from training.errors import Fenced, Preempted, Unavailable
from training.guard import die_with_parent, watch_lifeline
from training.parallel.agent import LocalRanks, launching
from training.parallel.nodes import Node, Nodes
from training.parallel.wire import LOST, STOP, Muster
from training.ports import Done, Failed, Message, Pause, Present, RangeSpec, Regroup, encode_message

TICK_SECONDS = 0.1
REPORT_SECONDS = 0.3  # for the answers of ranks that are about to be killed
ANSWER_SECONDS = 0.02


def main() -> None:
    """Run one group and exit with the code of the error's kind."""
    parser = argparse.ArgumentParser(prog="training.group", description=__doc__)
    parser.add_argument("--messages", type=int, metavar="FD", required=True)
    options = parser.parse_args()
    sys.path.insert(0, str(Path.cwd()))
    die_with_parent()
    with os.fdopen(0, "rb", buffering=0, closefd=False) as stdin:
        spec = RangeSpec.model_validate_json(stdin.readline())
    pipelines = spec.config.parallel.pipeline > 1
    with os.fdopen(options.messages, "wb", buffering=0) as out, launching(pipelines) as folder:
        code = _run(spec, out, folder)
    sys.stderr.flush()
    os._exit(code)  # the interpreter's own end takes a second with torch's threads, and nothing is left to be done


def _run(spec: RangeSpec, out: FileIO, folder: Path) -> int:
    launcher = Launcher(spec, folder, out)
    signal.signal(signal.SIGTERM, lambda *_: launcher.ask_to_leave())
    watch_lifeline(0)
    launcher.say(Pause(what="starting", allowance_seconds=spec.config.supervisor.start_seconds))
    failed = launcher.run()
    if failed is None:
        return 0
    launcher.say(failed)
    print(f"{failed.error}: {failed.message}", file=sys.stderr, flush=True)  # noqa: T201 - the log
    return failed.exception().exit_code


class Launcher:
    """One group of ranks, from the gathering of its nodes to the end of all of them.

    Args:
        spec: what to train, with as many nodes as there may be.
        folder: for files of this process.
        out: the pipe to the supervisor.
    """

    def __init__(self, spec: RangeSpec, folder: Path, out: FileIO) -> None:
        self._spec, self._folder, self._out = spec, folder, out
        self._asked = self._told = False
        self._regroup: str | None = None  # why the group makes room for another one
        self._verdict: str | None = None
        self._report: str | None = None
        self._done: Done | None = None
        self._nodes: Nodes | None = None
        self._names: tuple[str, ...] = ()  # of those that are here, as the supervisor knows them
        self._local: LocalRanks | None = None

    def say(self, message: Message) -> None:
        """Tell the supervisor."""
        self._out.write(encode_message(message))

    def ask_to_leave(self) -> None:
        """From the signal handler."""
        self._asked = True

    def run(self) -> Failed | None:
        """Gather, start the ranks and wait for their end. Returns what went wrong."""
        from training.parallel import meeting  # noqa: F401 - takes seconds, in which no node would be heard

        with ExitStack() as closing:
            others: list[Node] = []
            if self._spec.gathering is not None:
                place = self._spec.gathering
                self._nodes = Nodes(place.host, place.port, place.ticket)
                closing.callback(self._nodes.close)
                others = self._gather(self._nodes, place.last_call_seconds)
                if len(others) + 1 < self._spec.config.parallel.fewest_nodes:
                    return self._too_few(len(others) + 1)
            self._local = self._start(others)
            closing.callback(self._local.close)
            while not self._has_ended(self._local):
                self._local.pump(TICK_SECONDS)
                self._look(self._local)
            self._local.hear_last_words()
            failed = self._failed(self._local)
            if failed is None and self._nodes is not None:
                self._nodes.dismiss()
            return failed

    def _gather(self, nodes: Nodes, last_call_seconds: float) -> list[Node]:
        parallel = self._spec.config.parallel
        self.say(Pause(what="waiting for nodes", allowance_seconds=parallel.gather_seconds + 60))
        return nodes.gather(
            parallel.nodes - 1,
            parallel.fewest_nodes - 1,
            parallel.gather_seconds,
            last_call_seconds,
            go_on=lambda: not self._asked,
        )

    def _too_few(self, came: int) -> Failed:
        parallel = self._spec.config.parallel
        if self._asked:
            return Failed(error=Preempted.__name__, message="asked to stop while it waited for nodes")
        return Failed(
            error=Unavailable.__name__,
            message=f"{came} of {parallel.nodes} nodes came within {parallel.gather_seconds:g} s, "
            f"and {parallel.fewest_nodes} are needed",
            hint="see whether workers of the pool are free; parallel.min_nodes says with how few to go on",
        )

    def _start(self, others: list[Node]) -> LocalRanks:
        from training.checkpoint.ranks.tcp import LOOPBACK, host_store
        from training.parallel.meeting import Meeting

        config, wanted = self._spec.config, self._spec.gathering
        parallel = config.parallel.on(len(others) + 1)
        spec = self._spec.model_copy(update={"config": config.model_copy(update={"parallel": parallel})})
        host = wanted.host if wanted is not None else LOOPBACK
        store, port = host_store(host)
        local = LocalRanks(spec, self._folder, self._hear)
        if self._nodes is not None:
            order = Muster(
                line=spec.model_dump_json(),
                node=0,
                nodes=len(others) + 1,
                generation=spec.token,
                host=host,
                port=port,
            )
            self._nodes.muster(others, order, local.members)
        local.start(Meeting(f"{spec.run}-{spec.token}", store, host, port, 0, len(others) + 1))
        self._world = parallel.world
        return local

    def _look(self, local: LocalRanks) -> None:
        """Judge, and ask to leave."""
        nodes, members = self._nodes, local.members
        if nodes is not None:
            nodes.pump(0)
            self._tell_of(nodes)
            self._make_room(nodes)
        if (self._asked or self._regroup) and not self._told and len(members.members) == self._world:
            self._told = True
            self._send(STOP)
        if self._verdict is not None:
            return
        found = members.verdict() or members.hung(self._send)
        if found is not None:
            self._verdict = f"rank {found.rank} (pid {found.pid}) {found.reason}, and was killed"
            local.write_stack(found.rank)
        elif nodes is not None:
            self._verdict = nodes.trouble()
        if self._verdict is not None:
            self._report = self._ask_all(local)
            self._kill()
        elif nodes is not None and (local.ended or nodes.bad_ends()):
            self._kill()  # a part of a group is none

    def _ask_all(self, local: LocalRanks) -> str:
        """Where all ranks are, before they are killed."""
        deadline = time.monotonic() + REPORT_SECONDS
        local.members.ask(self._send)
        while local.members.owe_answer() and time.monotonic() < deadline:
            local.members.pump(ANSWER_SECONDS)
            if self._nodes is not None:
                self._nodes.pump(0)
        report = local.members.report()
        print(f"{self._verdict}\n{report}", file=sys.stderr, flush=True)  # noqa: T201 - the log
        return report

    def _tell_of(self, nodes: Nodes) -> None:
        names = tuple(node.name for node in nodes.present)
        if names != self._names:
            self._names = names
            self.say(Present(names=names))

    def _make_room(self, nodes: Nodes) -> None:
        """A node that has come, or that is about to go, makes another group."""
        if self._regroup is not None or self._done is not None:
            return
        if leaver := nodes.leaver():
            self._regroup = f"{leaver} leaves: {leaver.leaving}"
        elif len(nodes.mustered) + 1 < self._spec.config.parallel.nodes and (newcomer := nodes.newcomer()):
            self._regroup = f"{newcomer} has come"

    def _send(self, word: bytes) -> None:
        assert self._local is not None  # noqa: S101 - it has been started
        self._local.members.send(word)
        if self._nodes is not None:
            self._nodes.send(word)

    def _kill(self) -> None:
        assert self._local is not None  # noqa: S101 - it has been started
        self._local.members.kill()
        if self._nodes is not None:
            self._nodes.kill()

    def _has_ended(self, local: LocalRanks) -> bool:
        if self._verdict is not None:
            return local.members.have_ended()  # the agent may wait for a node that is lost
        return local.ended and (self._nodes is None or self._nodes.all_ended())

    def _hear(self, message: Message) -> None:
        if isinstance(message, Done):
            self._done = message  # told when all ranks have ended well
        else:
            self.say(message)

    def _failed(self, local: LocalRanks) -> Failed | None:
        """What the supervisor is told, unless all is done."""
        if self._verdict is not None:
            return _lost(self._verdict, self._report)
        bad = self._nodes.bad_ends() if self._nodes is not None else {}
        if local.failure is None and not bad and self._done is not None:
            self.say(self._done)
            return None
        told = local.members.failures()
        causes = {rank: failed for rank, failed in told.items() if not failed.message.startswith(LOST)}
        for failed in causes.values():
            if failed.error == Preempted.__name__ and self._regroup is not None and not self._asked:
                self.say(Regroup(reason=self._regroup))
                return failed.model_copy(update={"message": f"{failed.message}: {self._regroup}"})
            if failed.error in (Fenced.__name__, Preempted.__name__):  # of one rank is of all
                return failed
        for rank, failed in causes.items():
            return failed.model_copy(update={"message": f"rank {rank}: {failed.message}"})
        if local.failure is not None:
            bad = {local.failure[0] if local.failure[0] is not None else -1: local.failure[1], **bad}
        # who died without a word is the cause of what others had to say
        for rank in sorted(bad, key=lambda rank: rank in told):
            return _lost(bad[rank])
        return next(iter(told.values()), _lost("the ranks ended without a word"))


def _lost(message: str, report: str | None = None) -> Failed:
    """Another attempt may do better."""
    return Failed(error=Unavailable.__name__, message=message, report=report)


if __name__ == "__main__":
    main()
