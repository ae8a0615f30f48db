"""The report on drills: Markdown for the orchestrator's page, and one HTML page that needs nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape

from tasks.drill.checks import Check, judge
from tasks.drill.measures import Trial, began, goodput, steps_at_risk, trials
from tasks.drill.recording import Recording
from tasks.drill.timeline import draw
from tasks.drill.worlds import in_words

COLUMNS = ("fault", "at", "verdict", "by", "new token", "first step", "steps lost", "taken back", "whole")
WORDS = {
    "verdict": "from the fault until somebody said that the attempt is over",
    "new token": "until the next attempt had claimed its token",
    "first step": "until that attempt had trained its first step; where nobody took over: the longest stand-still",
    "steps lost": "steps that had been trained and were trained again",
    "taken back": "when the fault was: the wire mended, the process woken, the node started again",
    "whole": "from then until a group of as many ranks as before had committed",
    "goodput": "time of the steps that lasted, over all time from the first step on; of one fault in a short "
    "training it says little",
}
LEGEND = (
    ("#2a7f8e", "steps that lasted"),
    ("#d98e73", "steps trained again"),
    ("#d5dde4", "claimed: starting, restoring, or silent"),
    ("#b3261e", "fault (dashed: taken back)"),
    ("#e2a400", "verdict"),
    ("#0d3b44", "checkpoint"),
)
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#22303c;max-width:1000px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.15rem;margin:2.2rem 0 .4rem}
table{border-collapse:collapse;font-size:13.5px;margin:.6rem 0;width:100%}
th,td{text-align:left;padding:.28rem .6rem .28rem 0;border-bottom:1px solid #e6eaee;vertical-align:top}
th{color:#66737f;font-weight:600}td{font-variant-numeric:tabular-nums}
.pass,.fail,.skip{display:inline-block;border-radius:4px;padding:0 .5rem;font-weight:600;font-size:13px;color:#fff}
.pass{background:#2b7a4b}.fail{background:#b3261e}.skip{background:#7a8791}
.key{font-size:13px;color:#66737f}.key i{display:inline-block;width:11px;height:11px;margin:0 .3rem 0 .9rem}
svg{width:100%;height:auto;display:block}details{font-size:13.5px}dl{font-size:13.5px;color:#66737f}
dt{font-weight:600;float:left;clear:left;width:7rem}dd{margin:0 0 .2rem 7rem}
"""


@dataclass
class Drill:
    """Everything that one call of `retoma drill` has done.

    Attributes:
        about: what it ran on, in words.
        recordings: one for each scenario.
        skipped: scenarios that were not possible here, and why.
    """

    started: datetime
    about: dict[str, str]
    recordings: list[Recording] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def checks(self) -> dict[str, list[Check]]:
        """The verdicts, by scenario."""
        return {recording.scenario: judge(recording) for recording in self.recordings}

    @property
    def passed(self) -> bool:
        """Whether there was a drill, and every check of every one holds."""
        found = self.checks()
        return bool(found) and all(check.passed for checks in found.values() for check in checks)


def markdown(drill: Drill) -> str:
    """For a page of Prefect, or a terminal."""
    lines = [f"# Drill: {_word(drill.passed)}", "", f"{drill.started:%Y-%m-%d %H:%M} UTC. {_about(drill)}", ""]
    lines += _md_table(("scenario", *COLUMNS), [[r.scenario, *row] for r in drill.recordings for row in _rows(r)])
    for recording in drill.recordings:
        checks = judge(recording)
        title = f"{recording.scenario}: {_word(all(check.passed for check in checks))}"
        lines += ["", f"## {title}", "", _summary(recording), ""]
        lines += [
            f"- {_word(check.passed)} {check.name}{': ' if check.detail else ''}{check.detail}" for check in checks
        ]
    if drill.skipped:
        lines += ["", "## Not possible here", ""]
        lines += [f"- {name}: {reason}" for name, reason in drill.skipped.items()]
    lines += ["", *(f"*{word}*: {meaning}.  " for word, meaning in WORDS.items())]
    return "\n".join(lines) + "\n"


def page(drill: Drill) -> str:
    """One HTML file without anything from elsewhere."""
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'>",
        f"<title>retoma drill: {_word(drill.passed)}</title><style>{STYLE}</style></head><body>",
        f"<h1>Drill {_badge(drill.passed)}</h1>",
        f"<p>{drill.started:%Y-%m-%d %H:%M} UTC. {escape(_about(drill))}</p>",
        _overview(drill),
    ]
    for recording in drill.recordings:
        parts.append(_section(recording))
    if drill.skipped:
        rows = [[name, reason] for name, reason in drill.skipped.items()]
        parts.append("<h2>Not possible here</h2>" + _html_table(("scenario", "reason"), rows))
    words = "".join(f"<dt>{escape(word)}</dt><dd>{escape(meaning)}</dd>" for word, meaning in WORDS.items())
    parts.append(f"<h2>Words</h2><dl>{words}</dl></body></html>")
    return "\n".join(parts)


def _overview(drill: Drill) -> str:
    head = ("scenario", "verdict", "faults", "worst first step", "most steps lost", "goodput")
    rows = []
    for recording in drill.recordings:
        found = trials(recording)
        worst = [t.recovery_seconds for t in found if t.recovery_seconds is not None]
        lost = [t.steps_lost for t in found if t.steps_lost is not None]
        rows.append(
            [
                recording.scenario,
                _badge(all(check.passed for check in judge(recording))),
                str(len(found)),
                _seconds(max(worst, default=None)),
                str(max(lost, default="")),
                _percent(goodput(recording)),
            ]
        )
    return _html_table(head, rows, raw=(1,))


def _section(recording: Recording) -> str:
    checks = judge(recording)
    legend = "".join(f"<i style='background:{colour}'></i>{escape(text)}" for colour, text in LEGEND)
    rows = [[_badge(check.passed), check.name, check.detail] for check in checks]
    return "\n".join(
        [
            f"<h2>{escape(recording.scenario)} {_badge(all(check.passed for check in checks))}</h2>",
            f"<p>{escape(_summary(recording))}</p>",
            draw(recording),
            f"<p class='key'>{legend}</p>",
            _html_table(COLUMNS, _rows(recording)),
            _html_table(("", "what must hold", "seen"), rows, raw=(0,)),
        ]
    )


def _summary(recording: Recording) -> str:
    steps = max((commit.step for commit in recording.commits), default=0)
    ranks = in_words(recording)
    return (
        f"Run {recording.run}: {steps} steps {f'by {ranks} ' if ranks else ''}in {len(recording.tokens)} attempts, "
        f"{len(recording.commits)} checkpoints, goodput {_percent(goodput(recording))}; "
        f"a fault may cost {steps_at_risk(recording)} steps."
    )


def _rows(recording: Recording) -> list[list[str]]:
    return [_row(recording, trial) for trial in trials(recording)]


def _row(recording: Recording, trial: Trial) -> list[str]:
    name = f"{trial.fault} {trial.detail}".strip()
    return [
        name,
        f"{trial.at - began(recording):.1f} s",
        _seconds(trial.verdict_seconds),
        trial.by,
        _seconds(trial.claim_seconds),
        _seconds(trial.recovery_seconds),
        "" if trial.steps_lost is None else str(trial.steps_lost),
        _seconds(trial.until_seconds),
        _seconds(trial.whole_seconds),
    ]


def _about(drill: Drill) -> str:
    return "; ".join(f"{name}: {value}" for name, value in drill.about.items()) + "."


def _word(passed: bool) -> str:
    return "pass" if passed else "FAIL"


def _badge(passed: bool) -> str:
    return f"<span class='{'pass' if passed else 'fail'}'>{_word(passed)}</span>"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:.0f} %"


def _md_table(head: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def _html_table(head: tuple[str, ...], rows: list[list[str]], raw: tuple[int, ...] = ()) -> str:
    """`raw`: columns that are HTML already."""
    top = "".join(f"<th>{escape(title)}</th>" for title in head)
    body = ""
    for row in rows:
        cells = [cell if at in raw else escape(cell) for at, cell in enumerate(row)]
        body += "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    return f"<table><tr>{top}</tr>{body}</table>"


def now() -> datetime:
    """Time of the start, for people."""
    return datetime.now(UTC)
