"""`neartie near-ties`: the places of a golden where the next token hangs on little, as a list, a table and a figure."""

import csv
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from experiments.words import Flags
from harness import strict_json
from harness.config import Config, EngineKind
from harness.engines.assets import checkpoint_folder
from harness.engines.local import LocalEngine
from harness.gate import part_of
from harness.golden import Golden, load_golden
from harness.near_ties import Gaps, NearTie, TokenText, oracle_gaps, recorded_gaps
from harness.noise_scale import Gaussian, Noise, measure
from harness.numerics import policy
from harness.oracle import Forced, consult
from harness.plots import plot_near_ties
from harness.pregate import check_vocabulary
from harness.text_table import text_table
from harness.token_text import token_text
from variants.axes import Variant
from variants.errors import DeviceError, UsageError

MEASURED: Literal["measured"] = "measured"
Given = Gaussian | Literal["measured"] | None
LISTED = 20


@dataclass(frozen=True, kw_only=True)
class Settings(Config):
    """top: how many places are listed."""

    top: int = LISTED

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top < 1:
            raise UsageError(f"top={self.top}: expected 1 or more places to list")
        if self.engine.kind is not EngineKind.local:
            raise UsageError(f"near-ties asks the float64 oracle, engine={self.engine.kind.name} is not read; leave it")


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a job found: gaps, the noise they are held against, and remarks on either."""

    gaps: Gaps
    noise: Noise | None
    remarks: tuple[str, ...]


def run(config: Settings, flags: Flags) -> int:
    """List, tabulate and plot the near-ties of one golden."""
    golden = part_of(load_golden(config.golden), prompts=config.limit, tokens=config.max_tokens)
    recorded, noise = "recorded" in flags.values, _given(flags.values.get("noise"))
    _refuse_unread(config, recorded=recorded, noise=noise)
    found = _recorded(golden, noise) if recorded else _judged(config, golden, noise)
    places = found.gaps.nearest(text=None if recorded else _texts(config))
    if file := flags.values.get("csv"):
        _write_csv(Path(file), places)
    scale = found.noise.scale_nats if found.noise else None
    figure = plot_near_ties(found.gaps, _figure_path(config, found.gaps), noise_nats=scale)
    if flags.json:
        print(strict_json.dumps(_document(found, places[: config.top], figure)).decode(), end="")
    else:
        print(_text(found, places[: config.top], figure))
    return 0


def _refuse_unread(config: Settings, *, recorded: bool, noise: Given) -> None:
    if recorded and noise == MEASURED:
        raise UsageError("--recorded reads no model, so --noise=measured cannot run one; give --noise in nats")
    if noise != MEASURED and config.variant != Variant():
        raise UsageError(f"variant {config.label} is read by --noise=measured alone; add that or leave variant= out")


def _recorded(golden: Golden, noise: Given) -> Found:
    assert noise != MEASURED
    remark = "no oracle: gaps are the reference engine's own, rounded as it rounds and cut where its list ends"
    return Found(gaps=recorded_gaps(golden), noise=noise, remarks=(remark,))


def _judged(config: Settings, golden: Golden, noise: Given) -> Found:
    engine = LocalEngine.from_config(config)
    checkpoint, cache = engine.casts.checkpoint, Path(config.results) / "cache"
    check_vocabulary(golden, checkpoint.config.vocab_size)
    with policy(config.device):
        device = config.device.torch_name
        oracle = consult(checkpoint, Forced.of(golden), device=device, cache=cache)
        gaps, remarks = oracle_gaps(golden, oracle), _other_model(golden, checkpoint.sha256)
        if noise != MEASURED:
            return Found(gaps=gaps, noise=noise, remarks=remarks)
        own = consult(checkpoint, Forced.of(golden), semantics=engine.recipe.semantics, device=device, cache=cache)
        measured = measure(engine, own)
    said = f"noise of {config.label}, one run: rms {measured.rms_nats:.3g} nat, largest {measured.magnitudes[-1]:.3g}"
    return Found(gaps=gaps, noise=measured, remarks=(*remarks, said))


def _other_model(golden: Golden, sha256: str) -> tuple[str, ...]:
    made_by = golden.provenance.get("model_sha256")
    if made_by in (None, sha256):
        return ()
    names = f"golden {str(made_by)[:12]}, oracle {sha256[:12]}"
    return (f"model differs ({names}): the oracle judges another model's tokens",)


def _given(word: str | None) -> Given:
    if word is None or word == MEASURED:
        return MEASURED if word else None
    try:
        nats = float(word)
    except ValueError as error:
        raise UsageError(f"--noise={word}: expected a number of nats, or {MEASURED}") from error
    return Gaussian(nats)


def _texts(config: Settings) -> TokenText | None:
    file = checkpoint_folder(config.model.path) / "tokenizer.json"
    return token_text(file) if file.is_file() else None


def _figure_path(config: Settings, gaps: Gaps) -> Path:
    return Path(config.results) / "reports" / f"near-ties-{gaps.golden.name}-{gaps.source}-{gaps.golden.hash[:8]}.png"


def _write_csv(path: Path, places: list[NearTie]) -> None:
    """Every place, the smallest gap first; an unknown value is an empty cell."""
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [f.name for f in fields(NearTie)])
            writer.writeheader()
            writer.writerows(asdict(place) for place in places)
    except OSError as error:
        raise DeviceError(f"cannot write {path}: {error.strerror}") from error


def _document(found: Found, places: list[NearTie], figure: Path) -> dict[str, object]:
    gaps, noise = found.gaps, found.noise
    return {
        "golden": gaps.golden.name,
        "golden_hash": gaps.golden.hash,
        "source": gaps.source,
        "places": gaps.places,
        "golden_not_first": gaps.not_first,
        "noise_nats": noise.scale_nats if noise else None,
        "under_noise": gaps.under(noise.scale_nats) if noise else None,
        "turned_by_noise": gaps.turned(noise) if noise else None,
        "remarks": list(found.remarks),
        "figure": str(figure),
        "near_ties": [asdict(place) for place in places],
    }


COLUMNS = ("prompt", "at", "golden", "first", "second", "gap", "lead", "rank", "golden's gap")


def _text(found: Found, places: list[NearTie], figure: Path) -> str:
    rows = [
        [p.prompt, p.position, _token(p.golden_id, p.golden_text), _token(p.first_id, p.first_text),
         _token(p.second_id, p.second_text), *(_nats(x) for x in (p.gap_nats, p.lead_nats)), p.rank,
         _nats(p.golden_gap_nats)]
        for p in places
    ]  # fmt: skip
    columns = COLUMNS if found.gaps.source == "oracle" else COLUMNS[:-1]
    table = text_table(columns, [row[: len(columns)] for row in rows])
    return "\n".join([table, "gaps and leads in nats; lead: golden token over its best rival", "", *_summary(found),
                      f"figure: {figure}"])  # fmt: skip


def _summary(found: Found) -> list[str]:
    gaps, noise = found.gaps, found.noise
    lines = [f"{gaps.golden.name}: {gaps.places} places, {gaps.not_first} golden tokens not the {gaps.judge}'s choice"]
    if noise is not None:
        lines.append(
            f"noise {noise.scale_nats:.3g} nat: {gaps.under(noise.scale_nats)} gaps under it, "
            f"{gaps.turned(noise):.1f} tokens expected to turn, teacher-forced"
        )
    return [*lines, *found.remarks]


def _token(token: int, said: str | None) -> str:
    return str(token) if said is None else f"{token} {said!r}"


def _nats(value: float | None) -> str | None:
    return None if value is None else f"{value:.4g}"


if __name__ == "__main__":
    from experiments.cli import main

    sys.exit(main(["near-ties", *sys.argv[1:]]))
