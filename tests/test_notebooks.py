"""Each notebook runs from top to bottom in a kernel of its own and is committed without outputs."""

import csv
import lzma
import re
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook

from harness.power_rows import COLUMNS
from harness.power_rules import RULES

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "notebooks"
POWER_ROWS = ROOT / "results" / "power" / "cells.csv.xz"
FIGURES = {"near_ties": 2, "campaign": 1, "your_engine": 2, "power": 2 if POWER_ROWS.is_file() else 0}
ABSOLUTE = re.compile(r"""["'`(\s](/(home|root|tmp|usr|opt|mnt|work|Users|content)\b|[A-Za-z]:\\)""")


def read(name: str) -> NotebookNode:
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel draws as it does for a reader, and leaves its files with the test."""
    monkeypatch.delenv("MPLBACKEND", raising=False)
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))


def outputs(notebook: NotebookNode, folder: Path) -> list[NotebookNode]:
    """Run a notebook in a folder and give what its cells put out, errors among it."""
    client: Any = NotebookClient(
        notebook, timeout=120, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def wrong(found: list[NotebookNode]) -> list[str]:
    """Errors, and warnings that a reader would see above a result."""
    errors = [f"{o.ename}: {o.evalue}" for o in found if o.output_type == "error"]
    return errors + [o.text for o in found if o.output_type == "stream" and o.name == "stderr"]


def images(found: list[NotebookNode]) -> int:
    return sum("image/png" in o.get("data", {}) for o in found)


def said(found: list[NotebookNode]) -> str:
    return "\n".join(o.get("text") or str(o.get("data", {}).get("text/plain", "")) for o in found)


def checkout(folder: Path) -> Path:
    """A folder that is a checkout as far as the notebooks look, its results empty but for the published rows."""
    (folder / "results" / "power").mkdir(parents=True)
    shutil.copy(ROOT / "results" / "published.csv", folder / "results")
    return folder


def test_the_notebooks_are_the_ones_tested() -> None:
    """No notebook is without a test."""
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(FIGURES)


@pytest.mark.parametrize("name", FIGURES)
def test_a_notebook_is_committed_without_outputs(name: str) -> None:
    """Valid, no outputs, no counts, the kernel python3, and no path of somebody's machine."""
    notebook = read(name)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert notebook.metadata.kernelspec.name == "python3"
    assert [cell.source for cell in notebook.cells if ABSOLUTE.search(cell.source)] == []


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("name", FIGURES)
def test_a_notebook_runs_from_top_to_bottom(name: str) -> None:
    """No cell raises or warns, and the figures are there."""
    found = outputs(read(name), NOTEBOOKS)
    assert wrong(found) == []
    assert images(found) >= FIGURES[name]


@pytest.mark.usefixtures("kernel")
def test_a_cell_that_raises_is_seen(tmp_path: Path) -> None:
    """What the test above asserts would be false of a broken notebook."""
    notebook = new_notebook(cells=[new_code_cell("import sys; print('hm', file=sys.stderr)"), new_code_cell("1 / 0")])
    assert wrong(outputs(notebook, tmp_path)) == ["ZeroDivisionError: division by zero", "hm\n"]


@pytest.mark.usefixtures("kernel")
def test_power_without_results_says_so(tmp_path: Path) -> None:
    """Before the experiment has run there is one line, no figure and no error."""
    found = outputs(read("power"), checkout(tmp_path))
    assert wrong(found) == []
    assert said(found).splitlines() == [
        "results/power/cells.csv.xz is not there yet: run `neartie power`; the cells below have nothing to show"
    ]


def cell(key: str, *, flagged: bool, **more: str) -> dict[str, str]:
    """A line of cells.csv.xz of which every rule says the same."""
    scores = {f"{rule}_score": str(0.5 + flagged) for rule in RULES} | {
        f"{rule}_flag": str(int(flagged)) for rule in RULES
    }
    return dict.fromkeys(COLUMNS, "") | {"key": key, "setting": "one"} | scores | more


PLANTED = {
    "defect": "mla_scaled",
    "family": "MLA scale",
    "severity": "light",
    "want_sites": "mla_scores",
    "want_layer": "3",
    "exercised": "1",
}


@pytest.mark.usefixtures("kernel")
def test_power_reads_the_columns_that_the_experiment_writes(tmp_path: Path) -> None:
    """A benign run passed, a defect caught in place and one missed: counts, both figures, and the miss by its name.

    That the lines are of another setting is said.
    """
    placed = {"ladder_replay_site": "mla_scores", "ladder_replay_layer": "3"}
    lines = [
        cell("benign", flagged=False),
        cell("caught", flagged=True, **PLANTED, **placed),
        cell("overlooked", flagged=False, **PLANTED),
    ]
    with lzma.open(
        checkout(tmp_path) / "results" / "power" / "cells.csv.xz", "wt", newline="", encoding="utf-8"
    ) as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(lines)
    found = outputs(read("power"), tmp_path)
    assert wrong(found) == []
    assert images(found) == 2
    assert "3 runs: 1 benign, 2 defects exercised, 0 defects not exercised" in said(found)
    assert "false alarm: 0; missed: 1; found elsewhere: 0; not exercised: 0" in said(found)
    assert "overlooked" in said(found)
    assert "made with other rules" in said(found)
