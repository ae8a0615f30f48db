"""Gradients of DDP in fewer bytes on the wire, and what PowerSGD has to remember for it.

PowerSGD (Vogels et al., NeurIPS 2019) sends a low-rank approximation of each gradient and adds what it left out to
the next one. A resume that forgot that error would be another training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from training.errors import Invalid
from training.parallel.config import ParallelConfig

_TENSORS = ("error_dict", "p_memory_dict", "q_memory_dict")


class Residuals:
    """The memory of PowerSGD on this rank, which is each rank's own."""

    def __init__(self, state: powerSGD_hook.PowerSGDState) -> None:
        self._state = state

    def capture(self) -> dict[str, Any]:
        """For a checkpoint."""
        generator: Any = self._state.rng
        kind, keys, place, has_gauss, cached = generator.get_state(legacy=True)
        return {
            **{name: dict(getattr(self._state, name)) for name in _TENSORS},
            "iter": self._state.iter,
            "rng": [kind, torch.from_numpy(keys.astype("int64")), place, has_gauss, cached],
        }

    def apply(self, saved: Mapping[str, Any] | None) -> None:
        """Put it back; None: this rank is new, and has left out nothing yet.

        The approximations are made anew then, after a few steps without compression.
        """
        if saved is None:
            return
        for name in _TENSORS:
            setattr(self._state, name, {key: value.clone() for key, value in saved[name].items()})
        self._state.iter = saved["iter"]
        kind, keys, *rest = saved["rng"]
        self._state.rng.set_state((kind, keys.numpy().astype("uint32"), *rest))


def compress(model: DistributedDataParallel, config: ParallelConfig) -> Residuals | None:
    """Register the hook that the configuration names.

    Raises:
        Invalid: an unknown compression, or one that would depend on which thread computes it.
    """
    if config.compression is None:
        return None
    if config.compression == "fp16":
        model.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
        return None
    if config.compression != "powersgd":
        raise Invalid(f"unknown compression {config.compression!r}")
    if model.device_type == "cpu" and torch.get_num_threads() > 1:
        raise Invalid(
            "compression: powersgd needs threads: 1 on CPUs: it computes in threads of the process group, too; "
            "these have one, and with another number the same product has other last bits",
            hint="set threads: 1, or compression: fp16",
        )
    state = powerSGD_hook.PowerSGDState(
        # Of its own: its rounds are begun by threads, and would mix with DDP's own among the ranks.
        process_group=dist.new_group(),
        matrix_approximation_rank=config.powersgd_rank,
        start_powerSGD_iter=config.powersgd_start_steps,
        random_seed=0,
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return Residuals(state)
