"""Parts of a state that were restored, put where sharded tensors are."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from training.checkpoint.state.parts import is_sharded, part_of


def local_shape(live: Tensor) -> torch.Size:
    """Of what this rank holds of it."""
    return cast("Any", live).to_local().shape if is_sharded(live) else live.shape


def placed_like(live: Tensor, value: Tensor) -> Tensor:
    """`value`, which is all of `live` or this rank's part of it, as a tensor that is sharded as `live` is.

    Shares memory with `value` where it can. One that fits neither way comes back as it is.
    """
    if not is_sharded(live) or is_sharded(value):
        return value
    from torch.distributed.tensor import DTensor  # takes a while, and one rank alone never needs it

    sharded = cast("DTensor", live)
    if value.shape != local_shape(live):
        if value.shape != live.shape:
            return value
        part = part_of(live, "")
        if part is None:
            value = value.new_empty(local_shape(live))
        else:
            for dim, (start, size) in enumerate(zip(part.offsets, part.local.shape, strict=True)):
                value = value.narrow(dim, start, size)
    return DTensor.from_local(
        value.contiguous().to(sharded.to_local().device),
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )
