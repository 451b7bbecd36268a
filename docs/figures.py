"""Make the pictures of this folder again: the report in a browser, and the key figures of two notebooks.

    make figures        needs chromium, and a minute or two

The report is of a verdict on two variants, made here and kept nowhere: make it on a quiet machine, it tells the speed.
"""

import base64
import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

HERE = Path(__file__).parent
ROOT = HERE.parent
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
JUDGED = ("bf16_stream", "incremental_chunk")
NOTEBOOKS = {"near_ties": 0, "power": 0}  # which of a notebook's figures is its key one
SCREEN = (1060, 1740)
WIDTH, TALL = 900, 1500


def main() -> int:
    if CHROMIUM is None:
        print("figures needs chromium (apt-get install chromium)", file=sys.stderr)
        return 4
    with tempfile.TemporaryDirectory() as folder:
        _keep(_report(Path(folder)), "report")
    for name, number in NOTEBOOKS.items():
        _keep(_figure(name, number), name)
    return 0


def _report(folder: Path) -> Image.Image:
    """The upper part of the page, as a browser shows it."""
    _neartie("verdict", "-m", f"variant={','.join(JUDGED)}", "device.threads=1", f"results={folder}")
    page, shot = folder / "page.html", folder / "page.png"
    _neartie("report", f"results={folder}", f"out={page}")
    argv = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    subprocess.run(
        [*argv, f"--window-size={SCREEN[0]},{SCREEN[1]}", f"--screenshot={shot}", page.as_uri()],
        check=True,
        stderr=subprocess.DEVNULL,  # tells of services that only a desktop has
    )
    return Image.open(io.BytesIO(shot.read_bytes()))


def _neartie(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "experiments.cli", *words], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def _figure(name: str, number: int) -> Image.Image:
    """A figure that the notebook draws when it is run."""
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(ROOT / "notebooks")}}).execute()
    drawn = [
        o.data["image/png"] for c in notebook.cells for o in c.get("outputs", ()) if "image/png" in o.get("data", {})
    ]
    return Image.open(io.BytesIO(base64.b64decode(drawn[number])))


def _keep(picture: Image.Image, name: str) -> None:
    """As a PNG with a palette, no wider than a page shows it."""
    small = picture.convert("RGB")
    small.thumbnail((WIDTH, TALL), Image.Resampling.LANCZOS)
    path = HERE / f"{name}.png"
    # By coverage: the median cut of a figure that is mostly one colour map loses its few marks of another colour.
    small.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    sys.exit(main())
