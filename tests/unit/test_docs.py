"""The documents tell the truth: their examples run, and what they name exists."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import typer
import yaml

from flows.cli import app
from infra.settings import PREFIX, Settings
from tests.formats.make_v1 import state_at
from tests.support.bits import tensor_bytes
from training.checkpoint import IncrementalCheckpointer
from training.checkpoint.history import read_committed
from training.checkpoint.restore import restore_checkpoint
from training.checkpoint.store import LocalStore
from training.config import CheckpointConfig, Frozen, SupervisorConfig, load_config
from training.errors import KINDS
from training.session import train_range

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
V1 = ROOT / "tests/formats/v1/run"
IMAGE_BYTES = 250_000
BLOCK = re.compile(r"^```(\S*)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`([^`\n]+)`")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str, test: str | None = None) -> list[str]:
    """Fenced blocks of a language; with `test`, those that carry this mark."""
    found = BLOCK.findall(text_of(page))
    return [
        code for name, marks, code in found if name == language and (not test or f"test={test}" in marks.split())
    ]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return BLOCK.sub("", text_of(page))


def inline(page: Path) -> list[str]:
    return INLINE.findall(prose(page))


def shell_lines() -> Iterator[list[str]]:
    """Every command that a page shows, in words: shell blocks, and inline code."""
    for page in PAGES:
        code = [*inline(page), *(line for block in blocks(page, "sh") for line in block.splitlines())]
        code += [line[2:] for block in blocks(page, "console") for line in block.splitlines() if line[:2] == "$ "]
        for line in code:
            try:
                yield shlex.split(line, comments=True)
            except ValueError:
                continue  # inline code that is no shell


def commands(name: str) -> list[list[str]]:
    return [words[words.index(name) + 1 :] for words in shell_lines() if name in words[:2]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", prose(page)):
        assert "://" in target or (page.parent / target).exists(), target


def test_pictures_are_small_and_used() -> None:
    pictures = sorted((ROOT / "docs/images").iterdir())
    assert [p.name for p in pictures if p.stat().st_size > IMAGE_BYTES] == []
    shown = "".join(text_of(page) for page in PAGES)
    assert [p.name for p in pictures if f"images/{p.name})" not in shown] == []


def test_every_page_of_a_decision_is_in_the_index() -> None:
    folder = ROOT / "docs/decisions"
    listed = set(re.findall(r"\]\(([^)]+)\)", text_of(folder / "README.md")))
    assert listed == {page.name for page in folder.glob("[0-9]*.md")}


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", "".join(map(text_of, PAGES)))
    assert len(named) >= 10
    for file, function in named:
        assert f"def {function}" in (ROOT / file).read_text(), f"{file}::{function}"


def subcommands() -> dict[str, set[str]]:
    """Options of each subcommand. Typer brings its own click, so its classes are not named here."""
    command: Any = typer.main.get_command(app)
    return {
        name: {option for p in sub.params for option in (*p.opts, *p.secondary_opts) if option.startswith("--")}
        for name, sub in command.commands.items()
    }


def test_every_command_and_option_exists() -> None:
    there = subcommands()
    shown = [words for words in commands("retoma") if words and words[0] in there]
    strangers = [words for words in commands("retoma") if words and re.fullmatch("[a-z]+", words[0])]
    assert strangers == shown, "a command that does not exist"
    assert {words[0] for words in shown} == set(there), "a command that the documents leave out"
    for command, *words in shown:
        assert {word for word in words if word.startswith("--")} <= there[command]


def test_every_option_of_train_is_in_the_table() -> None:
    (row,) = (line for line in text_of(README).splitlines() if line.startswith("| `retoma train"))
    assert set(re.findall(r"`(--[\w-]+)", row)) == {"--set", "--run", "--new", "--no-follow"}
    assert subcommands()["train"] == {"--set", "--run", "--new", "--follow", "--no-follow"}


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {words[0] for words in commands("make") if words}
    assert {"train", "test"} <= named <= targets


def test_every_deployment_that_is_run_exists() -> None:
    deployments = yaml.safe_load((ROOT / "infra/prefect.yaml").read_text())["deployments"]
    there = {f"{entry['entrypoint'].partition(':')[2].replace('_', '-')}/{entry['name']}" for entry in deployments}
    named = {words[2] for words in commands("prefect") if words[:2] == ["deployment", "run"]}
    assert named
    assert named <= there
    assert {match for match in inline(README) if re.fullmatch(r"[a-z-]+/[a-z]+", match) and match in there} == there


def test_settings_are_those_of_the_code() -> None:
    known = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}
    for page in PAGES:
        assert set(re.findall(rf"{PREFIX}[A-Z_]+[A-Z]", text_of(page))) <= known
    table = [line for line in text_of(README).splitlines() if line.startswith(f"| `{PREFIX}")]
    assert set(re.findall(rf"{PREFIX}\w+", "".join(table))) == known
    for name, field in Settings.model_fields.items():
        (row,) = (line for line in table if f"`{PREFIX}{name.upper()}`" in line)
        if isinstance(field.default, int | float | str):
            assert f"{field.default:g}" in row if not isinstance(field.default, str) else field.default in row


def test_exit_codes_are_those_of_the_errors() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", text_of(README), re.MULTILINE)
    assert {name: int(code) for code, name in rows} == {name: kind.exit_code for name, kind in KINDS.items()}


def test_configuration_keys_exist(tmp_path: Path) -> None:
    sections: dict[str, type[Frozen]] = {"checkpoint": CheckpointConfig, "supervisor": SupervisorConfig}
    dotted = [key.split(".") for page in PAGES for key in inline(page) if re.fullmatch(r"[a-z_]+\.[a-z_]+", key)]
    named = [(section, key) for section, key in dotted if section in sections]
    assert named
    assert [key for section, key in named if key not in sections[section].model_fields] == []
    (block,) = blocks(README, "yaml", "job")
    (tmp_path / "job.yaml").write_text(block)
    for words in commands("retoma"):
        sets = [
            words[i + 1] for i, word in enumerate(words[:-1]) if word == "--set" and words[i + 1] != "key=value"
        ]
        load_config(tmp_path / "job.yaml", sets)


def test_python_in_the_documents_compiles() -> None:
    for page in PAGES:
        for code in blocks(page, "python"):
            compile(code, page.name, "exec")


def test_no_document_names_a_place_on_the_machine_that_wrote_it() -> None:
    for page in PAGES:
        assert str(ROOT) not in text_of(page)
        assert "/home/" not in text_of(page)


def test_the_job_of_the_readme_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for language in ("python", "yaml"):
        (code,) = blocks(README, language, "job")
        file = tmp_path / f"jobs/spirals.{'py' if language == 'python' else language}"
        file.parent.mkdir(exist_ok=True)
        file.write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "jobs", raising=False)
    config = load_config(tmp_path / "jobs/spirals.yaml")
    try:
        done = train_range(config, str(tmp_path / "store"), "spirals")
    finally:
        for name in ("jobs", "jobs.spirals"):
            sys.modules.pop(name, None)
    assert done.position.epoch == config.epochs
    assert done.metrics["accuracy"] > 0.9


def run_example(test: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (code,) = blocks(README, "python", test)
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, f"README.md test={test}", "exec"), names)  # noqa: S102
    return names


def test_the_loop_of_the_readme_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_example("engine", tmp_path, monkeypatch)
    second = run_example("engine", tmp_path, monkeypatch)
    assert (first["first_epoch"], second["first_epoch"]) == (0, 3)
    assert second["checkpointer"].head.manifest.position.epoch == 6
    assert second["optimizer"].state[second["model"].weight]["step"] == 6


def test_the_two_argument_form_of_the_readme_saves_what_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = run_example("engine-short", tmp_path, monkeypatch)
    assert sorted(file.name for file in (tmp_path / "checkpoints/manifests/000001").iterdir()) == [
        "00000000.json",
        "00000001.json",
    ]
    restored = restore_checkpoint(LocalStore(tmp_path / "checkpoints"), 1, 1)
    assert restored.epoch == 10
    assert torch.equal(restored["weight"], names["model"].weight)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # DCP says so of every single process
def test_the_dcp_example_of_the_readme_brings_the_weights_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = run_example("dcp", tmp_path, monkeypatch)
    assert torch.equal(names["state"]["model"]["weight"], names["model"].weight)
    assert read_committed(LocalStore(tmp_path / "dcp-checkpoints"), 1, 0).manifest.kind == "base"


def test_the_numbers_of_the_readme_are_those_that_were_measured() -> None:
    rows = json.loads((ROOT / "benchmarks/results/engine.json").read_text())
    values = {(r["sequence"], r["engine"], r["metric"]): r["value"] for r in rows if r["gap_steps"] == 10}
    table = text_of(README).split("| bytes |")[1].split("\n\n")[0].splitlines()
    header, lines = table[0], table[2:]
    sequences = [cell.strip() for cell in header.split("|")[:-1]]
    assert sequences == ["dense", "finetune", "lora", "embedding"]
    measured = {engine for _, engine, metric in values if metric == "bytes_ratio"}
    assert {line.split("|")[1].strip() for line in lines} == measured
    for line in lines:
        engine, *cells = (cell.strip() for cell in line.split("|")[1:-1])
        expected = [f"{100 * values[name, engine, 'bytes_ratio']:.3g} %" for name in sequences]
        assert [cell.strip("*") for cell in cells] == expected, engine


# A reader that knows only the page about the format, against what was saved.


def reader() -> dict[str, Any]:
    (code,) = blocks(ROOT / "docs/format.md", "python", "format")
    assert not re.search(
        r"\b(training|torch|retoma)\b", "".join(re.findall(r"^(?:from|import) .*$", code, re.MULTILINE))
    )
    names: dict[str, Any] = {"__name__": "reader"}
    exec(compile(code, "docs/format.md", "exec"), names)  # noqa: S102
    return names


def plain(value: Any, tensor: type) -> Any:
    """Both sides in one form: tensors as dtype, shape and bytes; floats as bits; kinds of containers kept."""
    if isinstance(value, tensor):
        return (value.dtype, value.shape, value.data)  # type: ignore[attr-defined]
    if isinstance(value, np.ndarray | np.generic):
        value = torch.from_numpy(np.array(value))
    if isinstance(value, torch.Tensor):
        return (str(value.dtype).removeprefix("torch."), tuple(value.shape), tensor_bytes(value))
    if isinstance(value, dict):
        return (type(value).__name__, [(key, plain(inner, tensor)) for key, inner in value.items()])
    if isinstance(value, list | tuple):
        return (type(value).__name__, [plain(inner, tensor) for inner in value])
    return (type(value).__name__, value.hex() if isinstance(value, float) else value)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(("token", "sequence"), [(1, 0), (1, 1), (2, 2), (2, 3), (2, 4)])
def test_a_reader_written_from_the_page_gets_every_bit(token: int, sequence: int) -> None:
    names = reader()
    assert plain(names["read"](V1, token, sequence), names["Tensor"]) == plain(state_at(sequence), names["Tensor"])


@pytest.mark.parametrize("sequence", range(9))
def test_a_reader_written_from_the_page_knows_every_codec_and_rebased_forms(sequence: int) -> None:
    names, folder, token = reader(), ROOT / "tests/formats/v1/codecs", sequence // 3 + 1
    expected = restore_checkpoint(LocalStore(folder), token, sequence)
    assert plain(names["read"](folder, token, sequence), names["Tensor"]) == plain(dict(expected), names["Tensor"])


def test_the_reader_of_the_page_reads_chunks_of_several_frames(tmp_path: Path) -> None:
    names, numbers = reader(), torch.Generator().manual_seed(0)
    large = torch.randint(0, 2**31, (2_500_000,), generator=numbers, dtype=torch.int32)  # 10 MB, three frames
    noise = torch.randint(0, 2**31, (2_500_000,), generator=numbers, dtype=torch.int32)
    saved = []
    with IncrementalCheckpointer(tmp_path) as checkpointer:
        for change in range(4):
            if change == 1:
                large[1_500_000:1_600_000] += 1  # the second frame, a delta
            if change == 2:
                large[:100] += 1  # the first one
            if change == 3:
                large[1_000_000:1_200_000] -= 1  # the first and the second one
            noise[1_100_000:2_000_000] = torch.randint(0, 2**31, (900_000,), generator=numbers, dtype=torch.int32)
            checkpointer.save({"large": large, "noise": noise})
            checkpointer.wait()
            saved.append({"large": large.clone(), "noise": noise.clone()})
    lineage = [read_committed(LocalStore(tmp_path), 1, n).manifest for n in range(4)]
    shapes = [{c.key: (c.mode, len(c.frames)) for c in manifest.chunks} for manifest in lineage]
    assert [shape["large"] for shape in shapes] == [("full", 3), ("delta", 1), ("delta", 1), ("delta", 2)]
    assert shapes[1]["noise"] == ("full", 1)
    for sequence, state in enumerate(saved):
        found = names["read"](tmp_path, 1, sequence)
        assert {key: value.data for key, value in found.items()} == {k: tensor_bytes(t) for k, t in state.items()}


@pytest.mark.parametrize("bounded", [None, "int8", "int4"])
def test_the_reader_of_the_page_reads_every_codec(tmp_path: Path, bounded: Literal["int8", "int4"] | None) -> None:
    names, codecs = reader(), set()
    numbers = torch.Generator().manual_seed(0)
    master, table = torch.randn(1_500_000, generator=numbers), torch.randn(4001, 33, generator=numbers)
    moment = torch.rand(30_001, generator=numbers)
    with IncrementalCheckpointer(tmp_path, bounded=bounded) as checkpointer:
        for step in range(4):
            master.mul_(1.001)
            table[step * 7 :: 1000] += 1e-3
            moment.mul_(0.99)
            state = {"copy": master.bfloat16(), "m": {"exp_avg_sq": moment}, "master": master, "table": table}
            checkpointer.save(state)
            committed = checkpointer.wait()
            assert committed is not None
            codecs |= {chunk.codec for chunk in committed.manifest.chunks}
            restored = checkpointer.restore()
            expected = plain(dict(restored or {}), names["Tensor"])
            assert plain(names["read"](tmp_path, 1, step), names["Tensor"]) == expected
    lossy = {"int8": {"int8-blocks"}, "int4": {"int8-blocks", "int4-blocks"}}.get(bounded or "", set())
    assert codecs == {"blosc2-shuffle-zstd", "balanced", "bf16-cast"} | lossy


def test_the_reader_of_the_page_finds_the_head() -> None:
    assert reader()["head"](V1) == (2, 4)


def test_the_reader_of_the_page_refuses_a_flipped_bit(tmp_path: Path) -> None:
    names = reader()
    for source in sorted(file for file in V1.rglob("*") if file.is_file()):
        target = tmp_path / source.relative_to(V1)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    for file in ("packs/000001/00000000-r0000-00.pack", "manifests/000001/00000001.json"):
        data = bytearray((tmp_path / file).read_bytes())
        data[len(data) // 2] ^= 1
        (tmp_path / file).write_bytes(data)
        with pytest.raises(AssertionError):
            names["read"](tmp_path, 1, 1)
        (tmp_path / file).write_bytes((V1 / file).read_bytes())
    names["read"](tmp_path, 1, 1)
