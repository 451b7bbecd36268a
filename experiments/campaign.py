"""`neartie campaign`: every variant of the campaign in one process and one load, and the campaign's table beside ours.

Each variant runs the gate several times, whose repeats must be bit-identical, and the wide battery once, freely and
teacher-forced; a variant that recomputes every prefix runs the gate alone. Each run is a row of the ledger. A variant
that this machine cannot run is told in one line, and the others run.
"""

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from experiments.gate import announced, observe_engine, texts
from experiments.words import Flags
from harness import strict_json
from harness.campaign import HEADER, ILLUSTRATION, entries
from harness.compose import groups, named_variant
from harness.config import Config, EngineKind
from harness.engines.assets import checkpoint_folder
from harness.engines.local import LocalEngine
from harness.gate import GateResult, part_of, run_gate
from harness.golden import Golden, load_golden
from harness.ledger import Ledger, Run
from harness.ledger_view import PUBLISHED, published_rows
from harness.numerics import check_device, policy
from harness.progress import tracked
from harness.provenance import environment
from harness.text_table import text_table
from variants.axes import Execution
from variants.checkpoint import load_config
from variants.errors import EngineError, NeartieError, UsageError
from variants.kernels import check_environment
from variants.recipe import resolve

SHIPPED = PUBLISHED.parent / "ledger"
DEFAULT = "f64_islands"  # what a Config holds where no variant was named
BESIDE = ("transformers_mirror", "f32", "oracle", "bf16_engine", "bf16_engine_triton", "fla_kda", "vllm_mirror")


@dataclass(frozen=True, kw_only=True)
class Settings(Config):
    """variants: names or labels (NAME+impl.norms=torch) to run; empty for all that the campaign has, and what stands
    beside them, on this machine.

    repeats: of the gate. gate_batch: its prompts that run together. wide: the second golden, "" for none. wide_batch:
    prompts that run together there. limit and max_tokens hold for both goldens; of the two, one with fewer runs whole.
    """

    variants: list[str] = field(default_factory=list)
    repeats: int = 3
    gate_batch: int = 1
    wide: str = "wide"
    wide_batch: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine.kind is not EngineKind.local:
            raise UsageError(f"campaign runs variants, and engine={self.engine.kind.name} has none; leave engine= out")
        for name in ("repeats", "gate_batch", "wide_batch"):
            if getattr(self, name) < 1:
                raise UsageError(f"campaign: {name}={getattr(self, name)}, expected 1 or more")
        unknown = [name for name in self.variants if name.split("+")[0] not in groups()["variant"]]
        if unknown:
            raise UsageError(f"campaign: no variant {', '.join(unknown)}; `neartie variants` lists them")


def run(config: Settings, flags: Flags) -> int:
    """Run every variant and print the table; the exit code is the worst of the runs."""
    check_device(config.device)
    if config.label != DEFAULT:
        raise UsageError(f"campaign: variant={config.label} has no effect; name what is to run in variants=[...]")
    names = config.variants or campaign_variants()
    worst = 0
    for number, name in enumerate(tracked("variants", names, len(names))):
        if not config.variants and (why := _cannot_run(config, name)):
            print(f"neartie: [{name}] not run here: {why}", file=sys.stderr)
            continue
        print(f"neartie: {name} ({number + 1} of {len(names)})", file=sys.stderr)
        worst = max(worst, _contained(replace(config, variant=named_variant(name), label=name), flags))
    _print_table(config, names, as_json=flags.json)
    return worst


def campaign_variants() -> list[str]:
    """Every row of the published campaign that has a variant, each followed by its form in kernels, then the rest."""
    there, names = groups()["variant"], [str(row["variant"]) for row in published_rows()]
    campaign = [form for name in names for form in (name, f"{name}_triton") if form in there]
    return [*campaign, *(name for name in BESIDE if name in there and name not in campaign)]


def _cannot_run(config: Settings, name: str) -> str | None:
    """Why a variant cannot run on this machine, None where it can."""
    recipe = resolve(named_variant(name), load_config(checkpoint_folder(config.model.path)))
    try:
        check_environment(recipe.implementations, config.device.torch_name)
    except NeartieError as error:
        return str(error)
    return None


def _contained(config: Settings, flags: Flags) -> int:
    """Both batteries of one variant; a failure is one line, in its row and on stderr."""
    try:
        code = _on_record(_batched(config, config.gate_batch), flags, config.golden, repeats=config.repeats)
        carried = config.variant.execution.mode is not Execution.recompute
        if not carried or not config.wide:
            return code
        return max(code, _on_record(_batched(config, config.wide_batch), flags, config.wide))
    except NeartieError as error:
        print(f"neartie: error: [{config.label}] {error}", file=sys.stderr)
        return error.exit_code


def _batched(config: Settings, rows: int) -> Settings:
    """The same run with at least so many prompts together; its label says so."""
    run = config.variant.execution
    if rows <= run.batch:
        return config
    variant = replace(config.variant, execution=replace(run, batch=rows))
    return replace(config, variant=variant, label=f"{config.label}+execution.batch={rows}")


def _on_record(config: Settings, flags: Flags, name: str, *, repeats: int = 1) -> int:
    about = announced(config, flags, "campaign") | {"golden": name}
    with Ledger(Path(config.results) / "ledger").begin(about) as row:
        with (
            policy(config.device, tf32=config.variant.tf32, reduced_sums=config.variant.reduced_sums),
            ExitStack() as stack,
        ):
            results, seconds, forced = _measured(config, row, stack, name=name, repeats=repeats)
        row.add({"teacher_forced": forced} if forced else {"detail": {"repeats": _compared(results, seconds)}})
        row.finish(results[-1].record())
    return EngineError.exit_code if results[-1].agreement.non_finite else 0


def _measured(
    config: Settings, row: Run, stack: ExitStack, *, name: str, repeats: int
) -> tuple[list[GateResult], list[float], dict[str, int]]:
    """The repeats of a free run, seconds of each, and the tokens that agree teacher-forced where there is one run."""
    here = environment(device=config.device.torch_name)
    golden = part(config, name)
    row.add({"environment": here, "golden_hash": golden.hash, "battery_hash": golden.battery_hash})
    folder = checkpoint_folder(config.model.path)
    model = load_config(folder)
    began = time.perf_counter()
    engine = LocalEngine.from_config(config)
    stack.callback(engine.casts.drop)
    loaded = time.perf_counter()
    row.add({"bar": golden.bar.name, "model_hash": engine.info.model_sha256, "variant_hash": engine.recipe.hash})
    row.add({"recipe": {"declared": engine.recipe.as_dict()}})
    if found := observe_engine(engine, golden, row):
        raise EngineError(f"what ran is not what was declared: {found[0]} (and {len(found) - 1} more)")
    row.add({"detail": {"before_s": {"load": loaded - began, "observe": time.perf_counter() - loaded}}})
    text = texts(folder / "tokenizer.json")
    more = {"vocab_size": model.vocab_size, "text": text, "environment": here}
    results, seconds = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        results.append(run_gate(golden, engine, **more))
        seconds.append(time.perf_counter() - began)
    return results, seconds, _forced(golden, engine) if name == config.wide else {}


def part(config: Settings, name: str) -> Golden:
    """What `limit` and `max_tokens` leave of a golden; it is whole where it has fewer and the other one has as many.

    Raises UsageError when neither has.
    """
    both = {g: load_golden(g) for g in (config.golden, config.wide) if g}
    most = np.max([g.tokens.shape[1:] for g in both.values()], 0)
    sizes = zip((config.limit, config.max_tokens), both[name].tokens.shape[1:], most, strict=True)
    prompts, tokens = (int(min(asked, there)) if asked <= top else asked for asked, there, top in sizes)
    return part_of(both[name], prompts=prompts, tokens=tokens)


def _forced(golden: Golden, engine: LocalEngine) -> dict[str, int]:
    """Tokens chosen as the golden's, each behind the golden's own prefix, through the decode path."""
    tokens = golden.tokens[0]
    there = tokens >= 0
    rows = [[int(t) for t in row if t >= 0] for row in tokens]
    best = engine.score(golden.prompts, rows, top_k=1).top_ids[..., 0]
    return {"matched": int(((best == tokens) & there).sum()), "total": int(there.sum())}


def _compared(results: Sequence[GateResult], seconds: Sequence[float]) -> dict[str, object]:
    """Whether repeats gave the same tokens and the same gaps to the last bit, and how fast each was.

    seconds: of each whole gate, weights cast and kernels compiled from the second on.
    """
    first = results[0].generation
    same = [
        np.array_equal(r.generation.tokens, first.tokens)
        and np.array_equal(r.generation.gaps, first.gaps, equal_nan=True)
        for r in results
    ]
    speeds = [r.timing.decode_tok_s.median for r in results]
    return {"runs": len(results), "identical": all(same), "decode_tok_s": speeds, "seconds": list(seconds)}


def _print_table(config: Settings, names: Sequence[str], *, as_json: bool) -> None:
    """Published beside what is on record here: in the shipped ledger, and in this run's where that is another."""
    roots = {SHIPPED.resolve(), (Path(config.results) / "ledger").resolve()}
    rows = sorted((r for root in roots if root.is_dir() for r in Ledger(root).rows()), key=lambda r: r["time_utc"])
    model = checkpoint_folder(config.model.path).name
    batteries = [part(config, g).battery_hash for g in (config.golden, config.wide) if g]
    table = entries(names, [r for r in rows if r["model"] == model], published_rows(), batteries)
    if as_json:
        print(strict_json.dumps([entry.as_dict() for entry in table]).decode())
        return
    print(text_table(HEADER, [entry.cells() for entry in table]))
    print(ILLUSTRATION)
