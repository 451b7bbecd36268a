"""`neartie gate`: one job is one engine or variant against one golden, one row in the ledger, one line in a table."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from experiments.words import Flags
from harness import strict_json
from harness.compose import as_plain
from harness.config import READS, Config, EngineKind
from harness.engines import make_engine
from harness.engines.assets import checkpoint_folder
from harness.engines.local import LocalEngine
from harness.engines.protocol import Engine
from harness.engines.replay import ReplayEngine
from harness.gate import GateResult, check_requirement, part_of, run_gate
from harness.golden import Golden, load_golden
from harness.ledger import Ledger, Run
from harness.ledger_read import read_row
from harness.numerics import check_device, policy
from harness.parts import part, recorded
from harness.pregate import check_vocabulary
from harness.provenance import environment
from harness.report import gate_table, text
from harness.row_ends import end_ids
from harness.text_table import text_table
from harness.token_text import token_text
from variants.checkpoint import load_config
from variants.errors import EngineError
from variants.recipe import resolve

BAR_NOT_MET = 1


@dataclass(kw_only=True)
class Job:
    """A job as `report` needs it: its row is on record when it has ended, its result there when it succeeded."""

    row: Run
    result: GateResult | None = None


def run(config: Config, flags: Flags) -> int:
    """Run one gate and put its row on record, whatever comes of it; 1 where a requirement is not met."""
    with Ledger(Path(config.results) / "ledger").begin(announced(config, flags)) as row:
        job = Job(row=row)
        flags.results.append(job)
        check_device(config.device)
        with (
            recorded() as parts,
            policy(config.device, tf32=config.variant.tf32, reduced_sums=config.variant.reduced_sums),
        ):
            job.result = _gate(config, row)
        row.add({"detail": {"seconds": parts.record()}})
        row.finish(job.result.record())
    if flags.many and not flags.json:
        print(f"{config.label}: {job.result.agreement.matched}/{job.result.agreement.total}", file=sys.stderr)
    if job.result.agreement.non_finite:
        return EngineError.exit_code
    return 0 if job.result.met else BAR_NOT_MET


def gate_without_row(config: Config) -> GateResult:
    """One gate that leaves no row, for a test that is its own record; raises what the gate raises."""
    check_device(config.device)
    with policy(config.device, tf32=config.variant.tf32, reduced_sums=config.variant.reduced_sums):
        return _gate(config, Run(Ledger(config.results), "none", datetime.now(UTC), {}))


def report(flags: Flags) -> None:
    """One table of all jobs; a single job also lists every prompt that diverges."""
    rows = flags.rows if flags.many else [read_row(job.row.path) for job in flags.results]
    if flags.json:
        print(strict_json.dumps(rows if flags.many else rows[0]).decode())
        return
    print("\n".join(line.rstrip() for line in text(gate_table(rows)).splitlines()))
    for line in _same_arms(rows):
        print(line)
    for row in rows:
        lines = list((row["detail"] or {}).get("notes") or ())
        if not flags.many and flags.results[0].result is not None:
            lines += _details(flags.results[0].result)
        if lines:
            print("\n".join(["", *lines]))


def _gate(config: Config, row: Run) -> GateResult:
    here = environment_of(config)
    row.add({"environment": here})
    golden = part_of(load_golden(config.golden), prompts=config.limit, tokens=config.max_tokens)
    row.add({"golden_hash": golden.hash, "battery_hash": golden.battery_hash, "bar": golden.bar.name})
    check_requirement(golden, config.require)
    if config.engine.kind is EngineKind.local:
        recipe = resolve(config.variant, load_config(checkpoint_folder(config.model.path)))
        row.add({"variant_hash": recipe.hash, "recipe": {"declared": recipe.as_dict()}})
    engine = make_engine(config)
    golden = with_gaps(golden, engine)
    row.add({"model_hash": engine.info.model_sha256})
    with ExitStack() as stack:
        if isinstance(engine, LocalEngine):
            # The next job may read the weights in another dtype: its peak must not hold this one's casts as well.
            stack.callback(engine.casts.drop)
            check_vocabulary(golden, engine.casts.checkpoint.config.vocab_size)
            _refuse(observe_engine(engine, golden, row))
        return run_gate(golden, engine, require=config.require, environment=here, **known_of(config, golden, engine))


def environment_of(config: Config) -> dict[str, object]:
    """The environment of the device that runs: vLLM takes the first GPU, whatever `device` says of our own variants."""
    gpu = config.engine.kind is EngineKind.vllm and torch.cuda.is_available()
    return environment(device="cuda:0" if gpu else config.device.torch_name)


def known_of(config: Config, golden: Golden, engine: Engine) -> dict[str, Any]:
    """What `run_gate` can be told of this engine: the prompts that its tokens are of, or its model's vocabulary."""
    if isinstance(engine, ReplayEngine):
        return {"prompts": engine.answered(golden.prompts)}
    if "model" not in READS[config.engine.kind][1]:
        return {}
    folder = checkpoint_folder(config.model.path)
    return {"vocab_size": load_config(folder).vocab_size, "text": texts(folder / "tokenizer.json")}


def with_gaps(golden: Golden, engine: Engine) -> Golden:
    """The golden beside the gaps that were recorded with a replayed run, where it has none of its own.

    The run learns of the golden's ends of sequence: a file does not say what its rows are padded with.
    """
    if not isinstance(engine, ReplayEngine):
        return golden
    engine.ends = end_ids(golden)
    if golden.recorded is not None:
        return golden
    recorded = engine.recorded_for(golden)
    return golden if recorded is None else replace(golden, recorded=recorded)


@part("watched pass")
def observe_engine(engine: LocalEngine, golden: Golden, row: Run) -> tuple[str, ...]:
    """Record what really runs at each site; returns what in it is not what the recipe declares."""
    observed = engine.observed(golden.prompts[0])
    row.add({"recipe": {"observed": observed.as_dict()}})
    return observed.contradictions


def _refuse(contradictions: Sequence[str]) -> None:
    if contradictions:
        first, more = contradictions[0], len(contradictions) - 1
        raise EngineError(f"what ran is not what was declared: {first}" + (f" (and {more} more)" if more else ""))


def texts(tokenizer: Path) -> Callable[[int], str | None] | None:
    return token_text(tokenizer) if tokenizer.is_file() else None


def announced(config: Config, flags: Flags, experiment: str = "gate") -> dict[str, object]:
    """What a row says before its run: its place in a sweep and every setting read, but not where the row lies."""
    settings, groups = READS[config.engine.kind]
    read = groups | {word.split(".")[0] for word in config.own_words}
    plain = {k: v for k, v in as_plain(config).items() if k not in {"model", "variant", "device"} - read}
    # A server's address names somebody's machine.
    plain["engine"] = {k: v for k, v in _mapping(plain["engine"]).items() if k in (settings | {"kind"}) - {"url"}}
    del plain["results"]
    return {
        "experiment": experiment,
        "engine": config.engine.kind.name,
        "variant": config.label,
        "golden": config.golden,
        "model": config.model.path if "model" in groups else None,
        "seeds": {"seed": config.seed},
        "detail": {"config": plain},
        **(flags.place.record() if flags.place else {}),
    }


def _mapping(value: object) -> Mapping[str, object]:
    assert isinstance(value, Mapping)
    return value


def _same_arms(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each pair of variants that were seen to do the same at every site: their rows compare nothing."""
    seen = [(row["variant"], row["recipe"]["observed"]) for row in rows if row["recipe"]["observed"]]
    return [
        f"{a} and {b}: the same arm, for what ran is equal"
        for (a, x), (b, y) in combinations(seen, 2)
        if a != b and x == y
    ]


PROMPT = ("prompt", "agree", "prefix", "at", "golden", "candidate", "golden's gap", "own gap", "margin")


def _details(result: GateResult) -> list[str]:
    """Every prompt of one run: agreement, prefix, the first divergence with ids, texts and gaps in nats."""
    rows: list[list[object]] = []
    for p in result.agreement.per_prompt:
        d = p.divergence
        if d is None:
            rows.append([p.prompt, f"{p.matched}/{p.total}", p.prefix, *[None] * 6])
            continue
        said = (_token(d.golden_id, d.golden_text), _token(d.candidate_id, d.candidate_text))
        gaps = (_nats(d.golden_gap_nats), _nats(d.candidate_gap_nats), _nats(d.golden_margin_nats))
        rows.append([p.prompt, f"{p.matched}/{p.total}", p.prefix, d.position, *said, *gaps])
    return [text_table(PROMPT, rows), "gaps and margin in nats"]


def _token(token: int, said: str | None) -> str:
    return str(token) if said is None else f"{token} {said!r}"


def _nats(value: float | None) -> str | None:
    return None if value is None else f"{value:.4g}"


if __name__ == "__main__":
    from experiments.cli import main

    sys.exit(main(["gate", *sys.argv[1:]]))
