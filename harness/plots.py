"""Figures of near-ties, in colours that readers without red-green vision tell apart; matplotlib alone."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from harness.near_ties import Gaps
from variants.errors import DeviceError

# Okabe and Ito's palette.
BLUE, VERMILION, BLACK, GREY = "#0072B2", "#D55E00", "#000000", "#BBBBBB"
BINS = 40


def plot_near_ties(gaps: Gaps, path: Path, *, noise_nats: float | None = None) -> Path:
    """Write a PNG: the histogram of gaps with the noise scale drawn in, and the grid of prompts by positions.

    Raises DeviceError where the file cannot be written.
    """
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.2))
    _histogram(left, gaps, noise_nats)
    _grid(figure, right, gaps)
    said = "float64 oracle" if gaps.source == "oracle" else "as recorded by the reference engine, no oracle"
    figure.suptitle(f"Gap between the first two tokens, golden {gaps.golden.name} ({said})")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise DeviceError(f"cannot write {path}: {error.strerror}; name another folder by results=") from error
    return path


def _histogram(axes: Axes, gaps: Gaps, noise_nats: float | None) -> None:
    known = gaps.gaps[~np.isnan(gaps.gaps)]
    apart = known[known > 0]
    shown = np.append(apart, noise_nats or [])
    low, high = (shown.min(), shown.max()) if shown.size else (1e-3, 1.0)
    edges = np.geomspace(low, max(high, low * 1.01), BINS + 1).tolist()
    axes.hist(apart, edges, color=BLUE, label=f"{gaps.judge}, {known.size} places")
    if gaps.source == "oracle" and gaps.golden_gaps is not None:
        axes.hist(gaps.golden_gaps[gaps.golden_gaps > 0], edges, histtype="step", color=BLACK, label="as recorded")
    if noise_nats:
        under = f"noise {noise_nats:.3g} nat, {gaps.under(noise_nats)} places under it"
        axes.axvline(noise_nats, color=VERMILION, linewidth=2, linestyle="--", label=under)
    if ties := int(np.count_nonzero(known == 0)):
        axes.plot([], [], " ", label=f"and {ties} exact ties, off this scale")
    axes.set(xscale="log", xlabel="gap between the first two tokens (nat)", ylabel="places")
    axes.legend(loc="upper left", framealpha=1.0, fontsize="small")


def _grid(figure: Figure, axes: Axes, gaps: Gaps) -> None:
    values = np.ma.masked_invalid(gaps.gaps)
    positive = values[values > 0]
    low, high = (float(positive.min()), float(positive.max())) if positive.count() else (1e-3, 1.0)
    norm = LogNorm(low, max(high, low * 1.01), clip=True)
    image = axes.imshow(values, norm=norm, cmap="cividis", aspect="auto", interpolation="nearest")
    axes.set_facecolor(GREY)
    figure.colorbar(image, ax=axes, label="gap (nat)")
    rows, columns = np.nonzero(gaps.ranks > 1)
    if rows.size:
        for color, width in (("white", 3.0), (VERMILION, 1.5)):
            axes.scatter(columns, rows, marker="x", color=color, s=20, linewidths=width)
    axes.set(xlabel="position (token)", ylabel="prompt")
    axes.set_title(f"x: the golden token is not the {gaps.judge}'s choice ({rows.size})", fontsize="small")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
