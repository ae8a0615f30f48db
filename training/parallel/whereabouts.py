"""Where the training of this rank is, by torch's flight recorder of collectives and by the main thread's stack.

Told from another thread, so that a rank that waits for ever in a collective can tell.
"""

from __future__ import annotations

import json
import sys
import threading
from types import FrameType
from typing import Any

from torch._C import _distributed_c10d

from training.calls import call_line, cut
from training.parallel import own_time
from training.parallel.wire import Whereabouts

RECENT = 5  # collectives that are told
_recorder: Any = _distributed_c10d  # the stubs do not know all of it


def whereabouts() -> Whereabouts:
    """Of this process. The recorder has an entry for each collective that was begun, the newest ones only."""
    entries = json.loads(_recorder._dump_fr_trace_json()).get("entries", [])
    entries.sort(key=lambda entry: entry["record_id"], reverse=True)
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return Whereabouts(
        begun=entries[0]["record_id"] + 1 if entries else 0,
        recent=tuple(_line(entry) for entry in entries[:RECENT]),
        waits=_waits(frame),
        stack=tuple(cut(_calls(frame))),
    )


def _line(entry: dict[str, Any]) -> str:
    """`gloo:all_reduce Float [64, 10], scheduled`."""
    inputs = [f"{dtype} {size}" for dtype, size in zip(entry["input_dtypes"], entry["input_sizes"], strict=False)]
    return f"{entry['profiling_name']} {' '.join(inputs)}, {entry['state']}"


def _waits(frame: FrameType | None) -> bool:
    """Whether the main thread is in a function of torch.distributed. Within a backward pass that is not seen."""
    file = frame.f_code.co_filename if frame is not None else ""
    return "/torch/distributed/" in file or file == own_time.__file__  # which wraps torch's waits


def _calls(frame: FrameType | None) -> list[str]:
    calls = []
    while frame is not None:
        calls.append(call_line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return calls
