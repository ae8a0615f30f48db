"""The folder of a drill, and what a drill that was killed has left behind in one."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from infra import stack
from infra.settings import Settings
from tasks.drill.wires import remove_namespace
from training.errors import RetomaError

PREFIX = "retoma-drill-"
OWNER = "owner.lock"  # held as long as the drill lives; the kernel lets it go whatever kills it
STACK = "stack"
NAMESPACES = "namespaces"


@contextlib.contextmanager
def drill_folder() -> Iterator[Path]:
    """Short, since sockets lie in it; removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        with FileLock(folder / OWNER):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep(home: Path, report: Callable[[str], None]) -> None:
    """End the stacks of drills that were killed, with their network namespaces, and remove their folders."""
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        if not (folder / OWNER).exists():  # just made, or not a drill's
            continue
        try:
            with FileLock(folder / OWNER, timeout=0):
                report(f"removing what a drill that was killed left in {folder}")
                stack.down(Settings(home=home, state_dir=folder / STACK))
                for name in (folder / NAMESPACES).glob("*"):
                    remove_namespace(name.name)
                shutil.rmtree(folder, ignore_errors=True)
        except Timeout:  # it lives
            continue
        except (OSError, RetomaError) as error:  # another user's, or it does not end: no reason not to drill
            report(f"{folder} could not be cleaned up: {error}")
