"""`neartie power`: planted defects and benign variants under every rule side by side; the confusion matrix.

Cells that are finished stay in the folder's cells.csv, so a run that is stopped goes on where it was; one that is whole
packs them as cells.csv.xz.
"""

import csv
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from experiments import power_outside
from experiments.words import Flags
from harness import strict_json
from harness.config import Config, DeviceChoice, DeviceKind, EngineKind
from harness.engines.assets import checkpoint_folder
from harness.ledger import Ledger
from harness.power import Bench, Outcome
from harness.power_cells import Cell, benign_cells, defect_cells, quick_cells
from harness.power_plot import plot_power
from harness.power_record import older_run, write_record
from harness.power_report import (
    RuleRow,
    by_effect,
    by_family,
    confusion,
    false_alarms,
    misplaced,
    missed,
    unexercised,
)
from harness.power_rows import Row, append_rows, pack_rows, read_rows, row_of, setting
from harness.power_rules import RULES, judge_all
from harness.progress import progress
from harness.provenance import environment
from harness.text_table import text_table
from variants.defects import DEFECTS, Planted, Spread
from variants.defects_kinds import Severity
from variants.errors import UsageError

CHUNK = 6  # defect cells of one task: what an interrupted run loses at most, for each worker
QUICK = ("mla_scaled", "rounded_A_log", "state_reset")
OURS = "ladder_replay"
FILES = {"family": "families.csv", "effect": "effects.csv"}
FAMILY_RULES = (OURS, "envelope", "expected", "band", "top5", "kl", "cosine")


@dataclass(frozen=True, kw_only=True)
class Settings(Config):
    """seeds: batteries drawn from wide for each benign variant. workers: processes. out: the folder of results."""

    seeds: int = 7
    workers: int = 2
    out: str = "results/power"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine.kind is not EngineKind.local or self.device.kind is not DeviceKind.cpu:
            raise UsageError("power plants defects in engine=local on the cpu; leave engine= and device= out")
        if self.seeds < 0 or self.workers < 1:
            raise UsageError(f"got seeds={self.seeds} workers={self.workers}, expected 0 or more and 1 or more")


@dataclass(frozen=True)
class Task:
    """Cells that one process runs one after the other, and whether their scores on gate are looked at."""

    folder: str
    sha256: str | None
    cells: tuple[Cell, ...]
    scored: bool


def run(config: Settings, flags: Flags) -> int:
    """Run what is missing, then report on everything."""
    if "outside" in flags.values:
        return power_outside.run(config.model, Path(config.out), flags)
    quick = "quick" in flags.values
    out = Path(config.out) / "quick" if quick else Path(config.out)
    cells = quick_cells(QUICK) if quick else full_cells(config.seeds)
    if (old := older_run(out, {c.key for c in cells})) is not None:
        rows, note = old
        return _tell(flags, rows, confusion(rows), note)
    append_rows(out / "cells.csv", ())  # before an hour of work: can the folder be written at all
    folder = str(checkpoint_folder(config.model.path))
    with Ledger(Path(config.results) / "ledger").begin({"experiment": "power", "engine": "local"}) as row:
        model = _bench(folder, config.model.sha256).casts.checkpoint.sha256
        row.add({"environment": environment(device="cpu"), "model_hash": model, "seeds": config.seeds})
        wanted, shared = {c.key for c in cells}, setting(model)
        done = [r for r in read_rows(out / "cells.csv", shared) if r["key"] in wanted]
        left = [c for c in cells if c.key not in {r["key"] for r in done}]
        for rows in _finished(_tasks(left, folder, config, scored=not quick), config.workers, len(left)):
            append_rows(out / "cells.csv", rows)
            done += rows
        pack_rows(out / "cells.csv", read_rows(out / "cells.csv", shared))
        write_record(out, shared)
        matrix = confusion(done)
        _write_tables(out, done, matrix)
        figure = plot_power(matrix, out / "power.png")
        row.finish({"detail": {"setting": shared, "cells": len(done), "rules": _document(matrix)}})
    return _tell(flags, done, matrix, f"figure: {figure}")


def _tell(flags: Flags, rows: Sequence[Row], matrix: Sequence[RuleRow], last: str) -> int:
    if flags.json:
        print(strict_json.dumps({"cells": len(rows), "rules": _document(matrix), "note": last}).decode(), end="")
    else:
        print(text(rows, matrix, last))
    return 0


def full_cells(seeds: int) -> list[Cell]:
    """Every benign variant on every battery, every defect at every severity and spread."""
    names, spreads = [s.name for s in reversed(Severity)], [s.name for s in Spread]
    return [*benign_cells(range(1, seeds + 1)), *defect_cells(DEFECTS, names, spreads)]


def _tasks(cells: Sequence[Cell], folder: str, config: Settings, *, scored: bool) -> list[Task]:
    """Benign cells of one variant together, since they share what is expected of it; defects a few at a time."""
    groups: dict[object, list[Cell]] = {}
    for number, cell in enumerate(cells):
        groups.setdefault(cell.words if cell.benign else number // CHUNK, []).append(cell)
    return [Task(folder, config.model.sha256, tuple(group), scored) for group in groups.values()]


def _finished(tasks: Sequence[Task], workers: int, cells: int) -> Iterator[list[Row]]:
    """The rows of each task as it ends; one worker is this process."""
    with progress("power", cells) as tick:
        for rows in _one_by_one(tasks) if workers == 1 else _side_by_side(tasks, workers):
            yield rows
            for _ in rows:
                tick()


def _one_by_one(tasks: Sequence[Task]) -> Iterator[list[Row]]:
    for task in tasks:
        for cell in task.cells:
            yield [_row(_bench(task.folder, task.sha256), cell, task.scored)]


def _side_by_side(tasks: Sequence[Task], workers: int) -> Iterator[list[Row]]:
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    try:
        for future in as_completed([pool.submit(run_task, task) for task in tasks]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def run_task(task: Task) -> list[Row]:
    """Run the cells of a task in this process, on one thread."""
    bench = _bench(task.folder, task.sha256)
    return [_row(bench, cell, task.scored) for cell in task.cells]


_BENCHES: dict[tuple[str, str | None], Bench] = {}


def _bench(folder: str, sha256: str | None) -> Bench:
    """One bench a process: what cells share is made once."""
    from harness.engines.local import shared_casts

    key = (folder, sha256)
    if key not in _BENCHES:
        _BENCHES[key] = Bench(shared_casts(folder, sha256, "cpu"))
    return _BENCHES[key]


def _row(bench: Bench, cell: Cell, scored: bool) -> Row:
    from harness.numerics import policy

    with policy(DeviceChoice(threads=1)):
        found = bench.observe(cell, scored=scored)
    planted = bench.planted(cell)
    truth: dict[str, object] = {"setting": setting(bench.casts.checkpoint.sha256), "seconds": f"{found.seconds:.2f}"}
    if planted is not None:
        defect = planted.defect
        truth |= {
            "family": defect.family.value,
            "want_sites": "/".join(defect.sites),
            "want_layer": _layer(planted, found),
            "exercised": found.acts_at is not None,
            "effect": f"{found.effect:.4g}",
        }
    return row_of(cell, judge_all(found.observed), **truth)


def _layer(planted: Planted, found: Outcome) -> int:
    """Where a defect is to be found: its layer, or the first of its layers at which the battery makes it act."""
    acting = found.acts_at[1] if found.acts_at else planted.layers[0]
    return acting if acting in planted.layers else planted.layers[0]


def text(rows: Sequence[Row], matrix: Sequence[RuleRow], last: str) -> str:
    """The matrix, then what ours missed, misplaced or raised for nothing, and what was not exercised."""
    header = ("rule", "benign flagged", "caught", "caught, light", "AUC", "right site", "right layer", "runs")
    body = [
        [r.title, r.alarms, r.caught, r.by_severity["light"], _area(r.auc), r.site or "-", r.layer or "-",
         RULES[r.rule].runs]
        for r in matrix
    ]  # fmt: skip
    titles = [RULES[r].title for r in FAMILY_RULES]
    families = [[name, *shares] for name, shares in by_family(rows, FAMILY_RULES)]
    effects = [[name, *shares] for name, shares in by_effect(rows, FAMILY_RULES)]
    parts = [
        f"{len(rows)} runs: hits/trials = share [95 % Wilson interval]; ours are the first "
        f"{sum(r.ours for r in RULES.values())} rules",
        text_table(header, body),
        "",
        "caught at the lightest severity, by family",
        text_table(("family", *titles), families),
        "",
        "caught by effect size: rms change of the logits in float64 over rms of what rounding changes",
        text_table(("effect", *titles), effects),
        "",
        *_listed("false alarms", false_alarms(rows, OURS)),
        *_listed("missed", missed(rows, OURS)),
        *_listed("found elsewhere", misplaced(rows, OURS)),
        *_unexercised_lines(rows),
        last,
    ]
    return "\n".join(str(p) for p in parts)


def _area(auc: float | None) -> str:
    return "-" if auc is None else f"{auc:.3f}"


def _listed(title: str, rows: Sequence[Row]) -> list[str]:
    place = lambda r: f"{r[f'{OURS}_site'] or '-'}@{r[f'{OURS}_layer'] or '-'}"  # noqa: E731
    lines = [f"  {r['key']}: found {place(r)}, sits {r['want_sites'] or '-'}@{r['want_layer'] or '-'}" for r in rows]
    return [f"ladder + local replay, {title}: {len(rows)}", *lines]


def _unexercised_lines(rows: Sequence[Row]) -> list[str]:
    lines = [f"  {r['key']}: {DEFECTS[r['defect']].exercise or 'nothing known'}" for r in unexercised(rows)]
    return [f"not exercised, bit-identical to a correct run: {len(lines)}; what would exercise them:", *lines]


def _document(matrix: Sequence[RuleRow]) -> list[dict[str, object]]:
    return [_flat(r) for r in matrix]


def _flat(r: RuleRow) -> dict[str, object]:
    """A rule's row with numbers alone, for CSV and JSON."""
    shares = {"alarms": r.alarms, "caught": r.caught, "site": r.site, "layer": r.layer}
    shares |= {f"caught_{name}": value for name, value in r.by_severity.items()}
    flat: dict[str, object] = {"rule": r.rule, "title": r.title, "auc": r.auc, "runs": RULES[r.rule].runs}
    for name, value in shares.items():
        low, high = (None, None) if value is None or value.interval is None else value.interval
        flat |= {
            f"{name}_hits": None if value is None else value.hits,
            f"{name}_trials": None if value is None else value.trials,
            f"{name}_low": low,
            f"{name}_high": high,
        }
    return flat


def _write_tables(out: Path, rows: Sequence[Row], matrix: Sequence[RuleRow]) -> None:
    """summary.csv: a line a rule. families.csv, effects.csv: a line a rule and family (lightest severity) or effect."""
    _write_csv(out / "summary.csv", _document(matrix))
    for kind, groups in {"family": by_family, "effect": by_effect}.items():
        lines = [
            {kind: name, "rule": rule, "caught": share.hits, "of": share.trials}
            for name, shares in groups(rows, tuple(RULES))
            for rule, share in zip(RULES, shares, strict=True)
        ]
        if lines:
            _write_csv(out / FILES[kind], lines)
    bare = [{"key": r["key"], "exercise": DEFECTS[r["defect"]].exercise} for r in unexercised(rows)]
    _write_csv(out / "not_exercised.csv", bare or [{"key": "", "exercise": ""}])


def _write_csv(path: Path, rows: Sequence[dict]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    from experiments.cli import main

    sys.exit(main(["power", *sys.argv[1:]]))
