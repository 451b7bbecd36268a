"""The report: one file that needs nothing else, true to the rows, readable on a telephone and by keyboard."""

import copy
import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from experiments.cli import main
from harness.golden import load_golden
from harness.ledger import Ledger
from harness.page.differences import base_of, differences
from harness.page.entries import Selection, select
from harness.page.grid import KINDS, counts, grid
from harness.page.page import Page, page

ROOT = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
GOLDEN = load_golden("gate")
OWN = ("schema", "run_id", "time_utc", "nulls")
CAUSES = ("tie", "rounding", "rounding amplified by routing", "defect")
EXCESS = {f"mlp_residual@{layer}": -0.1 * layer for layer in range(8)}
EVIL = "</script><script>document.title = 'hit'</script>"


def _shipped(variant: str) -> dict[str, Any]:
    rows = Ledger(ROOT / "results" / "ledger").rows()
    row = next(r for r in rows if r["variant"] == variant and r["status"] == "ok" and r["golden_hash"] == GOLDEN.hash)
    return {name: value for name, value in copy.deepcopy(row).items() if name not in OWN}


def _judged(row: dict[str, Any], cause: str = "rounding") -> dict[str, Any]:
    """The row as a verdict would have left it: every first divergence of one cause."""
    places = [(d["prompt"], d["position"]) for d in row["agreement"]["first_divergence"]]
    told = [{"prompt": n, "position": t, "class": cause, "reason": f"p{n}[{t}]: {cause}"} for n, t in places]
    figures = {"excess_by_layer": EXCESS, "noise_nats": 0.25}
    verdict = {"class": "ROUNDING", "reason": f"all {cause}", "divergences": told, "figures": figures}
    return row | {"experiment": "verdict", "verdict": verdict, "expected": {"mean": 100.0, "low": 80.0, "high": 121.0}}


def _write(root: Path, row: dict[str, Any]) -> None:
    with Ledger(root).begin({"experiment": row["experiment"], "variant": row["variant"]}) as run:
        run.finish(row)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two gates, one of them judged too, and an arm whose name needs escaping."""
    root = tmp_path_factory.mktemp("results")
    for row in (_shipped("f32"), _judged(_shipped("f32")), _shipped("bf16_stream")):
        _write(root / "ledger", row)
    _write(root / "ledger", _shipped("oracle") | {"variant": "<b>$x_1$ & co</b>"})
    return root


@pytest.fixture(scope="module")
def selection(results: Path) -> Selection:
    return select(results / "ledger", GOLDEN)


@pytest.fixture(scope="module")
def made(selection: Selection) -> Page:
    return page(selection, GOLDEN, text=lambda token: EVIL if token % 2 else f"t{token}")


def test_an_arm_is_its_newest_run_beside_the_verdict_on_its_tokens(selection: Selection) -> None:
    """Two runs of f32 are one entry, with the excess and interval of its verdict."""
    (f32,) = (entry for entry in selection.entries if entry.label == "f32")
    assert len(selection.entries) == 3
    assert f32.judged is not None
    assert f32.excess == EXCESS
    assert f32.expected is not None
    assert f32.expected["low"] == 80.0


def test_a_verdict_on_other_tokens_is_not_shown(tmp_path: Path) -> None:
    """Where the newest run chose other tokens than the judged one, the entry says so and has no verdict."""
    changed = _shipped("f32")
    changed["detail"]["tokens"][0][0] += 1
    for row in (_judged(_shipped("f32")), changed):
        _write(tmp_path, row)
    (entry,) = select(tmp_path, GOLDEN).entries
    assert entry.judged is None
    assert entry.verdict["class"] is None
    assert "other tokens" in entry.note


def test_rows_that_do_not_compare_are_counted_and_left_out(tmp_path: Path) -> None:
    """Another golden and another model: neither is an entry, each is told."""
    _write(tmp_path, _shipped("f32") | {"golden_hash": "0" * 64})
    _write(tmp_path, _shipped("f32") | {"model_hash": "1" * 64})
    found = select(tmp_path, GOLDEN)
    assert found.entries == ()
    assert found.left_out == {"of another golden, or of a part of it": 1, "of another model": 1}


def test_a_run_that_failed_is_an_entry_only_where_there_is_no_result(tmp_path: Path) -> None:
    """The failure of an arm that never had a result is shown; a later failure does not hide a result."""
    failed = {"experiment": "gate", "engine": "local", "golden_hash": GOLDEN.hash, "status": "failed", "error": "no"}
    shipped = _shipped("f32")
    _write(tmp_path, shipped)
    _write(tmp_path, failed | {"variant": "f32", "environment": shipped["environment"]})
    _write(tmp_path, failed | {"variant": "oracle"})
    assert [(e.label, e.run["status"]) for e in select(tmp_path, GOLDEN).entries] == [
        ("f32", "ok"),
        ("oracle", "failed"),
    ]


@pytest.mark.parametrize("cause", CAUSES)
def test_the_grid_tells_agreement_margin_and_cause(tmp_path: Path, cause: str) -> None:
    """Places before the first divergence agree, that place has its cause's letter, and agreements sum to the score."""
    row = _judged(_shipped("f32"), cause)
    _write(tmp_path, row)
    (entry,) = select(tmp_path, GOLDEN).entries
    rows = grid(entry, GOLDEN)
    assert rows is not None
    seen = counts(rows)
    assert sum(seen.get(kind, 0) for kind in ("agree", "near", "after")) == row["agreement"]["matched"]
    first = row["agreement"]["first_divergence"][0]
    at = rows[first["prompt"]][first["position"]]
    assert KINDS[at.kind][0] == {"tie": "T", "rounding": "R", "defect": "D"}.get(cause, "A")
    assert f"golden {first['golden_id']}, here {first['candidate_id']}" in at.text
    assert cause in at.text
    assert {cell.kind for cell in rows[first["prompt"]][: first["position"]]} <= {"agree", "near"}


def test_every_kind_of_place_differs_by_letter_from_the_others() -> None:
    """Without colour: only plain agreement has no letter, and no letter is used twice."""
    letters = [letter for letter, _, _ in KINDS.values()]
    assert len(set(letters)) == len(letters)


def test_what_tokens_and_names_say_is_escaped(made: Page) -> None:
    """A token's text and a variant's name cannot close a tag or open one, in the page and in its figures."""
    assert made.html.count("<script>") == 1
    assert EVIL not in made.html
    assert html.escape(repr(EVIL)) in made.html or "&lt;script&gt;" in made.html
    assert "<b>$x" not in made.html
    assert "&lt;b&gt;$x_1$ &amp; co&lt;/b&gt;" in made.html


def test_the_page_asks_for_nothing_from_outside(made: Page) -> None:
    """No address but the names of SVG's own namespaces, and every id is there once."""
    addresses = set(re.findall(r"https?://[^\"'<> )]+", made.html))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert not re.search(r'(?:src|href)="(?!#|data:,)', made.html)
    ids = re.findall(r'\bid="([^"]+)"', made.html)
    assert len(ids) == len(set(ids))


def test_what_rows_lack_is_said(made: Page) -> None:
    """Arms without verdict, excess and interval are named."""
    lines = "\n".join(made.lacking)
    for what in ("no verdict on record", "no excess by layer", "no expected score"):
        assert what in lines
    assert set(made.plots) == {"excess", "expected", "speed"}


def test_recipe_differences_are_those_of_the_recipes(selection: Selection) -> None:
    """bf16_stream against f32: the residuals' formats differ, and a recipe differs in nothing from itself."""
    base = base_of(selection.entries, "f32")
    assert base is not None
    (other,) = (entry for entry in selection.entries if entry.label == "bf16_stream")
    assert any(was == "f32" and now == "bf16" and "attn_residual" in at for _, was, now, at in differences(other, base))
    assert differences(base, base) == []


def test_the_command_writes_page_and_figures(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The file named by out=, SVG and PNG of each figure and grid, and as JSON what was written."""
    out, drawn = tmp_path / "r.html", tmp_path / "figures"
    argv = ["report", f"results={results}", f"out={out}", f"figures={drawn}", "variants=[f32]", "--json"]
    assert main(argv) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["runs"] == 1
    assert said["path"] == str(out)
    names = {f"{name}.{suffix}" for name in ("excess", "expected", "speed", "grid-1") for suffix in ("svg", "png")}
    assert {path.name for path in drawn.iterdir()} == names
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize("word", ["variants=[f33]", "against=f33"])
def test_a_name_without_a_run_is_refused(results: Path, capsys: pytest.CaptureFixture, word: str) -> None:
    """One line that names what there is."""
    assert main(["report", f"results={results}", word]) == 2
    assert "there are" in capsys.readouterr().err


def test_an_empty_ledger_gives_a_page_that_says_so(tmp_path: Path) -> None:
    """No run, no figure, and the command that adds one."""
    found = page(select(tmp_path / "ledger", GOLDEN), GOLDEN)
    assert "No run of this golden is in the ledger yet" in found.html
    assert found.plots == {}


PROBE = """
<body style="margin:0"><iframe style="width:{width}px;height:800px;border:0" srcdoc="{page}"></iframe><script>
onload = () => {{
  const view = document.querySelector("iframe").contentWindow, page = view.document;
  const cell = page.querySelector("td.c"), said = page.querySelector("details.grid output");
  const press = (key) => page.activeElement.dispatchEvent(new view.KeyboardEvent("keydown", {{key, bubbles: true}}));
  cell.focus();
  const first = said.textContent;
  press("ArrowDown"); press("ArrowRight");
  const stops = [...page.querySelectorAll("details.grid")].map((g) => g.querySelectorAll("td[tabindex='0']").length);
  const found = {{wide: page.documentElement.scrollWidth, first, moved: said.textContent, title: page.title, stops,
    cell: cell.title, wanted: page.querySelectorAll("details.grid tr")[1].querySelectorAll("td")[1].title}};
  document.body.innerHTML = ""; document.body.append(JSON.stringify(found));
}};
</script></body>
"""


def _browse(folder: Path, content: str) -> tuple[str, list[str]]:
    """The document as a headless Chromium leaves it, and what it wrote to its console."""
    assert CHROMIUM is not None
    file = folder / "probe.html"
    file.write_text(content, encoding="utf-8")
    switches = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--user-data-dir={folder}/own",
    ]
    argv = [CHROMIUM, *switches, "--virtual-time-budget=5000", "--dump-dom", file.as_uri()]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [400, 900, 1030])
def test_a_telephone_and_a_keyboard_reach_all_of_it(made: Page, tmp_path: Path, width: int) -> None:
    """Nothing is wider than the screen, as cards or as a table; arrows move from place to place, each told in words.

    Nothing is written to the console, and the script in a token's text has not run.
    """
    dom, console = _browse(tmp_path, PROBE.format(page=html.escape(made.html), width=width))
    assert console == []
    found = json.loads(html.unescape(re.sub(r"<[^>]*>", "", dom.partition("<body")[2].partition(">")[2])))
    assert found["wide"] <= width
    assert found["first"] == found["cell"]
    assert found["moved"] == found["wanted"]
    assert set(found["stops"]) == {1}
    assert found["title"] == "Neartie: gate"


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_an_error_on_the_console_is_seen(tmp_path: Path) -> None:
    """What the test above asserts of the console would be false of a page with an error."""
    assert _browse(tmp_path, "<script>nothing()</script>")[1] != []
