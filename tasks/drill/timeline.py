"""The picture of a drill: attempts as bars over time, with faults, verdicts and checkpoints on them. SVG."""

from __future__ import annotations

from html import escape

from tasks.drill.measures import Trial, began, stretches, trials, useful_steps
from tasks.drill.recording import Recording, TokenSeen

WIDTH, LEFT, RIGHT = 960, 86, 16
TOP, ROW, BAR = 58, 26, 14
TICKS = (0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 3600)
STYLE = """
.t{font:12px system-ui,sans-serif;fill:#33404d}.s{font:11px system-ui,sans-serif;fill:#66737f}
.grid{stroke:#e6eaee}.wait{fill:#d5dde4}.useful{fill:#2a7f8e}.lost{fill:#d98e73}
.fault{stroke:#b3261e;stroke-width:1.4}.faultname{font:600 11px system-ui,sans-serif;fill:#b3261e}
.back{stroke:#7a8791;stroke-width:1;stroke-dasharray:3 3}.verdict{fill:#e2a400;stroke:#7a5900;stroke-width:.6}
.commit{stroke:#0d3b44;stroke-width:1}.void{stroke:#b3261e;stroke-width:1}
"""


def draw(recording: Recording) -> str:
    """One SVG element, complete with its style."""
    end = _end(recording)
    scale = _Scale(began(recording), end)
    height = TOP + ROW * max(1, len(recording.tokens)) + 34
    title = escape(f"Attempts of run {recording.run} over time")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}">',
        f"<style>{STYLE}</style>",
        *_axis(scale, height),
    ]
    for row, seen in enumerate(recording.tokens):
        parts += _attempt(recording, seen, TOP + ROW * row, scale)
    parts += _faults(recording, scale, height)
    return "".join([*parts, "</svg>"])


class _Scale:
    """Seconds to picture."""

    def __init__(self, begin: float, end: float) -> None:
        self.begin, self.seconds = begin, max(end - begin, 1.0)

    def x(self, at: float) -> float:
        share = min(1.0, max(0.0, (at - self.begin) / self.seconds))
        return LEFT + (WIDTH - LEFT - RIGHT) * share


def _end(recording: Recording) -> float:
    """The last step that was measured: what comes after it is no part of the drill."""
    last = max((at for times in recording.steps.values() for at in times), default=recording.ended)
    return min(last, (recording.hurried or last) + 3.0)


def _axis(scale: _Scale, height: int) -> list[str]:
    step = next((tick for tick in TICKS if scale.seconds / tick <= 12), TICKS[-1])
    parts = []
    for number in range(int(scale.seconds / step) + 1):
        x = scale.x(scale.begin + number * step)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{height - 26}"/>')
        parts.append(
            f'<text class="s" x="{x:.1f}" y="{height - 10}" text-anchor="middle">{number * step:g} s</text>'
        )
    return parts


def _attempt(recording: Recording, seen: TokenSeen, y: float, scale: _Scale) -> list[str]:
    """Grey: claimed, restoring; then steps that lasted, then steps that were trained again."""
    steps = recording.steps.get(seen.pid or 0, ())
    useful = useful_steps(recording, seen)
    ends = [at for at in (seen.ended, steps[-1] if steps else None, seen.sealed, seen.claimed) if at is not None]
    bars = [("wait", seen.claimed, max(ends[:1] + list(steps[-1:])), "restoring, or silent")]
    if steps:
        text = f"{useful} steps that lasted"
        bars += [("useful", begin, end, text) for begin, end in stretches(recording, seen.pid, steps[:useful])]
        text = f"{len(steps) - useful} steps that were trained again"
        again = steps[max(useful - 1, 0) :] if useful < len(steps) else ()
        bars += [("lost", begin, end, text) for begin, end in stretches(recording, seen.pid, again)]
    parts = [f'<text class="t" x="8" y="{y + BAR - 2}">token {seen.token}</text>']
    for name, begin, end, about in bars:
        x, width = scale.x(begin), max(1.0, scale.x(end) - scale.x(begin))
        parts.append(
            f'<rect class="{name}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2">'
            f"<title>token {seen.token}: {escape(about)}</title></rect>"
        )
    for commit in recording.commits:
        if commit.token == seen.token and commit.at:
            x, name = scale.x(commit.at), "void" if commit.void else "commit"
            parts.append(
                f'<line class="{name}" x1="{x:.1f}" y1="{y + BAR - 4}" x2="{x:.1f}" y2="{y + BAR + 4}">'
                f"<title>{commit.kind} {commit.token:06d}/{commit.sequence:08d}, step {commit.step}</title></line>"
            )
    return parts


def _faults(recording: Recording, scale: _Scale, height: int) -> list[str]:
    parts: list[str] = []
    room = [0.0, 0.0, 0.0]  # where the last label of each line ends
    for trial in trials(recording):
        x = scale.x(trial.at)
        parts.append(f'<line class="fault" x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{height - 26}"/>')
        if trial.until_seconds is not None and trial.until_seconds > 0.5:
            back = scale.x(trial.at + trial.until_seconds)
            parts.append(f'<line class="back" x1="{back:.1f}" y1="{TOP - 8}" x2="{back:.1f}" y2="{height - 26}"/>')
        parts += _verdict(recording, trial, scale)
        width = 6.2 * len(trial.fault) + 8
        at = min(x, WIDTH - RIGHT - width)
        free = [line for line, end in enumerate(room) if end <= at]
        if free:  # where there is no room the line says it when pointed at
            room[free[0]] = at + width
            parts.append(
                f'<text class="faultname" x="{at:.1f}" y="{TOP - 14 - 14 * free[0]}">{escape(trial.fault)}</text>'
            )
    return parts


def _verdict(recording: Recording, trial: Trial, scale: _Scale) -> list[str]:
    row = next((n for n, seen in enumerate(recording.tokens) if seen.token == trial.token), None)
    if trial.verdict_seconds is None or row is None:
        return []
    x, y = scale.x(trial.at + trial.verdict_seconds), TOP + ROW * row + BAR / 2
    about = escape(f"verdict after {trial.verdict_seconds:.1f} s by {trial.by}")
    points = f"{x - 5:.1f},{y} {x:.1f},{y - 5} {x + 5:.1f},{y} {x:.1f},{y + 5}"
    return [f'<polygon class="verdict" points="{points}"><title>{about}</title></polygon>']
