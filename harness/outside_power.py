"""How often the verdict from outside is wrong: correct variants and planted defects, shown by their outputs alone.

Each run is made by our own forward and then treated as a stranger's: it is taken for the plain variant of its dtype, as
`neartie verdict` takes a server, and judged by what such an engine shows. A run that the gate refuses as another
question is flagged too. Runs of one battery and one declared recipe stand beside the same members (`harness.beside`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from harness.beside import Beside, stand_beside
from harness.calibration import family, shipped_calibration
from harness.compose import named_variant
from harness.divergence import Cause, Divergence
from harness.engines.local import LocalEngine, forced_logits
from harness.engines.logits import ScoreTable
from harness.engines.protocol import EngineInfo, Generation, Prompts, Scored
from harness.gate import GateResult, run_gate
from harness.golden import load_golden
from harness.golden_data import Golden
from harness.lockstep import batches
from harness.power_cells import Cell, Slice, variant_of
from harness.verdict import RunClass, Verdict
from harness.verdict_outside import (
    TAKEN_FOR,
    WATCHED,
    OutsideQuestion,
    first_choices,
    forced_choices,
    judge_outside,
)
from harness.verdict_tokens import SeenDivergence, judge_tokens
from variants import decode
from variants.axes import Variant
from variants.defects import DEFECTS, Spread, build, plant
from variants.defects_kinds import Severity
from variants.dtypes import DType
from variants.errors import InputError
from variants.model import Model
from variants.recipe import Recipe, resolve
from variants.rounding import NoProbe
from variants.weights import Casts

MEMBERS = 8
TOP = 20  # logprobs that a server gives with each token
FINER = "f32"
KEPT = ("excess", "logprob_p", "expected_p")


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What one run shows outside. free: its own tokens with their top logprobs. forced: along the golden's tokens.
    finer: the same with its code raised to float32, None where it runs in that."""

    free: Generation
    forced: Scored
    finer: Scored | None


@dataclass(frozen=True, kw_only=True)
class Sight:
    """A way of seeing an engine. title: in a table. oracle: whether its checkpoint is here."""

    title: str
    logprobs: bool
    forced: bool = False
    finer: bool = False
    oracle: bool = True


SIGHTS = {
    "tokens_alone": Sight(title="tokens, no checkpoint", logprobs=False, oracle=False),
    "logprobs_alone": Sight(title="tokens and top 20, no checkpoint", logprobs=True, oracle=False),
    "tokens": Sight(title="tokens, beside the oracle", logprobs=False),
    "logprobs": Sight(title="tokens and top 20, beside the oracle", logprobs=True),
    "forced": Sight(title="forced, top 64", logprobs=True, forced=True),
    "finer": Sight(title="forced, and again in f32", logprobs=True, forced=True, finer=True),
}


@dataclass(frozen=True, kw_only=True)
class Told:
    """One verdict: flagged None where it cannot tell (SUSPECT, INVALID). by: the instrument that leads."""

    run_class: str
    flagged: bool | None
    by: str
    figures: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A cell's verdicts by sight; shows: whether a defect changes any output that is seen."""

    cell: Cell
    declared: str
    told: dict[str, Told]
    shows: bool = True


class Stranger:
    """An engine of which nothing is known but what it said."""

    def __init__(self, free: Generation, logprobs: bool) -> None:
        self.free = free if logprobs else replace(free, top_ids=None, top_logprobs=None, gaps=np.nan * free.gaps)
        self.info = EngineInfo(name="stranger", version="", device="cpu", dtype="unknown", can_score=False)

    def generate(self, prompts: Prompts, max_tokens: int, *, stop_at_eos: bool = False) -> Generation:
        return self.free

    def score(self, prompts: Prompts, continuations: Prompts, *, top_k: int = 20) -> Scored:
        raise AssertionError("a stranger was asked to score")


def declared_for(words: str, casts: Casts) -> str:
    """The variant that an engine of these words' format is taken for."""
    return TAKEN_FOR[family(resolve(variant_of(words), casts.checkpoint.config))]


def golden_of(part: Slice) -> Golden:
    """The rows of a golden that a slice names, as a golden of their own."""
    whole, rows, t = load_golden(part.golden), list(part.rows), part.tokens
    top = {f: None if (a := getattr(whole, f)) is None else a[rows, :t] for f in ("top_ids", "top_logprobs")}
    prompts = tuple(whole.prompts[n] for n in rows)
    return replace(whole, name=part.name, prompts=prompts, tokens=whole.tokens[:, rows, :t], texts=None, **top)


def answers(casts: Casts, cells: Sequence[Cell], *, seed: int = 0) -> list[Answer]:
    """Run and judge cells of one battery that are taken for one declared variant."""
    golden = golden_of(cells[0].battery)
    config, engine = casts.checkpoint.config, LocalEngine(casts, Variant(), name="outside")
    (name,) = {declared_for(c.words, casts) for c in cells}
    declared, reference = (resolve(named_variant(n), config) for n in (name, "bf16_engine"))
    finer = (FINER,) if DType[family(declared)].precision < DType[FINER].precision else ()
    shown = [_shown(golden, *_maker(engine, cell), finer=bool(finer)) for cell in cells]
    plain = _plain(engine, golden, cells, finer=bool(finer))
    taken = [c for s in shown for c in _columns(golden, s)]
    beside = stand_beside(golden, casts, declared, reference, taken, members=MEMBERS, seed=seed, precisions=finer)
    if any(not c.benign for c in cells):
        _ = beside.as_runs.meanings, [level.meanings for level in beside.finer.values()]
    question = OutsideQuestion(
        golden=golden, casts=casts, declared=declared, reference=reference, members=MEMBERS, seed=seed,
        calibration=shipped_calibration(casts.checkpoint.sha256),
    )  # fmt: skip
    found = []
    for n, (cell, s) in enumerate(zip(cells, shown, strict=True)):
        told = {
            name: _told(question, s, sight, lambda forced, n=n: beside.of(2 * n + forced, len(taken)))
            for name, sight in SIGHTS.items()
            if not sight.finer or s.finer is not None
        }
        shows = cell.benign or _differs(s, plain[cell.words])
        found.append(Answer(cell=cell, declared=name, told=told, shows=shows))
    return found


def _plain(engine: LocalEngine, golden: Golden, cells: Sequence[Cell], *, finer: bool) -> dict[str, Shown]:
    """What the carriers of planted defects show without them."""
    carriers = {c.words: replace(c, defect="") for c in cells if not c.benign}
    return {words: _shown(golden, *_maker(engine, c), finer=finer) for words, c in carriers.items()}


Make = Callable[[Recipe], Model]


def _maker(engine: LocalEngine, cell: Cell) -> tuple[Make, Recipe]:
    config = engine.casts.checkpoint.config
    recipe = resolve(variant_of(cell.words), config)
    if cell.benign:
        return lambda r: engine.build(recipe=r, probe=NoProbe()), recipe
    planted = plant(DEFECTS[cell.defect], severity=Severity[cell.severity], layers=Spread[cell.spread], config=config)
    return lambda r: build(engine, r, planted), recipe


def _shown(golden: Golden, make: Make, recipe: Recipe, *, finer: bool) -> Shown:
    model = make(recipe)
    forced = _forced(golden, model)
    raised = _forced(golden, make(recipe.at_precision(DType[FINER]))) if finer else None
    return Shown(free=_free(golden, make(recipe), forced), forced=forced, finer=raised)


def _free(golden: Golden, model: Model, forced: Scored) -> Generation:
    """A greedy run of a golden's prompts with its top logprobs; rows that took its tokens when forced are not run
    again."""
    tokens = golden.tokens[0].copy()
    ids, values, finite = forced.top_ids[..., :TOP].copy(), forced.top_logprobs[..., :TOP].copy(), forced.finite.copy()
    own = [int(n) for n in np.flatnonzero((forced.top_ids[..., 0] != tokens).any(-1))]
    steps = tokens.shape[1]
    size = model.recipe.execution.batch
    for here in (own[i : i + size] for i in range(0, len(own), size)):
        said: list[Tensor] = []

        def choose(t: int, logits: Tensor, said: list[Tensor] = said) -> Tensor:
            said.append(logits.double())
            return decode.greedy(logits)

        decode.steps(model, [golden.prompts[n] for n in here], steps, choose)
        chosen = torch.stack([decode.greedy(x) for x in said], 1).numpy()
        table = ScoreTable(chosen.tolist(), model.config.vocab_size, top_k=TOP)
        for t, x in enumerate(said):
            for i, row in enumerate(x.numpy()):
                table.put(i, t, row)
        s = table.scored("decode")
        tokens[here], ids[here], values[here], finite[here] = chosen, s.top_ids, s.top_logprobs, s.finite
    return Generation(
        tokens=tokens,
        finite=finite,
        gaps=values[..., 0] - values[..., 1],
        prefill_s=np.full(len(tokens), np.nan),
        prefill_tokens=np.array([len(p) for p in golden.prompts]),
        decode_s=(),
        top_ids=ids,
        top_logprobs=values,
    )


def _forced(golden: Golden, model: Model) -> Scored:
    right = golden.tokens[0].tolist()
    table = ScoreTable(right, model.config.vocab_size, top_k=WATCHED)
    for rows, prompts, tokens in batches(golden.prompts, right, model.recipe.execution.batch):
        for t, logits in enumerate(forced_logits(model, prompts, tokens)):
            for n, values in zip(rows, logits.double().numpy(), strict=True):
                table.put(n, t, values)
    return table.scored("decode")


def _gate(golden: Golden, s: Shown, *, logprobs: bool) -> GateResult:
    return run_gate(golden, Stranger(s.free, logprobs))


def _columns(golden: Golden, s: Shown) -> list[np.ndarray]:
    """The tokens [N, T] that a run took freely and forced, as its two verdicts ask for them; the golden's where it took
    none that can be."""
    try:
        free, _ = first_choices(golden, _gate(golden, s, logprobs=True))
    except InputError:
        free = golden.tokens[0]
    forced, _ = forced_choices(golden, s.forced)
    return [free, np.where(forced < 0, golden.tokens[0], forced)]


def _told(q: OutsideQuestion, s: Shown, sight: Sight, beside: Callable[[int], Beside]) -> Told:
    try:
        gate = _gate(q.golden, s, logprobs=sight.logprobs)
    except InputError as error:
        return Told(run_class="input", flagged=True, by=str(error)[:60], figures={})
    if not sight.oracle:
        return _of(judge_tokens(q.golden, gate.generation, gate.agreement, noise=None))
    asked = replace(q, scored=s.forced if sight.forced else None)
    if sight.finer and s.finer is not None:
        asked = replace(asked, finer={FINER: s.finer})
    found = beside(sight.forced)
    return _of(judge_outside(asked, gate, found if sight.finer else replace(found, finer={})))


def _of(v: Verdict) -> Told:
    flagged: bool | None = v.run_class is RunClass.defect
    if v.run_class in (RunClass.suspect, RunClass.invalid):
        flagged = True if "non-finite" in v.reason else None
    leading = v.findings[0].instrument if v.findings else "divergence"
    kept = {k: float(x) for k, x in v.figures.items() if k.endswith(KEPT)}  # pyright: ignore[reportArgumentType]
    seen = [d for d in v.divergences if isinstance(d, SeenDivergence) and d.shift is not None]
    if seen:
        kept |= {"nats": max(d.shift or 0.0 for d in seen), "sigma": seen[0].sigma}
        kept |= {"suspect": float(sum(d.cause is Cause.suspect for d in seen))}
    else:
        kept |= {"p": min((d.p for d in v.divergences if isinstance(d, Divergence)), default=1.0)}
    return Told(run_class=v.run_class.value, flagged=flagged, by=leading if flagged else "", figures=kept)


def _differs(a: Shown, b: Shown) -> bool:
    """Whether two runs show one different bit, forced or raised."""
    pairs = [(a.forced, b.forced), *([(a.finer, b.finer)] if a.finer and b.finer else [])]
    return any(not np.array_equal(x.top_logprobs, y.top_logprobs, equal_nan=True) for x, y in pairs)
