"""How a person names a checkpoint: `000003/00000041`, token and sequence."""

from __future__ import annotations

import re

from training.errors import Invalid

_ADDRESS = re.compile(r"([0-9]{1,12})/([0-9]{1,12})", re.ASCII)


def parse_checkpoint(text: str) -> tuple[int, int]:
    """Token and sequence of `000003/00000041`; leading zeros may be left out.

    Raises:
        Invalid: it is not of this form.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match[1]) < 1:
        raise Invalid(
            f"{text!r} names no checkpoint; expected TOKEN/SEQUENCE, such as 000003/00000041",
            hint="retoma show RUN",
        )
    return int(match[1]), int(match[2])


def checkpoint_name(token: int, sequence: int) -> str:
    """`000003/00000041`."""
    return f"{token:06d}/{sequence:08d}"
