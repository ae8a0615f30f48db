"""A training that is resumed from bounded checkpoints ends like one that was never interrupted."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.bounded_resume import BOUNDED, measure


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_runs_resumed_from_bounded_deltas_end_within_the_noise_of_seeds() -> None:
    rows = measure([0, 1, 2], ["epochs=3", "params.windows_per_epoch=960"])
    spread = statistics.stdev(row["exact"] for row in rows)
    for name in BOUNDED:
        assert all(row[f"{name}_resumes"] == 2 for row in rows), "a resume began from an exact checkpoint"
        assert any(row[name] != row["exact"] for row in rows), "nothing was bounded"
        off = statistics.fmean(row[name] - row["exact"] for row in rows)
        assert abs(off) < spread, f"{name} ends {off:+.4f} off, seeds differ by {spread:.4f}: {rows}"
