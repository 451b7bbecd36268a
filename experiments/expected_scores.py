"""What correct runs of the campaign's variants score on the shipped gate, beside one real run of each.

`python -m experiments.expected_scores [OUT.csv]` writes results/expected.csv, which notebooks/campaign.ipynb draws
beside the published scores of another model, and tests hold against its rows. A few minutes on one core.
"""

import csv
import sys
from pathlib import Path

from harness.compose import groups, named_variant
from harness.config import DeviceChoice
from harness.engines.assets import checkpoint_folder
from harness.engines.local import LocalEngine, shared_casts
from harness.expected import expected_score
from harness.golden import load_golden
from harness.ledger_view import published
from harness.numerics import policy
from harness.score import score
from variants.weights import Casts

OUT = "results/expected.csv"
GOLDEN = "gate"
MEMBERS = 8
COLUMNS = [
    *("variant", "matched", "mean", "low", "high", "total", "members"),
    *("golden_hash", "model_sha256"),
]


def names() -> list[str]:
    """The published campaign's variants that are named here too."""
    known = groups()["variant"]
    return [name for name in published()["variant"] if name in known]


def row(name: str, casts: Casts) -> dict[str, object]:
    """One variant: the interval for a correct run of its recipe, and what its own run on this CPU matched."""
    golden = load_golden(GOLDEN)
    engine = LocalEngine(casts, named_variant(name), name=name)
    found = expected_score(engine.recipe, casts, golden, members=MEMBERS).interval
    made = engine.generate(golden.prompts, golden.tokens.shape[2])
    return {
        "variant": name,
        "matched": score(golden, made).matched,
        "mean": f"{found.mean:.1f}",
        "low": int(found.low),
        "high": int(found.high),
        "total": golden.tokens[0].size,
        "members": MEMBERS,
        "golden_hash": golden.hash,
        "model_sha256": casts.checkpoint.sha256,
    }


def main(out: str = OUT) -> None:
    casts = shared_casts(str(checkpoint_folder("kimi-linear-12m")), None, "cpu")
    with policy(DeviceChoice(threads=1)), Path(out).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for name in names():
            found = row(name, casts)
            writer.writerow(found)
            print(" ".join(f"{k}={found[k]}" for k in COLUMNS[:6]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
