"""`neartie power --outside`: how often the verdict is wrong on engines that show their outputs alone.

Correct variants and planted defects, each taken for the plain variant of its dtype and judged by what a stranger shows
(`harness.outside_power`), on batteries of 8 prompts x 16 tokens. Defects take turns in severity, in how many layers
have them and in the carrier. What is finished stays in the folder's outside.csv.xz, battery by battery.
"""

import csv
import lzma
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.words import Flags
from harness import strict_json
from harness.config import DeviceChoice, ModelSource
from harness.engines.assets import checkpoint_folder
from harness.engines.loaded import shared_casts
from harness.numerics import policy
from harness.outside_power import SIGHTS, Answer, answers, declared_for
from harness.power_cells import CARRIER, FORMATS, Cell, Slice, benign_words, joined
from harness.power_report import Share
from harness.progress import progress
from harness.text_table import text_table
from variants.defects import DEFECTS, Spread
from variants.defects_kinds import Severity
from variants.errors import InputError

NAME = "outside.csv.xz"
CHUNK = 40  # defects that stand beside the same members: what an interrupted run loses at most
TOKENS = 16
GATE = Slice("gate", tuple(range(8)), TOKENS)
# Prompts of `wide` from the 24th on took no part in the calibration.
BATTERIES = (GATE, *(Slice("wide", tuple(range(n, n + 8)), TOKENS) for n in (24, 44)))
TOGETHER = "execution.batch=8"
CARRIERS = {"bf16": CARRIER, "f32": FORMATS["f32"] + CARRIER.removeprefix(FORMATS["bf16"])}
LABELS: tuple[str, ...] = (
    "key",
    "declared",
    "battery",
    "defect",
    "severity",
    "spread",
    "shows",
    "sight",
    "class",
    "flagged",
    "by",
)
FIGURES: tuple[str, ...] = (
    "expected_p",
    "logprob_excess",
    "logprob_p",
    "f32_logprob_excess",
    "f32_logprob_p",
    "nats",
    "sigma",
    "suspect",
    "p",
)
Row = dict[str, str]


def cells() -> list[Cell]:
    """Correct variants on each battery; each defect once, in a bf16 carrier or a float32 one, on gate."""
    # What rounds a parameter is not what it is taken for, and is named so: no correct run of that.
    sound = {name: words for name, words in benign_words().items() if "params." not in words}
    orders = {name: words for name, words in sound.items() if "mode=incremental" in words}
    found = [
        Cell(subject=name, words=joined(words, TOGETHER), battery=part, seed=0)
        for part in BATTERIES
        for name, words in orders.items()
    ]
    for first, (carrier, words) in enumerate(CARRIERS.items()):
        found.append(Cell(subject=f"{carrier}/carrier", words=joined(words, TOGETHER), battery=GATE, seed=0))
        found += [
            Cell(
                subject=f"{carrier}/{name}",
                words=joined(words, TOGETHER),
                battery=GATE,
                seed=0,
                defect=name,
                severity=[*Severity][i % 3].name,
                spread=[*Spread][i // 3 % 2].name,
            )
            for i, name in enumerate([*DEFECTS][first :: len(CARRIERS)])
        ]
    return found


def run(model: ModelSource, out: Path, flags: Flags) -> int:
    """Run what is missing, then print the rates."""
    casts = shared_casts(str(checkpoint_folder(model.path)), model.sha256, "cpu")
    groups: dict[tuple[str, str, int], list[Cell]] = {}
    for n, cell in enumerate(cells()):
        part = 0 if cell.benign else 1 + n // CHUNK
        groups.setdefault((declared_for(cell.words, casts), cell.battery.name, part), []).append(cell)
    rows = read(out / NAME)
    done = {row["key"] for row in rows}
    with progress("outside", sum(map(len, groups.values()))) as tick, policy(DeviceChoice(threads=1)):
        for group in groups.values():
            if left := [c for c in group if c.key not in done]:
                fresh = [row for a in answers(casts, left) for row in _rows(a)]
                append(out / NAME, fresh)
                rows += fresh
            for _ in group:
                tick()
    table = rates(rows)
    if flags.json:
        print(strict_json.dumps([{k: str(v) for k, v in line.items()} for line in table]).decode())
    else:
        print(text(rows, table))
    return 0


def _rows(a: Answer) -> list[Row]:
    c = a.cell
    about = {"key": c.key, "declared": a.declared, "battery": c.battery.name, "defect": c.defect}
    about |= {"severity": c.severity, "spread": c.spread, "shows": str(int(a.shows))}
    return [
        about
        | {"sight": sight, "class": t.run_class, "flagged": "" if t.flagged is None else str(int(t.flagged))}
        | {"by": t.by}
        | {name: f"{t.figures[name]:.4g}" if name in t.figures else "" for name in FIGURES}
        for sight, t in a.told.items()
    ]


def read(path: Path) -> list[Row]:
    """Verdicts on record, none where there is no file. Raises InputError for another file."""
    if not path.is_file():
        return []
    with lzma.open(path, "rt", newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != (*LABELS, *FIGURES):
            raise InputError(f"{path}: has other columns than this version writes; name another out=")
        return list(reader)


def append(path: Path, rows: Sequence[Row]) -> None:
    """Add the verdicts of a battery; a file that is new gets its header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.is_file()
    with lzma.open(path, "at", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, (*LABELS, *FIGURES), lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerows(rows)


def rates(rows: Sequence[Row]) -> list[dict[str, object]]:
    """A line a sight and declared variant: false alarms, defects caught, and these by severity."""
    lines: list[dict[str, object]] = []
    for declared in dict.fromkeys(row["declared"] for row in rows):
        for sight, s in SIGHTS.items():
            mine = [r for r in rows if r["declared"] == declared and r["sight"] == sight]
            if not mine:
                continue
            bad = [r for r in mine if r["defect"] and r["shows"] == "1"]
            good = [r for r in mine if not r["defect"]]
            line: dict[str, object] = {"taken for": declared, "seen": s.title, "false alarms": _share(good)}
            line["correct, not told"] = Share(hits=sum(not r["flagged"] for r in good), trials=len(good))
            line["caught"] = _share(bad)
            line |= {n: _share([r for r in bad if r["severity"] == n]) for n in ("light", "medium", "heavy")}
            lines.append(line)
    return lines


def _share(rows: Sequence[Mapping[str, str]]) -> Share:
    return Share(hits=sum(r["flagged"] == "1" for r in rows), trials=len(rows))


def text(rows: Sequence[Row], table: Sequence[Mapping[str, object]]) -> str:
    """The rates, then which correct runs were flagged beside the oracle and how many defects show nothing outside."""
    header = list(table[0])
    alarms = [r for r in rows if not r["defect"] and r["flagged"] == "1" and SIGHTS[r["sight"]].oracle]
    hidden = {r["key"] for r in rows if r["defect"] and r["shows"] == "0"}
    return "\n".join(
        [
            "hits/trials = share [95 % Wilson interval]; not told: SUSPECT or INVALID",
            text_table(header, [[str(x) for x in line.values()] for line in table]),
            "",
            f"false alarms beside the oracle: {len(alarms)}",
            *(f"  {r['key']}, {SIGHTS[r['sight']].title}: {r['class']} by {r['by']}" for r in alarms),
            f"defects that change no bit of what is seen, left out: {len(hidden)}",
        ]
    )
