"""A run's whole history as one HTML page with an inline SVG, and as a table. No scripts, no outside resources.

One lane for each attempt, time from left to right: bases are squares, deltas are circles, and a dashed arrow shows
which checkpoint an attempt was restored from.
"""

from __future__ import annotations

from html import escape
from typing import Any

from infra.mlflow_text import epoch_range, ratio
from training.checkpoint.history import Attempt, Lineage
from training.checkpoint.manifest import Committed
from training.checkpoint.outcomes import outcomes

_COLUMNS = (
    "token",
    "sequence",
    "kind",
    "epoch",
    "step",
    "parent",
    "written_bytes",
    "state_bytes",
    "ratio",
    "digest",
    "created",
)
_DRAWN_LIMIT = 400  # newest checkpoints in the picture; the table has all
_LEFT, _TOP, _GAP, _LANE, _SIZE = 210, 44, 34, 64, 9

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; color: #1f2933; background: #fff; margin: 24px; }
h1 { font-size: 20px; margin: 0 0 4px; } h2 { font-size: 16px; margin: 28px 0 8px; }
p { margin: 4px 0; } code { font-family: ui-monospace, monospace; font-size: 12px; }
.picture { overflow-x: auto; border: 1px solid #d9e2ec; border-radius: 6px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 12px 3px 0; text-align: right; border-bottom: 1px solid #e4e7eb; white-space: nowrap; }
th { color: #52606d; font-weight: 600; } .l { text-align: left; } .w { white-space: normal; }
.muted { color: #7b8794; }
svg text { font: 12px system-ui, sans-serif; fill: #1f2933; } svg .s { font-size: 10px; fill: #52606d; }
.lane { fill: #f5f7fa; } .base { fill: #0b69a3; } .delta { fill: #fff; stroke: #0b69a3; stroke-width: 2; }
.next { stroke: #0b69a3; stroke-width: 2; } .from { stroke: #b44d12; stroke-width: 1.5; fill: none;
stroke-dasharray: 5 3; } .tip { fill: #b44d12; } .head { fill: none; stroke: #2f8132; stroke-width: 2; }
"""

_ARROW_TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    '<path class="tip" d="M0 0 L8 4 L0 8 z"/></marker></defs>'
)


def lineage_table(lineage: Lineage) -> dict[str, Any]:
    """Columns and rows of all checkpoints, in the shape that MLflow's artifact viewer shows as a table."""
    return {"columns": list(_COLUMNS), "data": [_row(committed) for committed in lineage.chain]}


def lineage_page(run: str, store_url: str, lineage: Lineage) -> str:
    """The page, as a whole HTML document."""
    head = lineage.head
    summary = (
        f"head <code>{head.ref}</code>, continues at epoch {head.manifest.position.epoch}, "
        f"step {head.manifest.position.step}"
        if head
        else "no checkpoint yet"
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Lineage of {escape(run)}</title>
<style>{_STYLE}</style></head><body>
<h1>Lineage of {escape(run)}</h1>
<p>{summary}</p>
<p class="muted">store <code>{escape(store_url)}</code></p>
<div class="picture">{_picture(lineage)}</div>
<p class="muted">&#9632; base &nbsp; &#9675; delta on the one before &nbsp; dashed: restored from &nbsp;
green ring: head. Point at a checkpoint to read its step and size.</p>
{_attempts(lineage)}
{_problems(lineage)}
<h2>Checkpoints</h2>
{_checkpoints(lineage)}
</body></html>
"""


def _picture(lineage: Lineage) -> str:
    drawn = lineage.chain[-_DRAWN_LIMIT:]
    lanes = {attempt.token: number for number, attempt in enumerate(lineage.attempts)}
    for committed in drawn:  # a token whose claim is lost still has a lane
        lanes.setdefault(committed.ref.token, len(lanes))
    places = {
        (c.ref.token, c.ref.sequence): (_LEFT + number * _GAP, _TOP + lanes[c.ref.token] * _LANE)
        for number, c in enumerate(drawn)
    }
    width = _LEFT + max(len(drawn), 6) * _GAP + 20
    height = _TOP + max(len(lanes), 1) * _LANE - 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img">',
        f"<title>{len(lineage.chain)} checkpoints in {len(lanes)} attempts</title>",
        _ARROW_TIP,
    ]
    if len(drawn) < len(lineage.chain):
        parts.append(f'<text class="s" x="{_LEFT}" y="14">the newest {len(drawn)} of {len(lineage.chain)}</text>')
    attempts = {attempt.token: attempt for attempt in lineage.attempts}
    parts += [_lane(token, attempts.get(token), number, width) for token, number in lanes.items()]
    parts += [_link(c, places) for c in drawn]
    parts += [_restored(attempt, lanes[attempt.token], places, drawn) for attempt in lineage.attempts]
    parts += [_mark(c, places[c.ref.token, c.ref.sequence], c is lineage.head) for c in drawn]
    return "\n".join([*filter(None, parts), "</svg>"])


def _lane(token: int, attempt: Attempt | None, number: int, width: int) -> str:
    y = _TOP + number * _LANE
    span = epoch_range(attempt) if attempt else None
    what = f"epochs {span[0]}-{span[1]}" if span else "attempt"
    return (
        f'<rect class="lane" x="4" y="{y - 26}" width="{width - 8}" height="{_LANE - 12}" rx="6"/>'
        f'<text x="16" y="{y - 2}">{what}</text>'
        f'<text class="s" x="16" y="{y + 14}">token {token}{_state(attempt)}</text>'
    )


def _state(attempt: Attempt | None) -> str:
    if attempt is None:
        return ", claim lost"
    if attempt.seal is None:
        return ", never started"
    return ", from the beginning" if attempt.seal.head is None else f", from {attempt.seal.head}"


def _link(committed: Committed, places: dict[tuple[int, int], tuple[int, int]]) -> str:
    """The line to the parent within one attempt; between attempts the dashed arrow tells it."""
    parent = committed.manifest.parent
    if parent is None or parent.token != committed.ref.token or (parent.token, parent.sequence) not in places:
        return ""
    (x1, y1), (x2, y2) = places[parent.token, parent.sequence], places[committed.ref.token, committed.ref.sequence]
    return f'<line class="next" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>'


def _restored(
    attempt: Attempt, lane: int, places: dict[tuple[int, int], tuple[int, int]], drawn: list[Committed]
) -> str:
    head = attempt.seal.head if attempt.seal else None
    if head is None or (head.token, head.sequence) not in places:
        return ""
    x1, y1 = places[head.token, head.sequence]
    own = [c for c in drawn if c.ref.token == attempt.token]
    x2 = places[own[0].ref.token, own[0].ref.sequence][0] if own else x1 + _GAP
    y2 = _TOP + lane * _LANE
    path = f"M{x1} {y1 + _SIZE} C{x1} {y2 - 8}, {x1} {y2}, {x2 - _SIZE - 3} {y2}"
    return f'<path class="from" d="{path}" marker-end="url(#tip)"/>'


def _mark(committed: Committed, place: tuple[int, int], is_head: bool) -> str:
    (x, y), manifest, share = place, committed.manifest, ratio(committed)
    size = f"{manifest.costs.written_bytes:,} bytes" + (f", {share:.1%} of the state" if share is not None else "")
    title = f"{manifest.kind} {committed.ref}: step {manifest.position.step}, {size}"
    if manifest.kind == "base":
        shape = (
            f'<rect class="base" x="{x - _SIZE}" y="{y - _SIZE}" width="{2 * _SIZE}" height="{2 * _SIZE}" rx="2"/>'
        )
    else:
        shape = f'<circle class="delta" cx="{x}" cy="{y}" r="{_SIZE - 2}"/>'
    ring = f'<circle class="head" cx="{x}" cy="{y}" r="{_SIZE + 3}"/>' if is_head else ""
    label = f'<text class="s" x="{x}" y="{y - 15}" text-anchor="middle">{manifest.position.step}</text>'
    return f"<g><title>{escape(title)}</title>{ring}{shape}{label}</g>"


def _attempts(lineage: Lineage) -> str:
    rows, ends = [], outcomes(lineage)
    for attempt in lineage.attempts:
        span = epoch_range(attempt)
        who = attempt.claim.who if attempt.claim else {}
        skipped = attempt.seal.skipped if attempt.seal else ()
        reasons = "; ".join(f"{s.key}: {s.reason}" for s in skipped)
        cells = (
            attempt.token,
            f"{span[0]}-{span[1]}" if span else "",
            _state(attempt).removeprefix(", "),
            sum(c.ref.token == attempt.token for c in lineage.chain),
            f"{who.get('host', '')} {who.get('pid', '')}".strip(),
        )
        texts = (ends[attempt.token].verdict, ends[attempt.token].aftermath, reasons)
        rows.append(_cells(cells) + "".join(f'<td class="l w">{escape(text)}</td>' for text in texts))
    names = ("token", "epochs", "restored", "checkpoints", "by", "how it ended", "what followed", "skipped")
    return "<h2>Attempts</h2>\n" + _table(names, rows)


def _problems(lineage: Lineage) -> str:
    if not lineage.problems:
        return ""
    items = "".join(f"<li><code>{escape(p.key)}</code>: {escape(p.reason)}</li>" for p in lineage.problems)
    return f"<h2>Missing or damaged</h2><ul>{items}</ul>"


def _checkpoints(lineage: Lineage) -> str:
    return _table(_COLUMNS, [_cells(tuple(_row(committed))) for committed in lineage.chain])


def _row(committed: Committed) -> list[Any]:
    manifest, share = committed.manifest, ratio(committed)
    return [
        manifest.token,
        manifest.sequence,
        manifest.kind,
        manifest.position.epoch,
        manifest.position.step,
        str(manifest.parent) if manifest.parent else "",
        manifest.costs.written_bytes,
        manifest.costs.state_bytes,
        None if share is None else round(share, 4),
        committed.ref.digest,
        manifest.writer.created,
    ]


def _cells(values: tuple[Any, ...]) -> str:
    return "".join(
        f'<td class="l">{escape(value)}</td>' if isinstance(value, str) else f"<td>{escape(_shown(value))}</td>"
        for value in values
    )


def _shown(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1%}" if isinstance(value, float) else f"{value:,}"


def _table(names: tuple[str, ...], rows: list[str]) -> str:
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in names)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
