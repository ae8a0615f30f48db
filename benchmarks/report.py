"""Results as rows for machines, a page for people, and a chart."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.chart import draw
from benchmarks.engines import ENGINES
from benchmarks.machine import machine
from benchmarks.results import DEFINITIONS, Results

PACKAGES = (
    "torch",
    "numpy",
    "blosc2",
    "safetensors",
    "zipnn",
    "moonclip",
    "orbax-checkpoint",
    "jax",
    "tensorstore",
)

SETUP = """\
Saves: {saves}. The first is a base, the tenth is one again. Engines that write everything each time: two at gaps
1 and 100. Each engine has a process of its own with one torch thread, and a local folder. It sees the same tensors,
which change in place, and what an exact one restores is compared bit for bit."""
FLOOR = """\
Percent of the raw state. *floor*: order-0 entropy of one delta: for each tensor which rows changed, and of those
each byte plane by itself, of the difference or of the new values, whichever is less."""


def write(results: Results, out: Path, chart: Path) -> list[Path]:
    """`engine.json` with the agreed metrics, `engine-more.json` with the rest, a dated page, and the chart."""
    out.mkdir(parents=True, exist_ok=True)
    date = f"{datetime.now(UTC):%Y-%m-%d}"
    facts = machine(PACKAGES)
    more = {
        "date": date,
        "machine": facts,
        "saves_by_gap": results.saves,
        "memcpy_mb_s": results.memcpy_mb_s,
        "absent": results.absent,
        "seconds": results.seconds,
        "definitions": DEFINITIONS,
        "rows": results.rows(wanted=False),
    }
    files = {
        out / "engine.json": json.dumps(results.rows(wanted=True), indent=0) + "\n",
        out / "engine-more.json": json.dumps(more, indent=0) + "\n",
        out / f"{date}-engine.md": as_markdown(results, facts, date),
    }
    for file, text in files.items():
        file.write_text(text)
    draw(results, chart)
    return [*files, chart]


def as_markdown(results: Results, facts: dict[str, Any], date: str) -> str:
    """The page for people."""
    versions = ", ".join(f"{name} {facts[name]}" for name in ("python", *PACKAGES) if name in facts)
    lines = [
        f"# The engine and its peers, {date}",
        "",
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB; {versions}.",
        f"Revision {facts['revision']}. Made by `make bench` in {results.seconds['all'] / 60:.0f} minutes,",
        f"load {facts['load_average_1_minute']} at the end.",
        *(["**A smoke run: the states are tiny and the figures mean nothing.**"] if results.smoke else []),
        "",
        "Sizes depend on the trainings alone. Times depend on the machine and its load: compare within this page.",
        "",
        "## Setup",
        "",
        "| sequence | training | state | first save at step (gap 1, 10, 100) |",
        "|---|---|---|---|",
        *_setup(results),
        "",
        *SETUP.format(saves=", ".join(f"{count} at gap {gap}" for gap, count in results.saves.items())).split("\n"),
        "",
        *[
            f"- **{name}**: {_first_line(engine.__doc__)}"
            for name, engine in ENGINES.items()
            if _first_line(engine.__doc__)
        ],
        *[f"- **{name}** is absent: {reason}." for name, reason in results.absent.items()],
        "",
        f"memcpy, one thread: {results.memcpy_mb_s / 1000:.1f} GB/s.",
        "",
        "## Bytes",
        "",
        *FLOOR.split("\n"),
        "",
        *_bytes_table(results),
    ]
    for sequence in results.about:
        lines += ["", f"## {sequence}, gap 10", "", *_cost_table(results, sequence)]
    lines += ["", "## Training while it saves", "", *_slowdown_table(results)]
    lines += ["", "## Columns", "", *[f"- `{name}`: {text}." for name, text in DEFINITIONS.items()], ""]
    return "\n".join(lines)


def _first_line(text: str | None) -> str:
    return re.split(r"\n", text or "", maxsplit=1)[0].rstrip(".")


def _setup(results: Results) -> list[str]:
    rows = []
    for sequence, about in results.about.items():
        state = next((m["state_mb"] for (s, _, _), m in results.values.items() if s == sequence), 0.0)
        steps = ", ".join(str(results.first_steps[sequence, gap]) for gap in results.saves)
        rows.append(f"| {sequence} | {about} | {state:.0f} MB | {steps} |")
    return rows


def _bytes_table(results: Results) -> list[str]:
    columns = [(sequence, gap) for sequence in results.about for gap in results.saves]
    lines = [
        "| | " + " | ".join(f"{sequence} {gap}" for sequence, gap in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
        "| *floor* | " + " | ".join(f"*{_percent(results.floors.get(column))}*" for column in columns) + " |",
    ]
    for name in results.engines():
        cells = [_percent(results.value(sequence, gap, name, "bytes_ratio")) for sequence, gap in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.3g}"


_COST_COLUMNS = {
    "stall": "stall_ms",
    "without overlap": "stall_without_overlap_ms",
    "until stored": "save_ms",
    "encode MB/s": "encode_mb_s",
    "save MB/s of CPU": "save_cpu_mb_s",
    "decode MB/s of CPU": "decode_mb_s",
    "decode alone MB/s": "decode_alone_mb_s",
    "restore": "restore_ms",
    "x torch.load": "restore_over_torch_load",
    "compacted, x torch.load": "restore_compacted_over_torch_load",
    "peak MB": "peak_mb",
}


def _cost_table(results: Results, sequence: str) -> list[str]:
    gap = 10
    lines = [f"| | {' | '.join(_COST_COLUMNS)} |", "|---" * (len(_COST_COLUMNS) + 1) + "|"]
    for name in results.engines():
        if not results.values.get((sequence, gap, name)):
            continue
        values = {metric: results.value(sequence, gap, name, metric) for metric in _COST_COLUMNS.values()}
        lines.append(f"| {name} | {' | '.join(_cell(metric, value) for metric, value in values.items())} |")
    return lines


def _cell(metric: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.{1 if value < 100 else 0}f}" + (" ms" if metric.endswith("_ms") else "")


def _slowdown_table(results: Results) -> list[str]:
    lines = [
        "The dense training, one thread, a save after every fifth step: time with saves over time without.",
        "",
        "| | slowdown | step without saves | longest stall |",
        "|---|---|---|---|",
    ]
    for name in results.engines():
        metrics = results.values.get(("dense", 1, name), {})
        if "slowdown" in metrics:
            cells = (f"{metrics['slowdown']:.2f}", f"{metrics['step_ms']:.0f} ms")
            lines.append(f"| {name} | {' | '.join(cells)} | {metrics['longest_stall_ms']:.0f} ms |")
    return lines
