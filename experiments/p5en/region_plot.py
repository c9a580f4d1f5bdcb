"""The picture of results/region.csv. Decides nothing but how it looks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from point import MODES, PROMPTS, PUBLISHED_TTFT_MS, WITHIN

_INK, _SOFT, _PULL, _PUSH = "#22272e", "#6b7480", "#b5532f", "#2f6690"


def _label(axes: Any, mean: np.ndarray, level: float, mode: str, colour: str) -> None:
    """The value of a line: at the right for pull, which grows with the prompts, at the bottom for push."""
    along = mean[:, -1] if mode == "pull" else mean[0]
    if not along.min() < level < along.max():
        return
    where = float(np.interp(level, along, np.arange(len(along))))
    last = mean.shape[1] - 1
    place, align = ((last + 0.46, where), "right") if mode == "pull" else ((where + 0.06, -0.36), "left")
    text = axes.annotate(f"{mode} {level:,.0f}", place, ha=align, va="bottom", fontsize=8, color=colour, zorder=5)
    text.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.6})


def _edges(axes: Any, held: np.ndarray, i: int, j: int) -> None:
    """The sides of cell (i, j) beyond which the means do not both hold."""
    for di, dj in ((-1, 0), (1, 0), (0, -1), (0, 1)):
        beyond = (j + dj, i + di)
        if all(0 <= k < n for k, n in zip(beyond, held.shape, strict=True)) and held[beyond]:
            continue
        across = [i + di / 2, i + di / 2] if di else [i - 0.5, i + 0.5]
        up = [j + dj / 2, j + dj / 2] if dj else [j - 0.5, j + 0.5]
        axes.plot(across, up, color=_INK, linewidth=2, solid_capstyle="round", zorder=4)


def draw(rows: list[dict[str, float]], folder: Path) -> list[Path]:
    """Save region.svg and region.png into ``folder``."""
    import matplotlib as mpl
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    grid = [row for row in rows if row["prompts"] != PROMPTS]
    counts = sorted({row["prompts"] for row in grid})
    times = sorted({row["prefill_ms"] for row in grid})
    at = {(row["prompts"], row["prefill_ms"]): row for row in grid}

    def field(name: str) -> np.ndarray:
        return np.array([[at[count, time][name] for time in times] for count in counts])

    seeds_with_both = field("seeds_with_both")
    most = max(8, int(seeds_with_both.max()))
    shades = LinearSegmentedColormap.from_list("share", ["#ffffff", "#cfe3d4", "#5f9b76", "#27634a"])
    style = {"font.family": ["DejaVu Sans"], "font.size": 9, "svg.fonttype": "path", "svg.hashsalt": "pushkv"}
    with mpl.rc_context(style):
        figure = Figure(figsize=(8.4, 5.4), facecolor="white")
        axes = figure.add_axes((0.085, 0.115, 0.79, 0.70))
        x, y = range(len(times)), range(len(counts))
        image = axes.imshow(seeds_with_both, origin="lower", aspect="auto", cmap=shades, vmin=0, vmax=most)
        axes.set_xticks(x, [f"{time:.0f}" for time in times])
        axes.set_yticks(y, [f"{count:.0f}" for count in counts])
        axes.set_xlabel("P's prefill time for one prompt, ms", color=_SOFT)
        axes.set_ylabel("number of prompts", color=_SOFT)
        axes.tick_params(length=0, labelcolor=_SOFT)
        for side in axes.spines.values():
            side.set_visible(False)
        held = np.ones_like(seeds_with_both, dtype=bool)
        for mode, colour in zip(MODES, (_PULL, _PUSH), strict=True):
            target, mean = PUBLISHED_TTFT_MS[mode], field(f"{mode}_ttft_ms")
            held &= abs(mean / target - 1) <= WITHIN
            levels = [target * (1 - WITHIN), target, target * (1 + WITHIN)]
            axes.contour(x, y, mean, levels, colors=colour, linewidths=(1, 2, 1), linestyles=("--", "-", "--"))
            for level in levels:
                _label(axes, mean, level, mode, colour)
        for j, i in zip(*np.nonzero(held), strict=True):
            _edges(axes, held, i, j)
        axes.set_xlim(-0.5, len(times) - 0.5)
        axes.set_ylim(-0.5, len(counts) - 0.5)
        bar = figure.colorbar(image, cax=figure.add_axes((0.895, 0.115, 0.018, 0.70)), ticks=range(0, most + 1, 2))
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0, labelcolor=_SOFT)
        bar.set_label("seeds of 20 with both within 15 %", color=_SOFT)
        title = "The published TTFT pair needs a short run and a P that has most of each prompt cached"
        figure.text(0.015, 0.965, title, va="top", fontsize=11.5, weight="bold", color=_INK)
        lines = (
            "Qwen3-32B TP8 on P5en over EFA, 16k in, 128 out, 8 requests per second."
            " Framed: both means over 20 seeds within 15 %.\n"
            "Lines: mean TTFT in ms, published value and ±15 %, pull (1744) and push (540)."
        )
        figure.text(0.015, 0.918, lines, va="top", fontsize=8.5, color=_SOFT, linespacing=1.4)
        paths = [folder / "region.svg", folder / "region.png"]
        for path in paths:
            figure.savefig(path, dpi=180, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths
