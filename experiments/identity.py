"""`neartie identity`: library, paged runner and server at one arithmetic: the same tokens, the same bits?"""

import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.gate import announced
from experiments.words import Flags
from harness import strict_json
from harness.agreement import Agreement
from harness.config import Config, EngineKind
from harness.engines.local import LocalEngine, casts_of
from harness.gate import part_of
from harness.golden import Golden, load_golden
from harness.ledger import Ledger
from harness.numerics import check_device, policy
from harness.provenance import environment
from harness.score import score
from harness.text_table import text_table
from variants.axes import Execution, Variant
from variants.errors import DeviceError, UsageError

if TYPE_CHECKING:
    from harness.serving.identity import Comparison

NOT_IDENTICAL = 1
COLUMNS = ("golden", "sums", "arm", "tokens", "bits", "furthest", "verdict", "s")


@dataclass(frozen=True, kw_only=True)
class Settings(Config):
    """goldens: names or paths. at_once: requests under load. others: clients beside them that come and go."""

    goldens: list[str] = field(default_factory=lambda: ["gate", "wide"])
    at_once: int = 64
    others: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine.kind is not EngineKind.local or self.require is not None:
            raise UsageError("identity: engine= and require= have no effect")
        if not self.goldens or self.at_once < 1 or self.others < 0:
            raise UsageError("identity: expected one golden or more, at_once of 1 or more, others of 0 or more")


def run(config: Settings, flags: Flags) -> int:
    """All arms on all goldens, batch-invariant and not; 1 where batch-invariant arms differ in a token or a bit."""
    if config.variant.execution.mode is not Execution.paged:
        raise UsageError("identity needs a paged variant, for the server runs no other; try variant=paged_batch")
    check_device(config.device)
    failed = False
    for name in config.goldens:
        golden = part_of(load_golden(name), prompts=config.limit, tokens=config.max_tokens)
        if golden.sampling.get("eos") == "stop":
            raise UsageError(f"identity: golden {name} stops at EOS; name one that goes on")
        for invariant in (True, False):
            rows = _arms(config, flags, golden, replace(config.variant, batch_invariant=invariant))
            flags.results.extend(rows)
            failed |= invariant and any(r["tokens"] != r["total"] or r["bits"] != r["total"] for r in rows)
    return NOT_IDENTICAL if failed else 0


def _arms(config: Settings, flags: Flags, golden: Golden, variant: Variant) -> list[dict[str, object]]:
    """Every arm of one arithmetic on one golden, a row of the ledger each."""
    try:
        from harness.serving import identity
    except ImportError as error:
        raise DeviceError(f"identity needs a package ({error}): pip install 'neartie[serve]'") from error
    casts = casts_of(config)
    paged, alone = (
        LocalEngine(casts, v, name=config.label, device=config.device) for v in (variant, identity.incremental(variant))
    )
    unfinished = Path(config.results) / "unfinished"
    many = min(config.at_once, len(golden.prompts))
    ways = (
        lambda: identity.library(alone, golden),
        lambda: identity.runner(paged, golden),
        lambda: identity.server(paged, golden, at_once=1, others=0, folder=unfinished),
        lambda: identity.server(paged, golden, at_once=many, others=config.others, folder=unfinished),
    )
    reference, rows = None, []
    for engine, way in zip((alone, paged, paged, paged), ways, strict=True):
        with Ledger(Path(config.results) / "ledger").begin(announced(config, flags, "identity")) as row:
            row.add({"golden": golden.name, "environment": environment(device=config.device.torch_name)})
            with policy(config.device, tf32=variant.tf32, reduced_sums=variant.reduced_sums):
                arm = way()
            reference = reference or arm
            found = identity.compare(reference, arm, golden)
            row.finish(_record(engine, golden, found, score(golden, arm.generation)))
        rows.append(_shown(paged, golden, found))
    return rows


def _record(engine: LocalEngine, golden: Golden, found: "Comparison", agreed: Agreement) -> dict[str, object]:
    """What a row keeps of an arm: its recipe, the golden, its agreement with both."""
    counts = agreed.record()
    return {
        "golden_hash": golden.hash,
        "battery_hash": golden.battery_hash,
        "bar": golden.bar.name,
        "model_hash": engine.info.model_sha256,
        "variant_hash": engine.recipe.hash,
        "recipe": {"declared": engine.recipe.as_dict()},
        "agreement": {k: counts[k] for k in ("matched", "total", "exact_prompts", "prompts")},
        "verdict": {"class": found.verdict, "reason": found.reason},
        "detail": {"identity": asdict(found) | {"batch_invariant": engine.variant.batch_invariant}},
    }


def _shown(paged: LocalEngine, golden: Golden, found: "Comparison") -> dict[str, object]:
    """A line of the table, with the algorithms whose bits may follow the batch."""
    follows = paged.recipe.as_dict()["batch_dependent"]
    assert isinstance(follows, dict)
    sums = "batch_invariant" if paged.variant.batch_invariant else "by batch"
    return {"golden": golden.name, "sums": sums, "tokens": found.equal, "follows": sorted(follows)} | asdict(found)


def report(flags: Flags) -> None:
    """One table; then what tells the arms apart where the batch may."""
    rows = flags.results
    if flags.json:
        print(strict_json.dumps(rows).decode())
        return
    print(text_table(COLUMNS, [_cells(r) for r in rows]))
    print("tokens and bits (all logprobs too) equal to the library's; furthest: of a logprob, nats, on one prefix")
    for row in rows:
        if row["bits"] != row["total"]:
            print(
                f"{row['golden']}, {row['arm']}: {row['reason']}; bits follow the rows at {', '.join(row['follows'])}"
            )


def _cells(row: dict) -> list[object]:
    counts = [f"{row[name]}/{row['total']}" for name in ("tokens", "bits")]
    verdict = "-" if row["arm"] == "library" else row["verdict"]
    return [row["golden"], row["sums"], row["arm"], *counts, f"{row['furthest_nats']:.2g}", verdict,
            f"{row['seconds']:.1f}"]  # fmt: skip


if __name__ == "__main__":
    from experiments.cli import main

    sys.exit(main(["identity", *sys.argv[1:]]))
