"""Where a checkpoint lies: a folder, or a bare name under assets/."""

from pathlib import Path

from harness.nearest import did_you_mean
from variants.errors import InputError

ASSETS = Path(__file__).resolve().parents[2] / "assets"


GEOMETRY = Path(__file__).resolve().parents[2] / "conf" / "geometry"


def geometry(path: str) -> Path:
    """Where a geometry is described: a name under conf/geometry/, or as for `checkpoint_folder`, or a config.json."""
    named = GEOMETRY / f"{path}.json"
    if named.is_file():
        return named
    return Path(path) if Path(path).is_file() else checkpoint_folder(path)


def shipped_checkpoints() -> dict[str, Path]:
    """The checkpoints that come with this project, by name."""
    return {p.parent.name: p.parent for p in sorted(ASSETS.glob("*/config.json"))}


def checkpoint_folder(path: str) -> Path:
    """The folder that `path` names; raises InputError where there is none."""
    folder, shipped = Path(path), shipped_checkpoints()
    if folder.is_dir():
        return folder
    if path in shipped:
        return shipped[path]
    near = did_you_mean(path, shipped) if len(folder.parts) == 1 else ""
    raise InputError(f"no checkpoint {path!r}; expected a folder or one of {', '.join(shipped)}{near}")
