"""The chart: bytes by sequence, and the stall, of each engine."""

from __future__ import annotations

from pathlib import Path

from benchmarks.results import Results


def draw(results: Results, file: Path) -> None:
    """Bytes at gap 10 by sequence, and the stall on the dense one."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "retoma"  # the same figures give the same file
    from matplotlib import pyplot as plt

    names = results.engines()[::-1]
    panels = [(sequence, "bytes_ratio", 100.0, "% of the state") for sequence in results.about]
    panels.append(
        ("dense" if "dense" in results.about else next(iter(results.about)), "stall_ms", 1.0, "ms blocked")
    )
    figure, axes = plt.subplots(1, len(panels), figsize=(2.5 * len(panels), 0.34 * len(names) + 1.3), sharey=True)
    for axis, (sequence, metric, factor, unit) in zip(axes, panels, strict=True):
        values = [factor * (results.value(sequence, 10, name, metric) or 0.0) for name in names]
        colours = ["#1f6f8b" if name.startswith("retoma") else "#b8b8b8" for name in names]
        bars = axis.barh(names, values, color=colours)
        axis.bar_label(bars, [f"{value:.3g}" if value else "-" for value in values], padding=2, fontsize=8)
        axis.set_xlim(0, 1.25 * max(values, default=1.0) or 1.0)
        axis.set_title(
            f"{sequence}\n{unit}" if metric == "bytes_ratio" else f"stall, {sequence}\n{unit}", fontsize=9
        )
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xticks([])
        floor = results.floors.get((sequence, 10))
        if metric == "bytes_ratio" and floor:
            axis.axvline(factor * floor, color="#c0392b", linewidth=1, linestyle=":")
    figure.suptitle("A save every 10 steps (dotted: entropy of the delta)", fontsize=10)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)
