"""One line for a call on a stack, as reports of hung processes show it. Knows no torch."""

from __future__ import annotations

FRAMES = 12  # of a stack in a report, the newest first


def call_line(path: str, line: int | str, function: str) -> str:
    """`torch/nn/modules/module.py:1775 forward`: of the folders those in the environment, or the last two."""
    _, is_installed, inside = path.rpartition("/site-packages/")
    short = inside if is_installed else "/".join(path.split("/")[-3:])
    return f"{short}:{line} {function}"


def cut(calls: list[str], frames: int = FRAMES) -> list[str]:
    """The newest ones, and how many more there are."""
    return calls[:frames] + ([f"... {len(calls) - frames} more"] if len(calls) > frames else [])
