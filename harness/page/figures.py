"""The report's figures: excess by layer, expected scores, agreement against speed, a token grid; matplotlib alone.

Each tells its series apart by marker as well as by colour, and is narrow enough to be read on a telephone.
"""

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from harness.page.entries import Entry
from harness.page.grid import KINDS, Cell
from harness.plots import BLUE, VERMILION
from variants.errors import DeviceError

# Okabe and Ito's palette; its black and the axes take the page's own text colour, so that a dark page is readable.
COLOURS = (BLUE, VERMILION, "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vPX*"
INK = "#010203"  # stands for the text colour until the figure is on the page
SHOWN = 8  # curves in one figure
WIDTH = 4.6  # inches; 331 units of an SVG, about the width of a small screen
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "neartie",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}
Figures = dict[str, Figure]


def figures(entries: Sequence[Entry]) -> Figures:
    """The figures for which the entries have what is needed, by name."""
    with mpl.rc_context(STYLE):
        excess = [entry for entry in entries if entry.excess]
        expected = [entry for entry in entries if entry.expected]
        timed = {i: e for i, e in enumerate(entries, 1) if _speed(e) and e.run["agreement"]["matched"] is not None}
        made = {
            "excess": _excess(excess[:SHOWN]) if excess else None,
            "expected": _expected(expected) if expected else None,
            "speed": _speeds(timed) if timed else None,
        }
        return {name: figure for name, figure in made.items() if figure is not None}


def grid_figure(label: str, rows: Sequence[Sequence[Cell]]) -> Figure:
    """One variant's token grid, in the page's colours and letters."""
    kinds = list(KINDS)
    with mpl.rc_context(STYLE):
        tall, wide = len(rows), len(rows[0])
        figure = Figure(figsize=(max(WIDTH, 0.22 * wide), max(1.2, 0.22 * tall + 0.7)), layout="constrained")
        axes = figure.subplots()
        colours = ListedColormap([KINDS[kind][2] for kind in kinds])
        shown = [[kinds.index(cell.kind) for cell in row] for row in rows]
        axes.imshow(shown, cmap=colours, vmin=-0.5, vmax=len(kinds) - 0.5, aspect="auto", interpolation="nearest")
        for y, row in enumerate(rows):
            for x, cell in enumerate(row):
                if cell.letter:
                    axes.text(x, y, cell.letter, ha="center", va="center", fontsize=8, color="black")
        axes.set(xlabel="token", ylabel="prompt")
        _plain(axes.set_title(label, fontsize=9))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        return figure


def svg(figure: Figure, name: str, said: str) -> str:
    """A figure as one `<svg>` element of a page: ids of its own, the page's text colour; `said` is what it shows."""
    with mpl.rc_context(STYLE):
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    drawn = file.getvalue()
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn[drawn.index("<svg") :], flags=re.DOTALL)
    drawn = re.sub(r'\bid="', f'id="{name}-', drawn)
    drawn = re.sub(r'(xlink:href="|url\()#', rf"\1#{name}-", drawn).replace(INK, "currentColor")
    drawn = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", drawn, count=1)
    drawn = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", drawn, count=1)
    return drawn.replace("<svg ", f'<svg role="img" aria-label="{escape(said)}" ', 1)


def save(made: Mapping[str, Figure], folder: Path) -> list[Path]:
    """Each figure as NAME.svg and NAME.png (200 dots an inch), in black on white.

    Raises DeviceError where the folder cannot be written.
    """
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in made.items():
            for suffix in ("svg", "png"):
                paths.append(folder / f"{name}.{suffix}")
                with mpl.rc_context(STYLE):
                    figure.savefig(paths[-1], dpi=200)
    except OSError as error:
        raise DeviceError(f"cannot write {folder} ({error.strerror}); name another folder by figures=") from error
    return paths


def _excess(entries: Sequence[Entry]) -> Figure:
    figure, axes = _new(3.2)
    for i, entry in enumerate(entries):
        values = list(entry.excess.values())
        axes.plot(range(len(values)), values, label=entry.label, linewidth=1.2, markersize=4, **_mark(i))
    axes.axhline(0.0, color=INK, linewidth=0.8, linestyle="--")
    axes.set(xlabel="layer (the last one: logits)", ylabel="ln(error / what rounding explains)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(figure, axes, len(entries))
    return figure


def _expected(entries: Sequence[Entry]) -> Figure:
    figure, axes = _new(0.26 * len(entries) + 1.1)
    for y, entry in enumerate(entries):
        e = entry.expected
        assert e is not None
        axes.plot([e["low"], e["high"]], [y, y], color=BLUE, linewidth=4, alpha=0.5, solid_capstyle="butt")
        axes.plot(e["mean"], y, "|", color=BLUE, markersize=11, markeredgewidth=2)
        axes.plot(entry.run["agreement"]["matched"], y, "D", color=VERMILION, markersize=6)
    axes.plot([], [], color=BLUE, linewidth=4, alpha=0.5, label="95 % of correct runs (bar: mean)")
    axes.plot([], [], "D", color=VERMILION, label="this run")
    for label in axes.set_yticks(range(len(entries)), [entry.label for entry in entries]):
        _plain(label.label1)
    axes.set(ylim=(len(entries) - 0.5, -0.5), xlabel=f"tokens in agreement, of {entries[0].run['agreement']['total']}")
    _legend(figure, axes, 2)
    return figure


def _speeds(entries: Mapping[int, Entry]) -> Figure:
    """Each device a marker; numbers name the arms, as in the table of the page; a dotted line joins the best."""
    figure, axes = _new(3.2)
    devices = sorted({_device(entry) for entry in entries.values()})
    for i, device in enumerate(devices):
        at = [(_speed(e) or 0.0, e.run["agreement"]["matched"]) for e in entries.values() if _device(e) == device]
        axes.plot(*zip(*at, strict=True), label=device, linestyle="none", **_mark(i))
        best = [at[k] for k in range(len(at)) if not any(s > at[k][0] and m >= at[k][1] for s, m in at)]
        axes.plot(*zip(*sorted(best), strict=True), color=COLOURS[i % len(COLOURS)], linewidth=0.8, linestyle=":")
    for number, entry in entries.items():
        at = (_speed(entry) or 0.0, entry.run["agreement"]["matched"])
        axes.annotate(str(number), at, xytext=(4, 3), textcoords="offset points", fontsize=7, color=INK)
    axes.set(xscale="log", xlabel="decode tok/s (log)", ylabel="tokens in agreement")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())  # of a decade or less it would write over its own labels
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(figure, axes, len(devices))
    return figure


def _new(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _mark(i: int) -> dict[str, Any]:
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}


def _legend(figure: Figure, axes: Axes, entries: int) -> None:
    legend = figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower left", ncols=min(entries, 2), fontsize=8, frameon=False
    )
    for text in legend.get_texts():
        _plain(text)


def _plain(text: Text) -> None:
    """A name is shown as it is, whatever dollar signs it holds."""
    text.set_parse_math(False)


def _device(entry: Entry) -> str:
    return entry.run["environment"]["device"] or "unknown"


def _speed(entry: Entry) -> float | None:
    return entry.run["decode_tok_s"]["median"]
