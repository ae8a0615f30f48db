"""Everything random, derived or captured.

Derived, so that no iterator state is carried: the order of an epoch from (seed, epoch), and the randomness of a
sample from (seed, epoch, index). Captured in the checkpoint: the generators of python, numpy, torch and each
CUDA device, which dropout and the like draw from.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def epoch_order(seed: int, epoch: int, samples: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A permutation of `range(samples)`, int64.

    Sorts the raw output of the counter-based generator Philox (Salmon et al. 2011), whose stream is fixed, where
    numpy's and torch's own shuffles may change between versions.
    """
    raw = np.random.Philox(key=_seed_of("order", seed, epoch)).random_raw(samples)
    return np.argsort(np.asarray(raw), kind="stable")


def seed_everything(seed: int) -> None:
    """Seed python, numpy and torch (CUDA included)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def seed_of_rank(seed: int, rank: int) -> int:
    """The seed of a rank's own generators; rank 0 has the run's, as one rank alone has it."""
    return seed if rank == 0 else _seed_of("rank", seed, rank)


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Let the CPU generators give the numbers of this sample from here on."""
    value = _seed_of("sample", seed, epoch, index)
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.default_generator.manual_seed(value)


@contextmanager
def preserved_randomness() -> Iterator[None]:
    """Whatever is drawn within leaves no trace in the CPU generators."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    torch_state = torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


def capture_randomness() -> dict[str, Any]:
    """The states of all generators, as tensors and plain scalars."""
    version, words, gauss = random.getstate()
    name, keys, at, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.array(keys, dtype=np.uint32)),
            "at": int(at),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def apply_randomness(state: dict[str, Any]) -> None:
    """Put the generators where `capture_randomness` found them."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    words = (numpy["name"], numpy["keys"].numpy(), numpy["at"], numpy["has_gauss"], numpy["cached"])
    np.random.set_state(words)
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])


def _seed_of(purpose: str, *numbers: int) -> int:
    """63 bits from a purpose and numbers."""
    packed = purpose.encode() + struct.pack(f">{len(numbers)}q", *numbers)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "big") >> 1
