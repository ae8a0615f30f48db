"""Watches a training from outside: when objects appear in its store, and when its steps are done."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from training.checkpoint.store import Store
from training.errors import RetomaError

LOCAL_SECONDS = 0.05
REMOTE_SECONDS = 0.2


class Observer:
    """Looks at the store all the time, in a thread of its own, and notes when each key was seen first.

    Args:
        store: of the run. Any way to it that the drill does not cut.
        folder: of the drilled job, see `training.jobs.drilled`.
    """

    def __init__(self, store: Store, folder: Path) -> None:
        self._store, self._folder = store, folder
        self._every_seconds = LOCAL_SECONDS if store.url.startswith("file:") else REMOTE_SECONDS
        self._seen: dict[str, float] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="retoma-observer", daemon=True)
        self._thread.start()

    @property
    def seen(self) -> dict[str, float]:
        """When each object was seen first, seconds since the epoch."""
        with self._lock:
            return dict(self._seen)

    def newest_token(self) -> int:
        """The newest claim, 0 before the first."""
        return max(self.claims(), default=0)

    def claims(self) -> dict[int, float]:
        """When each token's claim was seen first."""
        return {
            int(Path(key).name.partition(".")[0]): at
            for key, at in self.seen.items()
            if key.startswith("tokens/") and key.endswith(".claim.json")
        }

    def commits(self, token: int) -> int:
        """Checkpoints of a token so far."""
        return sum(key.startswith(f"manifests/{token:06d}/") for key in self.seen)

    def steps(self) -> dict[int, tuple[float, ...]]:
        """End of each optimizer step of each training process."""
        found: dict[int, tuple[float, ...]] = {}
        folder = self._folder / "steps"
        for file in folder.iterdir() if folder.is_dir() else ():
            lines = file.read_text().splitlines()
            found[int(file.name)] = tuple(float(line) for line in lines)
        return found

    def close(self) -> None:
        """Look once more, and end."""
        self._closing.set()
        self._thread.join(30)
        self._look()

    def _work(self) -> None:
        while not self._closing.wait(self._every_seconds):
            self._look()

    def _look(self) -> None:
        try:
            keys = [key for key, _ in self._store.list("tokens/")]
            newest = max((int(Path(key).name[:6]) for key in keys), default=0)
            for token in (newest - 1, newest):
                keys += [key for key, _ in self._store.list(f"manifests/{token:06d}/")]
        except RetomaError:
            return  # the store may be what the drill takes away
        now = time.time()
        with self._lock:
            for key in keys:
                self._seen.setdefault(key, now)
