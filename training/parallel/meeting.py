"""Where the ranks of one node meet: a store of their launcher, on the loopback."""

from __future__ import annotations

import socket
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo


class OneNode(RendezvousHandler):
    """A rendezvous of one node, which is complete at once.

    Args:
        run_id: prefix of what the ranks put into the store.

    Attributes:
        host, port: of the store; it ends with this process.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        server = socket.create_server(("127.0.0.1", 0))  # by itself the store would listen on every interface
        self.host, self.port = server.getsockname()
        self._store: Any = dist.TCPStore(  # type: ignore[attr-defined] # the stubs do not export it
            self.host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
        )

    @property
    def use_agent_store(self) -> bool:
        """The ranks use this store for their process group, too."""
        return True

    def get_backend(self) -> str:
        """Its name."""
        return "retoma-one-node"

    def next_rendezvous(self) -> RendezvousInfo:
        """The meeting: this node, alone."""
        prefixed = dist.distributed_c10d.PrefixStore(self._run_id, self._store)
        return RendezvousInfo(prefixed, 0, 1, RendezvousStoreInfo(self.host, self.port))

    def is_closed(self) -> bool:
        """It never is."""
        return False

    def set_closed(self) -> None:
        """Nothing to do."""

    def num_nodes_waiting(self) -> int:
        """There is no other node."""
        return 0

    def get_run_id(self) -> str:
        """See the class."""
        return self._run_id

    def shutdown(self) -> bool:
        """Nothing to do: the store ends with this process."""
        return True
