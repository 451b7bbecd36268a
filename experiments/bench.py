"""`neartie bench`: steady decode of a variant beside the transformers library, or beside another variant."""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.gate import announced, observe_engine
from experiments.words import Flags
from harness import strict_json
from harness.compose import groups, named_variant
from harness.config import Config, EngineKind
from harness.engines.assets import checkpoint_folder
from harness.engines.local import LocalEngine
from harness.engines.transformers_engine import TransformersEngine
from harness.golden import Golden, load_golden
from harness.ledger import Ledger, Run
from harness.numerics import check_device, policy
from harness.paired import WARM_UP, LibrarySide, Pairs, Side, Spread, VariantSide, rate_of, timed
from harness.pregate import check_vocabulary
from harness.progress import tracked
from harness.provenance import environment
from harness.text_table import text_table
from variants.errors import EngineError, UsageError

FLOORS = "floors"  # what against= names for the limits of a device
LLAMA = "llama_server"  # and llama.cpp's server, in float32
LIBRARY = {"transformers": "f32", "transformers_bf16": "bf16"}  # what against= may name, and the library's dtype

CONTEXTS, PREFILLS, ALONE = (32, 8192), (64, 512, 2048), (1,)
TIMED = (EngineKind.local, EngineKind.transformers, EngineKind.vllm)  # engines that against=floors times


@dataclass(frozen=True, kw_only=True)
class Settings(Config):
    """against: the library in float32 or bf16 (`LIBRARY`), `LLAMA`, a named variant, or `FLOORS`.

    steps: timed tokens of a run, with `LLAMA` of each answer.

    contexts, prefills, batches: of against=floors: tokens before a timed step, tokens of a prompt, and sequences that
    decode together, where the engine runs several. oracle_tokens: of a fused step's sequence, whose logits are held
    against float64; 0 for none.
    """

    against: str = "transformers"
    runs: int = 3
    steps: int = 96
    contexts: tuple[int, ...] = CONTEXTS
    prefills: tuple[int, ...] = PREFILLS
    batches: tuple[int, ...] = ALONE
    oracle_tokens: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        allowed = TIMED if self.against == FLOORS else (EngineKind.local,)
        if self.engine.kind not in allowed:
            raise UsageError(f"bench times a variant, engine={self.engine.kind.name} is not read; name it by against=")
        for name in ("runs", "steps"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: expected 1 or more")
        fused = self.engine.kind is EngineKind.local and self.variant.execution.fused
        if self.oracle_tokens < 0 or (self.oracle_tokens and not (self.against == FLOORS and fused)):
            raise UsageError(
                f"oracle_tokens={self.oracle_tokens}: expected 0 or more, with device=cuda against=floors and a fused "
                "step (variant=fast_decode)"
            )
        given = (tuple(self.contexts), tuple(self.prefills), tuple(self.batches))  # a list where it was composed
        if self.against != FLOORS and given != (CONTEXTS, PREFILLS, ALONE):
            raise UsageError("contexts, prefills and batches are read by against=floors alone")
        if any(n < 1 for sizes in given for n in sizes) or not all(given):
            named = f"contexts={self.contexts}, prefills={self.prefills}, batches={self.batches}"
            raise UsageError(f"{named}: expected numbers of 1 or more")
        for name in ("limit", "max_tokens"):
            if getattr(self, name):
                raise UsageError(f"{name} is not read by bench: a run takes one prompt; use steps= and runs=")


def run(config: Settings, flags: Flags) -> int:
    """Time both sides, print the ratio and put a row on record."""
    if config.against == FLOORS and config.engine.kind is EngineKind.local and config.variant.execution.fused:
        from experiments import bench_floors  # it needs triton

        return bench_floors.run(config, flags)
    if config.against == FLOORS:
        from experiments import bench_rates

        return bench_rates.run(config, flags)
    with Ledger(Path(config.results) / "ledger").begin(announced(config, flags, "bench")) as row:
        check_device(config.device)
        with policy(config.device, tf32=config.variant.tf32):
            row.add({"environment": environment(device=config.device.torch_name)})
            golden = load_golden(config.golden)
            row.add({"golden_hash": golden.hash, "battery_hash": golden.battery_hash})
            runs = _timed(config, golden, row)
        record = _record(config, runs)
        row.finish(record)
    if flags.json:
        print(strict_json.dumps({"run_id": row.run_id, **record}).decode())
    else:
        print(_text(config, runs))
    return 0


def _timed(config: Settings, golden: Golden, row: Run) -> list[Pairs]:
    engine = LocalEngine.from_config(config)
    check_vocabulary(golden, engine.casts.checkpoint.config.vocab_size)
    row.add({"model_hash": engine.info.model_sha256, "variant_hash": engine.recipe.hash})
    row.add({"recipe": {"declared": engine.recipe.as_dict()}})
    if found := observe_engine(engine, golden, row):
        raise EngineError(f"what ran is not what was declared: {found[0]}")
    steps = config.steps + WARM_UP
    ours = VariantSide(engine.model, steps=steps)
    prompts = golden.prompts
    runs = tracked("runs", range(config.runs), config.runs)
    if config.against == LLAMA:
        from harness.paired_llama import LlamaSide, timed_in_blocks

        longest = max(map(len, prompts)) + steps
        with LlamaSide(checkpoint_folder(config.model.path), length=longest) as server:
            return [timed_in_blocks(ours, server, prompts[i % len(prompts)], steps=config.steps) for i in runs]
    theirs = _other(config, engine, steps)
    return [timed(ours, theirs, prompts[i % len(prompts)], steps=config.steps) for i in runs]


def _other(config: Settings, engine: LocalEngine, steps: int) -> Side:
    if config.against in LIBRARY:
        folder, dtype = checkpoint_folder(config.model.path), LIBRARY[config.against]
        return LibrarySide(TransformersEngine.load(folder, dtype=dtype, device=config.device.torch_name))
    if config.against not in groups()["variant"]:
        raise UsageError(
            f"against={config.against}: expected {', '.join((*LIBRARY, LLAMA, FLOORS))} or a named variant"
        )
    other = LocalEngine(engine.casts, named_variant(config.against), name=config.against, device=config.device)
    return VariantSide(other.model, steps=steps)


def _record(config: Settings, runs: list[Pairs]) -> dict[str, object]:
    detail = {"against": config.against, "runs": [run.record() for run in runs]}
    return {"status": "ok", "decode_tok_s": asdict(rate_of(runs)), "detail": {"bench": detail}}


def _text(config: Settings, runs: list[Pairs]) -> str:
    head = ("run", config.label, config.against, "ratio", "by processor time", "same token")
    unit = "answers" if config.against == LLAMA else "steps"
    rows: list[list[object]] = []
    for number, run in enumerate(runs):
        ratios = [_ratio(Spread.of(x[:, 1] / x[:, 0])) for _, x in run.clocks()]
        ours, theirs = (f"{1e3 * Spread.of(run.wall_s[:, side]).median:.2f} ms" for side in (0, 1))
        rows.append([number, ours, theirs, *(*ratios, "-")[:2], f"{run.agreed}/{run.compared}"])
    told = [f"a token; medians over {unit}; ratio: pairwise, 5th to 95th percentile", _whose(config)]
    if config.against == LLAMA and any(run.agreed < run.compared for run in runs):
        told.append("the tokens differ: each side ran on its own, so the two did not do the same work")
    return "\n".join([text_table(head, rows), *told])


def _whose(config: Settings) -> str:
    """What the other side is, since a variant may bear an engine's name, and one variant two names."""
    against = config.against
    if against == LLAMA:
        return f"{against}: llama.cpp's own server in float32, another process, by its own clock"
    if against in LIBRARY:
        return f"{against}: the library in {LIBRARY[against]}, in this process"
    if named_variant(against) == config.variant:
        return f"{config.label} and {against} are one variant, the same arm: the ratio is that of equal work"
    return f"{against}: a variant of this project, in this process"


def _ratio(spread: Spread) -> str:
    return f"{spread.median:.2f}x ({spread.low:.2f} to {spread.high:.2f})"


if __name__ == "__main__":
    from experiments.cli import main

    sys.exit(main(["bench", *sys.argv[1:]]))
