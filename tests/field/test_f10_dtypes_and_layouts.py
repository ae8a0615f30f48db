"""F10: dense tensors of every kind come back bit for bit; anything else is refused by name before training."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.bits import bits, random_bits, tensor_bytes
from tests.support.faults import run_script
from training.checkpoint import IncrementalCheckpointer
from training.checkpoint.restore import restore_checkpoint
from training.checkpoint.state.dtypes import DTYPES
from training.checkpoint.store import MemoryStore
from training.errors import Invalid

pytestmark = pytest.mark.filterwarnings(
    "ignore:ComplexHalf support is experimental",
    "ignore:Sparse",
    "ignore:The PyTorch API of nested tensors",
    "ignore:torch.quantize_per_tensor",
)
SHAPES = [(), (1,), (0,), (3, 0, 2), (7,), (5, 3), (2, 3, 4, 5)]


def test_every_dense_dtype_of_this_torch_has_a_persisted_name() -> None:
    dense = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    unsupported = {str(dtype).removeprefix("torch.") for dtype in dense - set(DTYPES.values())}
    packed_or_quantized = ("bits", "qint", "quint", "int", "uint", "float4")
    assert all(name.startswith(packed_or_quantized) for name in unsupported), unsupported
    assert not {name for name in unsupported if name in ("int8", "int16", "int32", "int64", "uint8", "uint16")}


def zoo(seed: int) -> dict[str, Any]:
    """Every dtype in every layout, random bit patterns: NaN payloads, -0.0 and subnormals included."""
    state: dict[str, Any] = {}
    for number, (name, dtype) in enumerate(DTYPES.items()):
        cube = random_bits((2, 3, 4, 5), dtype, seed * 100 + number)
        state[name] = {
            **{f"shape {shape}": random_bits(shape, dtype, seed) for shape in SHAPES},
            "channels last": cube.as_strided((2, 3, 4, 5), (60, 1, 15, 3)),
            "transposed": cube.permute(3, 1, 0, 2),
            "sliced": cube[:, 1:, ::2, 1::3],
            "expanded": cube[:1].expand(6, 3, 4, 5),
            "overlapping": cube.reshape(-1).as_strided((10, 10), (3, 1)),
            "large": random_bits((300, 100), dtype, seed * 100 + number).T,
        }
    for name in ("complex64", "complex128"):
        state[name]["conjugate"] = random_bits((40,), DTYPES[name], seed).conj()
        state[name]["negative"] = random_bits((40,), DTYPES[name], seed).conj().imag
    state["parameter"] = nn.Parameter(random_bits((9,), torch.float32, seed))
    state["float32"]["channels last 2"] = random_bits((2, 3, 4, 5), torch.float32, seed).contiguous(
        memory_format=torch.channels_last
    )
    return state


def test_every_dtype_and_layout_comes_back_through_a_base_and_deltas() -> None:
    store = MemoryStore()
    expected = []
    with IncrementalCheckpointer(store, deltas_per_base=8, encode_threads=4) as checkpointer:
        for seed in (1, 2, 2, 3):
            checkpointer.save(zoo(seed))
            expected.append(bits(zoo(seed)))
    for sequence, state in enumerate(expected):
        restored = restore_checkpoint(store, 1, sequence)
        assert restored.manifest.kind == ("delta" if sequence else "base")
        for (_, name, found), (_, _, wanted) in zip(bits(dict(restored))[1], state[1], strict=True):
            assert found == wanted, f"{name} in save {sequence}"


SAVE_ON = """
import sys, warnings
warnings.simplefilter("ignore")
from tests.field.test_f10_dtypes_and_layouts import zoo
from training.checkpoint import IncrementalCheckpointer
from tests.support.bits import bits
with IncrementalCheckpointer(sys.argv[1]) as checkpointer:
    restored = checkpointer.restore()
    assert bits(dict(restored)) == bits(zoo(1))
    checkpointer.save(zoo(2))
    checkpointer.wait()
    assert checkpointer.head.manifest.kind == "delta"
"""


def test_a_resume_in_a_new_process_continues_the_chain_of_every_dtype(tmp_path: Path) -> None:
    with IncrementalCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(zoo(1))
    run_script(SAVE_ON, tmp_path)
    with IncrementalCheckpointer(tmp_path) as later:
        assert bits(dict(later.restore() or {})) == bits(zoo(2))


def test_special_floats_keep_their_bits_in_tensors_and_scalars() -> None:
    payload = torch.tensor([0x7FC0_1234, 0x7F80_0001, -0x0040_0001, -(2**31), 1], dtype=torch.int32)
    state = {"t": payload.view(torch.float32), "nan": math.nan, "inf": -math.inf, "zero": -0.0, "tiny": 5e-324}
    with IncrementalCheckpointer(MemoryStore()) as checkpointer:
        checkpointer.save(state)
        assert bits(dict(checkpointer.restore() or {})) == bits(state)


class Wrapper(torch.Tensor):
    """A tensor whose bytes are somewhere else, as quantization libraries build them."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, *arguments: Any) -> Any:
        return NotImplemented


def freed() -> Tensor:
    tensor = torch.ones(100)
    tensor.untyped_storage().resize_(0)
    return tensor


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse_coo": (lambda: torch.eye(3).to_sparse(), "float32 tensor of layout sparse_coo"),
    "sparse_csr": (lambda: torch.eye(3).to_sparse_csr(), "float32 tensor of layout sparse_csr"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "float32 tensor nested"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "float32 tensor nested"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "tensor of dtype quint8"),
    "meta": (lambda: torch.ones(2, device="meta"), "float32 tensor on the meta device"),
    "mkldnn": (lambda: torch.ones(4).to_mkldnn(), "float32 tensor of layout _mkldnn"),
    "float4": (lambda: torch.empty(4, dtype=torch.float4_e2m1fn_x2), "tensor of dtype float4_e2m1fn_x2"),
    "wrapper": (lambda: Wrapper(torch.ones(3)), "without memory of its own (a Wrapper)"),
    "freed": (freed, "float32 tensor without memory"),
    "lazy": (lambda: nn.LazyLinear(3).weight, "an uninitialized parameter"),
    "module": (lambda: nn.Linear(1, 1), "a torch.nn.modules.linear.Linear"),
    "dtype": (lambda: torch.float32, "a torch.dtype"),
    "generator": (torch.Generator, "Generator"),
    "set": (lambda: {1, 2}, "a builtins.set"),
    "complex": (lambda: 1j, "a builtins.complex"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_saved_is_refused_by_name_before_anything_is_written(what: str) -> None:
    build, expected = REFUSED[what]
    value = build()
    store = MemoryStore()
    with IncrementalCheckpointer(store) as checkpointer:
        state = {"model": {"good": torch.ones(3), "layer": [torch.ones(1), {"odd/one": value}]}}
        for refuse in (checkpointer.check, checkpointer.save):
            with pytest.raises(Invalid) as caught:
                refuse(state)
            assert caught.value.message.startswith("model/layer/~i1/odd~1one: ")
            assert expected in caught.value.message
        assert store.list("packs/") == store.list("manifests/") == []
        checkpointer.save({"model": {"good": torch.ones(3)}})  # and the next save is fine
    assert len(store.list("manifests/")) == 1


@pytest.mark.parametrize("key", [1.5, None, True, (1, 2), b"bytes"])
def test_keys_that_are_no_names_are_refused(key: Any) -> None:
    with pytest.raises(Invalid, match="keys are str or int"):
        IncrementalCheckpointer(MemoryStore()).check({"group": {key: 1}})


def test_a_state_that_holds_itself_is_refused() -> None:
    state: dict[str, Any] = {"w": torch.ones(1)}
    state["self"] = [state]
    with pytest.raises(Invalid, match="nested deeper than 64 levels"):
        IncrementalCheckpointer(MemoryStore()).check(state)


def test_a_state_that_passes_the_check_can_be_stored_at_any_allowed_depth() -> None:
    state: dict[str, Any] = {"w": torch.ones(1)}
    for _ in range(63):
        state = {"d": [state]} if len(state) % 2 == 0 else {"d": state}
    with IncrementalCheckpointer(MemoryStore()) as checkpointer:
        checkpointer.check(state)
        checkpointer.save(state)
        assert bits(dict(checkpointer.restore() or {})) == bits(state)


# --- any state, any history


names = st.one_of(
    st.text(max_size=4), st.integers(-3, 3), st.sampled_from(["~", "/", "~i1", "a/b", "~slab/4", "é"])
)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5), st.binary(max_size=5)
)
tensors = st.builds(
    random_bits,
    st.sampled_from([*SHAPES, (4200,), (70, 80)]),
    st.sampled_from(list(DTYPES.values())),
    st.integers(0, 5),
)
arrays = st.builds(
    lambda shape, dtype, seed: random_bits(shape, dtype, seed).numpy(),
    st.sampled_from(SHAPES),
    st.sampled_from([torch.float32, torch.int64, torch.bool, torch.uint16, torch.complex64]),
    st.integers(0, 5),
)
trees = st.dictionaries(
    names,
    st.recursive(
        st.one_of(tensors, scalars, arrays),
        lambda inner: st.one_of(
            st.dictionaries(names, inner, max_size=3),
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
        ),
        max_leaves=8,
    ),
    min_size=1,
    max_size=4,
)


def mutate(value: Any, seed: int) -> Any:
    """Change some tensors in part, some wholly, some not at all; drop or retype now and then."""
    if isinstance(value, dict):
        items = [(k, mutate(v, seed * 31 + i)) for i, (k, v) in enumerate(value.items())]
        if seed % 7 == 0 and items:
            items.pop(seed % len(items))
        return dict(items)
    if isinstance(value, list | tuple):
        return type(value)(mutate(item, seed * 17 + i) for i, item in enumerate(value))
    if isinstance(value, Tensor) and value.numel():
        choice = seed % 4
        if choice == 0:
            return value
        raw = torch.frombuffer(bytearray(tensor_bytes(value)), dtype=torch.uint8)
        raw[seed % raw.numel() :: 1 + seed % 50] += 1
        return raw.view(value.dtype).view(value.shape)
    if isinstance(value, int) and not isinstance(value, bool):
        return value + seed % 2
    return value


@settings(
    max_examples=120, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(
    tree=trees,
    deltas_per_base=st.integers(0, 4),
    events=st.lists(
        st.tuples(st.sampled_from(["save", "save", "base", "kill"]), st.integers(0, 10_000)), max_size=8
    ),
)
def test_any_state_survives_any_sequence_of_saves_and_kills(
    tree: dict[Any, Any], deltas_per_base: int, events: list[tuple[str, int]]
) -> None:
    store = MemoryStore()
    checkpointer = IncrementalCheckpointer(store, deltas_per_base=deltas_per_base)
    alive, committed = [checkpointer], None
    try:
        for event, seed in [("save", 0), *events, ("kill", 0)]:
            if event == "kill":  # a new object, while the old one was never closed
                checkpointer.wait()
                checkpointer = IncrementalCheckpointer(store, deltas_per_base=deltas_per_base)
                alive.append(checkpointer)
                restored = checkpointer.restore()
                assert (restored is None) is (committed is None)
                assert restored is None or (bits(dict(restored)), restored.skipped) == (committed, ())
            else:
                tree = mutate(tree, seed)
                checkpointer.save(tree, base=event == "base")
                committed = bits(tree)
    finally:
        for one in alive:
            one._stop()


def test_a_real_folder_holds_the_same_after_kills_as_memory() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(5):
            with IncrementalCheckpointer(folder, deltas_per_base=2) as checkpointer:
                restored = checkpointer.restore()
                assert restored is None or bits(dict(restored)) == bits(zoo(seed - 1))
                checkpointer.save(zoo(seed))
