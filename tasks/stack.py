"""The stack of a training process that hangs, out of what Python's faulthandler prints of all its threads."""

from __future__ import annotations

import re
from collections.abc import Sequence

from training.calls import FRAMES, call_line, cut

_THREAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+")
_FRAME = re.compile(r'\s*File "([^"]+)", line (\d+) in (.+)')


def main_stack(lines: Sequence[str], frames: int = FRAMES) -> str | None:
    """The newest calls of the main thread, one a line, `path:line function`, newest first. None: it is not there.

    The main thread answers the signal, so that it is the current one; where another did, it is the last.
    """
    threads: list[tuple[bool, list[str]]] = []
    for line in lines:
        if heading := _THREAD.search(line):
            threads.append((heading[1] == "Current thread", []))
        elif threads and (frame := _FRAME.match(line)):
            threads[-1][1].append(call_line(frame[1], frame[2], frame[3]))
    if not threads:
        return None
    found = next((calls for is_current, calls in threads if is_current and calls), threads[-1][1])
    return "\n".join(cut(found, frames)) or None
