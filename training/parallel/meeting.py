"""Where the ranks of a group meet: a store of its launcher."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo


class Meeting(RendezvousHandler):
    """A rendezvous whose nodes are known: the launcher has gathered them before the ranks begin.

    Args:
        run_id: prefix of what the ranks put into the store.
        store: of the group, and where it is.
        node, nodes: the place of this node among those that take part.
    """

    def __init__(self, run_id: str, store: Any, host: str, port: int, node: int = 0, nodes: int = 1) -> None:
        self._run_id, self._store = run_id, store
        self.host, self.port = host, port
        self._node, self._nodes = node, nodes

    @property
    def use_agent_store(self) -> bool:
        """The ranks use this store for their process group, too."""
        return True

    def get_backend(self) -> str:
        """Its name."""
        return "retoma"

    def next_rendezvous(self) -> RendezvousInfo:
        """The meeting. It is complete at once."""
        prefixed = dist.distributed_c10d.PrefixStore(self._run_id, self._store)
        return RendezvousInfo(prefixed, self._node, self._nodes, RendezvousStoreInfo(self.host, self.port))

    def is_closed(self) -> bool:
        """It never is."""
        return False

    def set_closed(self) -> None:
        """Nothing to do."""

    def num_nodes_waiting(self) -> int:
        """None: a group that grows is another generation."""
        return 0

    def get_run_id(self) -> str:
        """See the class."""
        return self._run_id

    def shutdown(self) -> bool:
        """Nothing to do: the store ends with its process."""
        return True
