"""F28: host memory grows with every asynchronous save."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.faults import run_script

STATE_MB = 100
# Two sets of buffers, and what is on its way: coded frames, packs of 32 MiB that are filled and uploaded.
MULTIPLE = 2
ON_THE_WAY_MB = 130

SCRIPT = """
import json, sys, threading, time
from pathlib import Path
import torch
from training.checkpoint import IncrementalCheckpointer
from training.checkpoint.store import LocalStore

def resident_mb():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6

folder, skip = sys.argv[1], sys.argv[2] == "skip"
torch.set_num_threads(1)
store = LocalStore(folder)
peak, done = [0.0], threading.Event()

def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], resident_mb())

def forget(committed):  # gigabytes, and nobody restores them
    for key in committed.manifest.pack_keys():
        store.delete(key)

warm = IncrementalCheckpointer(LocalStore(folder + "-warm"))
warm.save({"w": torch.randn(1 << 20)})
warm.close()
state = {f"w{i}": torch.randn(1_250_000) for i in range(20)}
before = resident_mb()
threading.Thread(target=watch, daemon=True).start()
checkpointer = IncrementalCheckpointer(
    store, on_saved=forget, deltas_per_base=8, encode_threads=2, on_busy="skip" if skip else "wait"
)
peaks = []
for save in range(100):
    for i in range(5):
        state[f"w{(save + i) % 20}"].mul_(1.0001)
    checkpointer.save(state)
    if save in (19, 99):
        peaks.append(peak[0] - before)
checkpointer.close()
done.set()
print(json.dumps({"early_mb": peaks[0], "late_mb": peaks[1], "skipped": checkpointer.skipped_saves}))
"""


def growth(folder: Path, policy: str) -> dict[str, float]:
    found: dict[str, float] = json.loads(run_script(SCRIPT, folder, policy, timeout_seconds=200).stdout)
    return found


def test_a_hundred_saves_need_twice_the_state_and_what_is_on_its_way(tmp_path: Path) -> None:
    found = growth(tmp_path / "store", "wait")
    assert found["late_mb"] < MULTIPLE * STATE_MB + ON_THE_WAY_MB, found
    assert found["late_mb"] < found["early_mb"] + 0.3 * STATE_MB, f"memory grows with every save: {found}"
    assert found["skipped"] == 0


def test_saves_that_find_the_one_before_in_flight_do_not_pile_up(tmp_path: Path) -> None:
    found = growth(tmp_path / "store", "skip")
    assert found["late_mb"] < MULTIPLE * STATE_MB + ON_THE_WAY_MB, found
    assert found["skipped"] > 0, "no save was skipped: the test shows nothing"
