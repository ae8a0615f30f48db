"""Stores that earlier versions wrote must restore for ever."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.formats import make_codecs
from tests.formats.make_v1 import state_at
from tests.support.bits import bits
from training.checkpoint import IncrementalCheckpointer, Position
from training.checkpoint.chain import read_chain
from training.checkpoint.history import read_lineage
from training.checkpoint.manifest import BALANCED, BOUNDED, CAST, CODEC
from training.checkpoint.restore import restore_checkpoint
from training.checkpoint.store import LocalStore

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
V1 = Path(__file__).parent / "v1" / "run"
CODECS = Path(__file__).parent / "v1" / "codecs"
NUMBERS = [(1, 0), (1, 1), (2, 2), (2, 3), (2, 4)]


@pytest.mark.parametrize(("token", "sequence"), NUMBERS)
def test_every_checkpoint_of_format_1_restores_bit_for_bit(token: int, sequence: int) -> None:
    restored = restore_checkpoint(LocalStore(V1), token, sequence, "format-1")
    assert bits(dict(restored)) == bits(state_at(sequence))
    assert restored.position == Position(epoch=sequence // 2, step=10 * sequence, sample=320 * sequence)
    assert restored.manifest.meta == {"metrics": {"accuracy": sequence / 10}}
    assert restored["tied"]["a"] is restored["tied"]["b"]
    assert type(restored["milestones"]).__name__ == "Counter"


@pytest.mark.parametrize("sequence", range(9))
def test_every_codec_of_format_1_restores(sequence: int) -> None:
    store = LocalStore(CODECS)
    restored = restore_checkpoint(store, sequence // 3 + 1, sequence, "codecs-1")
    entries = {chunk.key: chunk for chunk in restored.manifest.chunks}
    assert entries["model/w"].codec == CAST
    saved = make_codecs.state_at(sequence)
    for key, tensor in saved["optimizer"].items():
        bound = entries[f"optimizer/{key}"].bound
        assert (bound is not None) == (sequence >= 3)
        assert (restored["optimizer"][key] - tensor).abs().max().item() <= (bound or 0.0)
    exact = {key: saved[key] for key in ("table", "noise")}
    assert bits({key: restored[key] for key in exact}) == bits(exact)
    assert bits(restored["model"]["w"]) == bits(restored["optimizer"]["master"].bfloat16())


def test_the_run_with_every_codec_has_a_rebased_form_and_needs_none() -> None:
    store = LocalStore(CODECS)
    short, whole = (read_chain(store, 3, 8, use_rebased=use) for use in (True, False))
    assert (len(short.contents), len(whole.contents)) == (4, 9)
    assert {chunk.codec for manifest in whole.contents for chunk in manifest.chunks} == {
        CODEC,
        BALANCED,
        CAST,
        *BOUNDED,
    }


def test_the_history_of_format_1_is_whole() -> None:
    lineage = read_lineage(LocalStore(V1))
    assert lineage.problems == []
    assert [(c.ref.token, c.ref.sequence) for c in lineage.chain] == NUMBERS
    assert [c.manifest.kind for c in lineage.chain] == ["base", "delta", "delta", "delta", "base"]
    assert [attempt.seal and attempt.seal.head and attempt.seal.head.sequence for attempt in lineage.attempts] == [
        None,
        1,
    ]


def test_a_run_of_format_1_is_resumed_and_continued(tmp_path: Path) -> None:
    shutil.copytree(V1, tmp_path / "run")
    with IncrementalCheckpointer(tmp_path / "run") as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None
        assert (checkpointer.run, checkpointer.token, restored.skipped) == ("format-1", 3, ())
        assert bits(dict(restored)) == bits(state_at(4))
        checkpointer.save(state_at(5))
        committed = checkpointer.wait()
        assert committed is not None
        assert committed.manifest.kind == "delta"
        assert bits(dict(checkpointer.restore() or {})) == bits(state_at(5))


def test_reading_writes_nothing_into_the_committed_run() -> None:
    files = sorted(path.relative_to(V1).as_posix() for path in V1.rglob("*") if path.is_file())
    assert files == [
        *(f"manifests/{token:06d}/{sequence:08d}.json" for token, sequence in NUMBERS),
        *(f"packs/{token:06d}/{sequence:08d}-r0000-00.pack" for token, sequence in NUMBERS),
        "retoma.json",
        "tokens/000001.claim.json",
        "tokens/000001.seal.json",
        "tokens/000002.claim.json",
        "tokens/000002.seal.json",
    ]
