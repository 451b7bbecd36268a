"""The gate: an engine's greedy tokens against a golden, checked before, timed, scored, and held to a requirement.

Nothing here knows what the engine is. What cannot be compared is an error before a token is generated; rows that agree
less than the bar are results, and only a requirement turns them into a failure.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from harness.agreement import Agreement
from harness.engines.protocol import Engine, EngineInfo, Generation, Prompts
from harness.gaps import cannot_discriminate
from harness.golden import top_problems
from harness.golden_data import Bar, Golden
from harness.ledger_schema import FIELDS
from harness.measure import Timing, summarize
from harness.memory import PeakMemory, peak_memory
from harness.parts import part
from harness.pregate import check_answers, pregate
from harness.rebless import environment_differs
from harness.score import score
from harness.waiting import Waiting, waiting
from variants.errors import InputError, UsageError

# One step of bf16 logits between 16 and 32, where a trained model's first choices lie: two candidates closer than this
# change places by a single rounding.
LOGIT_STEP_NATS = 0.125


@dataclass(frozen=True, kw_only=True)
class GateResult:
    """One engine against one golden.

    required: what was asked for, None for a report. met: whether that holds, True where nothing was asked for. notes:
    what a reader must be told beside the count.
    """

    golden: Golden
    info: EngineInfo
    generation: Generation
    agreement: Agreement
    timing: Timing
    waited: Waiting
    memory: PeakMemory
    notes: tuple[str, ...]
    required: str | None
    met: bool

    @property
    def verdict(self) -> dict[str, str | None]:
        """PASS where the golden's bar is met, INVALID where logits were not finite, else None: not judged here."""
        a = self.agreement
        if a.not_finite:
            return {"class": "INVALID", "reason": a.not_finite}
        if a.bar_met:
            return {"class": "PASS", "reason": f"{a.matched}/{a.total}: the {a.bar.name} bar is met"}
        if a.bar_met is None:
            return {"class": None, "reason": "the golden has one run (K = 1), so no bar was measured"}
        return {"class": None, "reason": f"{a.matched}/{a.total}: below the {a.bar.name} bar; not judged further"}

    def record(self) -> dict[str, object]:
        """The fields of the ledger that a gate fills, JSON-plain."""
        timing = self.timing.record()
        detail = {"notes": list(self.notes), "required": self.required, "met": self.met}
        detail |= {"memory_since": self.memory.since, "tokens": self.generation.tokens.tolist()}
        own = timing.pop("detail")
        assert isinstance(own, dict)
        own["timing"]["waited_share"] = self.waited.share
        return {
            "status": "invalid" if self.agreement.non_finite else "ok",
            "agreement": _fixed(self.agreement),
            "verdict": self.verdict,
            "peak_memory_bytes": self.memory.bytes,
            "detail": detail | own | {"agreement": self.agreement.record()},
            **timing,
        }


def _fixed(agreement: Agreement) -> dict[str, object]:
    """The names that the schema fixes; `detail.agreement` holds the rest."""
    record = agreement.record()
    fixed = FIELDS["agreement"]
    assert isinstance(fixed, dict)
    return {name: record[name] for name in fixed}


def part_of(golden: Golden, *, prompts: int = 0, tokens: int = 0) -> Golden:
    """The first prompts of a golden and the first tokens of each, 0 for all; its bar is measured anew.

    Raises UsageError when more is asked for than there is.
    """
    _, n, t = golden.tokens.shape
    if prompts > n or tokens > t:
        raise UsageError(f"golden {golden.name} has {n} prompts of {t} tokens; got limit={prompts} max_tokens={tokens}")
    if prompts in (0, n) and tokens in (0, t):
        return golden
    n, t = prompts or n, tokens or t
    top = {f: None if (a := getattr(golden, f)) is None else a[:n, :t] for f in ("top_ids", "top_logprobs")}
    recorded = golden.recorded and replace(
        golden.recorded,
        **{f: getattr(golden.recorded, f)[:n, :t] for f in ("tokens", "gap_nats", "outside")},
    )
    return replace(
        golden,
        name=f"{golden.name}[:{n},:{t}]",
        prompts=golden.prompts[:n],
        tokens=golden.tokens[:, :n, :t],
        texts=golden.texts and golden.texts[:n],
        recorded=recorded,
        **top,
    )


@part("free run")
def run_gate(
    golden: Golden,
    engine: Engine,
    *,
    require: str | None = None,
    prompts: Prompts | None = None,
    vocab_size: int | None = None,
    text: Callable[[int], str | None] | None = None,
    environment: Mapping[str, object] | None = None,
) -> GateResult:
    """Pre-gate checks, one greedy run, its score, loops, speed and memory, and whether `require` is met.

    prompts: the ids that the engine will really run, where it does not take the golden's. vocab_size: of the model,
    where known. environment: where this runs; held against the golden's stamp where the same engine made it. Raises
    UsageError for a requirement that the golden cannot carry, InputError for what cannot be compared, EngineError
    where the engine fails.
    """
    check_requirement(golden, require)
    before = pregate(golden, engine.info, prompts=prompts, vocab_size=vocab_size)
    stop = golden.sampling.get("eos") == "stop"
    with peak_memory(engine.info.device) as memory, waiting() as waited:
        generation = engine.generate(golden.prompts, golden.tokens.shape[2], stop_at_eos=stop)
    check_answers(golden, engine.info, generation, stop_at_eos=stop)
    agreement = score(golden, generation, text=text if before.compare_text else None)
    return GateResult(
        golden=golden,
        info=engine.info,
        generation=generation,
        agreement=agreement,
        timing=summarize(generation),
        waited=waited,
        memory=memory,
        notes=(
            *before.notes,
            *generation.notes,
            *_doubts(golden),
            *_moved(golden, engine.info, environment),
            *agreement.messages,
        ),
        required=require,
        met=is_met(agreement, require),
    )


def _moved(golden: Golden, info: EngineInfo, environment: Mapping[str, object] | None) -> list[str]:
    """What moved since the same engine made the golden; another engine's golden was never made here."""
    if environment is None or golden.provenance.get("engine") != info.name:
        return []
    moved = environment_differs(golden, environment)
    # A golden that a user has on disk, as an argument of the command that would replace it.
    command = f"neartie capture golden={golden.path} engine=... --why=REASON --compared=WORDS"
    return [*moved, f"what that shows goes into the golden when it is captured again: {command}"] if moved else []


def _doubts(golden: Golden) -> list[str]:
    """Why this golden's tokens can show less than they seem to: what its import
    found, contradictions in it, gaps that are all small."""
    weak = cannot_discriminate(golden, LOGIT_STEP_NATS)
    contradictions = [f"golden {golden.name} contradicts itself: {problem}" for problem in top_problems(golden)]
    return [*golden.provenance.get("import_notes", []), *contradictions, *([weak] if weak else [])]


def check_requirement(golden: Golden, require: str | None) -> None:
    """Raises UsageError where no candidate could meet `require`: a golden of one run has no bar to meet.

    Raises InputError where token agreement on this golden can neither pass nor fail anybody.
    """
    if require is not None and (weak := cannot_discriminate(golden, LOGIT_STEP_NATS)):
        raise InputError(f"golden {golden.name}: {weak}")
    if require in ("bar", "strict") and golden.bar is Bar.UNMEASURED:
        raise UsageError(
            f"--require={require}: golden {golden.name} has one run (K = 1), so its bar is unmeasured; capture it K "
            "times, or ask for --require=exact or a number of tokens"
        )
    if require == "strict" and golden.bar is not Bar.STRICT:
        raise UsageError(f"--require=strict: the runs of golden {golden.name} differ; ask for --require=bar")
    _, prompts, tokens = golden.tokens.shape
    if require is not None and require.isdigit() and int(require) > prompts * tokens:
        raise UsageError(
            f"--require={require}: golden {golden.name} has {prompts * tokens} tokens; ask for at most those"
        )


def is_met(agreement: Agreement, require: str | None) -> bool:
    """Whether a score meets a requirement; `exact` is agreement with run 0 in every place counted."""
    if require is None:
        return True
    if require in ("bar", "strict"):
        return agreement.bar_met is True
    wanted = agreement.total if require == "exact" else int(require)
    return agreement.matched >= wanted and not agreement.non_finite
