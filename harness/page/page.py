"""The report as one HTML file that needs nothing else: no network, no fonts, no scripts of others."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from harness.golden_data import Golden
from harness.ledger_schema import Status
from harness.near_ties import TokenText
from harness.page import figures
from harness.page.differences import base_of, differences
from harness.page.entries import Entry, Row, Selection
from harness.page.grid import KINDS, Cell, counts, grid

CELLS = 20_000  # places drawn in one page, about 5 MB of it
CAPTIONS = {
    "excess": "Error at each layer over what rounding explains there; 0: just that much, below: less",
    "expected": "What a correct run of the recipe scores, and what this run scored",
    "speed": "Agreement against speed; numbers are those of the table, the dotted line joins the best",
}
PROVENANCE = ("git", "device", "driver", "torch", "triton", "cuda", "cpu", "cpu_capability", "threads", "tf32")


@dataclass(frozen=True, kw_only=True)
class Page:
    """The HTML, the figures in it and the grids as cells, by name, and a line for each thing that runs lack."""

    html: str
    plots: dict[str, Figure]
    grids: dict[str, tuple[str, list[list[Cell]]]]
    lacking: tuple[str, ...]

    def figures(self) -> dict[str, Figure]:
        """All of them as figures, the grids too."""
        return self.plots | {name: figures.grid_figure(label, rows) for name, (label, rows) in self.grids.items()}


def page(
    selection: Selection,
    golden: Golden,
    *,
    text: TokenText | None = None,
    against: str | None = None,
    cells: int = CELLS,
    made: str = "",
) -> Page:
    """Render the selection. text: of a token id. against: whose recipe others are held against. made: when, by what.

    cells: how many places are drawn at most; the grids of further runs are left out and named.
    """
    entries = selection.entries
    drawn = _grids(entries, golden, text, cells)
    lacking = _lacking(entries, drawn)
    plots = figures.figures(entries)
    base = base_of(entries, against)
    html = _template().render(
        golden=golden,
        entries=list(enumerate(entries, 1)),
        grids=[(n, entries[n - 1], rows, counts(rows)) for n, rows in drawn.items()],
        kinds=KINDS,
        plots=[(name, CAPTIONS[name], Markup(figures.svg(f, name, CAPTIONS[name]))) for name, f in plots.items()],
        base=base,
        changes=_changes(entries, base),
        lacking=lacking,
        selection=selection,
        provenance=PROVENANCE,
        made=made,
    )
    cells_of = {f"grid-{n}": (entries[n - 1].label, rows) for n, rows in drawn.items()}
    return Page(html=html, plots=plots, grids=cells_of, lacking=tuple(lacking))


def _grids(entries: Sequence[Entry], golden: Golden, text: TokenText | None, cells: int) -> dict[int, list[list[Cell]]]:
    """The grids that fit, by number of entry."""
    places, room = golden.tokens[0].size, cells
    drawn: dict[int, list[list[Cell]]] = {}
    for number, entry in enumerate(entries, 1):
        if entry.tokens is not None and room >= places:
            rows = grid(entry, golden, text)
            assert rows is not None
            drawn[number], room = rows, room - places
    return drawn


def _lacking(entries: Sequence[Entry], drawn: dict[int, Any]) -> list[str]:
    """What cannot be shown, a line a reason, with the runs it holds for."""
    reasons = {
        "no verdict on record, so divergences are not explained (neartie verdict gives one)": lambda n, e: (
            not e.verdict["class"]
        ),
        "no excess by layer on record (a verdict from inside writes it)": lambda n, e: not e.excess,
        "no expected score on record (a verdict beside the oracle writes it)": lambda n, e: e.expected is None,
        "no tokens on record, so no grid": lambda n, e: e.tokens is None,
        "no room for the grid (cells=N, or name fewer variants)": lambda n, e: e.tokens is not None and n not in drawn,
        "no recipe on record": lambda n, e: not e.sites,
    }
    lines = []
    for reason, holds in reasons.items():
        told = {f"{n} {entry.label}": holds(n, entry) for n, entry in enumerate(entries, 1)}
        if any(told.values()):
            lines.append(f"{reason}: {_named(told)}")
    return [*lines, *(f"{entry.label}: {entry.note}" for entry in entries if entry.note)]


def _named(told: dict[str, bool]) -> str:
    """The names for which it holds, or, where these are most, the others."""
    holds, others = ([name for name, it in told.items() if it is which] for which in (True, False))
    if len(holds) <= len(others) or len(told) <= 2:
        return ", ".join(holds)
    return f"all but {', '.join(others)}" if others else "all"


def _changes(entries: Sequence[Entry], base: Entry | None) -> list[tuple[int, Entry, list[tuple[str, str, str, str]]]]:
    others = [(n, e) for n, e in enumerate(entries, 1) if base is not None and e.sites and e is not base]
    return [(n, entry, differences(entry, base)) for n, entry in others if base is not None]


def _template() -> Any:
    here = files("harness.page")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.globals |= {
        "style": Markup((here / "page.css").read_text(encoding="utf-8")),
        "script": Markup((here / "page.js").read_text(encoding="utf-8")),
        "ok": Status.ok.name,
    }
    environment.filters |= {"first": _first, "rate": _rate, "shade": _shade}
    return environment.from_string((here / "page.html").read_text(encoding="utf-8"))


def _first(row: Row) -> str:
    """The earliest divergence of a run, and how many more prompts diverge."""
    found = row["agreement"]["first_divergence"]
    if found is None:
        return "-"
    if not found:
        return "nowhere"
    place = min(found, key=lambda d: (d["position"], d["prompt"]))
    return f"p{place['prompt']}[{place['position']}]" + (f" +{len(found) - 1}" if len(found) > 1 else "")


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def _shade(verdict: str | None) -> str:
    """The mark of a verdict, beside its word."""
    return {"PASS": "✓", "ROUNDING": "≈", "SUSPECT": "?", "DEFECT": "✗", "INVALID": "!"}.get(verdict or "", "")
