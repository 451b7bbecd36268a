"""How often the verdict from outside is wrong on engines and prompts that took no part in fixing its thresholds.

`python -m experiments.outside_rates [OUT.csv]` writes results/outside.csv: correct engines, seen by their logprobs
alone, and planted defects played as such engines. Prompts are those of `wide` that neither the calibration nor the
power experiment has; nothing here is read back. The engines need the extras [llama], [mlx] and [transformers].
"""

import csv
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from experiments.verdict import WATCHED, Settings, taken_for
from harness.calibration import find_calibration, of_recipe
from harness.compose import load
from harness.config import DeviceChoice
from harness.engines import make_engine
from harness.engines.assets import checkpoint_folder
from harness.engines.local import LocalEngine, shared_casts
from harness.envelope import Envelope, envelope
from harness.forced_errors import Battery
from harness.forced_values import Candidate, LastTokens, ModelCandidate
from harness.golden import load_golden
from harness.numerics import policy
from harness.power_cells import FORMATS, LONGEST_PROMPT, ORDERS, benign_words, variant_of
from harness.verdict_outside import OutsideQuestion, logprob_findings, seen_deviations
from variants.defects import DEFECTS, Planted, Spread, build, plant
from variants.defects_kinds import Severity
from variants.model import Model
from variants.recipe import Recipe, resolve
from variants.weights import Casts

OUT = "results/outside.csv"
DECLARED = "recurrent"  # the order of sums that is declared; the engine has another
CALIBRATED, LONGEST, ROWS, TOKENS = 24, 65, 4, 6
BATTERIES, ENGINE_BATTERIES, PLANTED_BATTERIES = 5, 6, 2
CARRIERS = ("f32", "bf16")
PLANTED = (
    *("state_scaled", "conv_oldest_tap_scaled", "gate_rate_scaled", "l2_q_scaled", "beta_scaled", "mla_scaled"),
    *("router_logits_scaled", "routed_scale", "norm_eps_post", "index_expert_row"),
)
ENGINES = {
    "llama.cpp": ("engine=llama_server",),
    "llama.cpp, cache f16": ("engine=llama_server", "engine.kv=f16"),
    "llama.cpp, cache f16, flash": ("engine=llama_server", "engine.kv=f16", "engine.flash=true"),
    "MLX": ("engine=mlx",),
    "transformers f32": ("engine=transformers", "engine.dtype=f32", "declared=f32"),
    "transformers bf16": ("engine=transformers", "engine.dtype=bf16", "declared=transformers_mirror"),
}
# What the library is known to mean otherwise is declared here: these are to be correct runs.
LIBRARY_F32 = ("variant=f32", "variant.norm.kv_eps=eps_1e6")


@dataclass
class Tally:
    """Runs of one kind: how many, how many a finding was raised on, and the largest error over the members', in ln."""

    runs: int = 0
    flagged: int = 0
    worst: float = -np.inf
    said: list[str] = field(default_factory=list)

    def add(self, findings: list, figures: Mapping[str, object]) -> None:
        excess = figures["logprob_excess"]
        assert isinstance(excess, float)
        self.runs, self.flagged = self.runs + 1, self.flagged + bool(findings)
        self.worst = max(self.worst, excess)
        self.said += [f.reason for f in findings]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The checkpoint and what a verdict from outside asks for beside it."""

    casts: Casts

    def judged(self, recipe: Recipe, battery: Battery, own: Envelope, deviations: np.ndarray) -> tuple:
        question = OutsideQuestion(
            golden=load_golden("wide"),
            casts=self.casts,
            declared=recipe,
            reference=recipe,
            calibration=find_calibration(self.casts.checkpoint.sha256),
        )
        return logprob_findings(question, recipe, battery=battery, own=own, deviations=deviations)

    def recipe(self, words: str) -> Recipe:
        return resolve(variant_of(words), self.casts.checkpoint.config)


def batteries(count: int, first_seed: int) -> Iterator[tuple[int, Battery]]:
    """Batteries of prompts that nothing else here was measured on, each with a seed for its members' noise."""
    prompts = load_golden("wide").prompts
    free = [n for n, p in enumerate(prompts) if n >= CALIBRATED and LONGEST_PROMPT < len(p) <= LONGEST]
    for seed in range(first_seed, first_seed + count):
        rows = sorted(random.Random(seed).sample(free, ROWS))
        yield seed, Battery.of(load_golden("wide")).part(rows, TOKENS)


def candidates(bench: Bench, judged: Mapping[str, Candidate], words: str, count: int, seed: int) -> Iterator[tuple]:
    """(name, findings, figures) of each candidate under one declared recipe, battery after battery."""
    recipe = bench.recipe(words)
    for number, battery in batteries(count, seed):
        own = envelope(recipe, bench.casts, battery, seed=number, candidates=judged)
        for name in judged:
            yield (name, *bench.judged(recipe, battery, own, own.table.parties[name].deviations[0]))


def of_variants(bench: Bench) -> dict[str, Tally]:
    """Each format declared in one order of sums and run in every other."""
    found, words = {}, benign_words()
    for number, name in enumerate(FORMATS):
        others = {o: of_recipe(bench.recipe(words[f"{name}/{o}"]), bench.casts) for o in ORDERS if o != DECLARED}
        tally = found[f"our variants, {name}"] = Tally()
        for _, *run in candidates(bench, others, words[f"{name}/{DECLARED}"], BATTERIES, 1000 + 100 * number):
            tally.add(*run)
    return found


def of_engines(bench: Bench) -> dict[str, Tally]:
    """Other implementations, each held against what it is taken to compute as."""
    found = {}
    for number, (name, words) in enumerate(ENGINES.items()):
        tally = found[name] = Tally()
        config = load(words, root=Settings)
        recipe = taken_for(config, bench.casts.checkpoint.config)
        if name == "transformers f32":
            recipe = resolve(load(LIBRARY_F32).variant, bench.casts.checkpoint.config)
        engine = make_engine(config)
        for seed, battery in batteries(ENGINE_BATTERIES, 2000 + 100 * number):
            own = envelope(recipe, bench.casts, battery, seed=seed)
            scored = engine.score(battery.prompts, battery.continuations, top_k=WATCHED)
            tally.add(*bench.judged(recipe, battery, own, seen_deviations(own, scored)))
    return found


def of_defects(bench: Bench) -> dict[str, Tally]:
    """Defects in the declared order of sums, at one layer and at all, at the heaviest and the lightest severity."""
    found: dict[str, Tally] = {}
    for number, name in enumerate(CARRIERS):
        words = benign_words()[f"{name}/{DECLARED}"]
        engine, recipe = LocalEngine(bench.casts, variant_of(words), name=name), bench.recipe(words)
        faulty = {}
        for severity in (Severity.heavy, Severity.light):
            for spread in Spread:
                for defect in PLANTED:
                    p = plant(DEFECTS[defect], severity=severity, layers=spread, config=bench.casts.checkpoint.config)
                    make = partial(_faulty, engine, recipe, p)
                    key = f"planted, {severity.name}, {spread.value} layer{'s' * (spread is Spread.all)}, {name}"
                    faulty[f"{key}|{defect}"] = ModelCandidate(make, recipe.execution.batch)
        for key, *run in candidates(bench, faulty, words, PLANTED_BATTERIES, 3000 + 100 * number):
            found.setdefault(key.split("|")[0], Tally()).add(*run)
    return found


def _faulty(engine: LocalEngine, recipe: Recipe, planted: Planted, seen: LastTokens) -> Model:
    return build(engine, recipe, planted, probe=seen)


def main(out: str = OUT) -> None:
    bench = Bench(casts=shared_casts(str(checkpoint_folder("kimi-linear-12m")), None, "cpu"))
    with policy(DeviceChoice(threads=1)), Path(out).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("kind", "runs", "flagged", "worst_ln"))
        for measure in (of_variants, of_defects, of_engines):
            for kind, tally in measure(bench).items():
                writer.writerow((kind, tally.runs, tally.flagged, f"{tally.worst:.2f}"))
                file.flush()
                print(kind, tally.runs, tally.flagged, f"{tally.worst:.2f}", *tally.said[:3], sep="  ", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
