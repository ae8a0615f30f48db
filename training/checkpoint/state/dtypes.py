"""Which tensors can be saved, and the persisted name of each dtype. These strings are the format."""

from __future__ import annotations

import torch

from training.errors import Corrupt, Invalid

_NAMES = """
    bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64
    complex32 complex64 complex128
    float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu
""".split()

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES if hasattr(torch, name)}
_BY_DTYPE = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The persisted name of a dtype that `check_tensor` accepted."""
    return _BY_DTYPE[dtype]


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a persisted name. Raises `Corrupt` if this build of torch has none."""
    if name not in DTYPES:
        raise Corrupt(f"this torch has no dtype {name!r}")
    return DTYPES[name]


def check_tensor(tensor: torch.Tensor, key: str) -> int:
    """Accept dense tensors that own real memory.

    Returns:
        Address of the first element; 0 for a tensor that has none.

    Raises:
        Invalid: names key, dtype and layout of anything else.
    """
    problem, address = None, 0
    if tensor.is_nested:
        problem = "nested"
    elif tensor.layout != torch.strided:
        problem = f"of layout {str(tensor.layout).removeprefix('torch.')}"
    elif tensor.is_meta:
        problem = "on the meta device, which has no bytes"
    elif tensor.is_quantized or tensor.dtype not in _BY_DTYPE:
        problem = f"of dtype {str(tensor.dtype).removeprefix('torch.')}"
    elif tensor.numel() and not (address := _address(tensor)):
        problem = f"without memory of its own (a {type(tensor).__name__})"
    if problem:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise Invalid(
            f"{key}: a {dtype} tensor {problem} cannot be saved",
            hint="keep it out of the state (register_buffer(..., persistent=False)) or convert it to a dense one",
        )
    return address


def _address(tensor: torch.Tensor) -> int:
    """0 for a wrapper around other tensors, a fake, and a shard whose storage was freed."""
    try:
        address = tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
    return 0 if address == tensor.storage_offset() * tensor.element_size() else address
