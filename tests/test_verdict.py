"""The verdict: what outweighs what, what an error looks like, what explains it, a faulty engine from end to end."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from instruments import CARRIER, battery, engine, faulty, findings, of, planted, replay, shipped
from torch import Tensor

from experiments.cli import main
from experiments.verdict import Settings, text
from harness.agreement import Agreement, PromptAgreement
from harness.agreement import Divergence as GateDivergence
from harness.compose import named_variant
from harness.config import EngineChoice, EngineKind
from harness.divergence import Cause, Divergence, Side
from harness.engines.local import LocalEngine
from harness.gate import part_of, run_gate
from harness.golden import load_golden
from harness.golden_data import Bar
from harness.hypotheses import Hypothesis, Subject, best, by_chance, explain, hypotheses
from harness.inspect import Arm, make_oracle, model_stepper, sample
from harness.local_replay import local_replay
from harness.op_error import OpError
from harness.probes import Tap, chain
from harness.signature import hints
from harness.verdict import Finding, RunClass, Verdict, conclude, end_findings
from harness.verdict_run import Question, judge_run, other_model
from variants import defects
from variants.axes import Execution
from variants.defects import Planted
from variants.defects_kinds import Severity
from variants.errors import UsageError
from variants.model import Model
from variants.ops import kda, mla
from variants.recipe import Recipe, Rule, Semantics
from variants.rounding import Probe, RoundAt, Step
from variants.weights import Patch

HEAVY, MEDIUM, LIGHT = Severity.heavy, Severity.medium, Severity.light
LONG, SHORT = battery((2,), 3), battery((0,), 3)
REPLAYED = Finding(instrument="local_replay", reason="layer 3 mla_core: 9x its bound", site="mla_core", layer=3)
CLIMBED = Finding(instrument="ladder", reason="layer 3: error has a floor", layer=3)
ENVELOPED = Finding(instrument="envelope", reason="layer 2 output: error e^+0.9", layer=2)
OBSERVED = Finding(instrument="observed", reason="beta: ran in bfloat16, declared float32")


def divergence(cause: Cause, p: float) -> Divergence:
    side = Side(margin=0.1, sigma=0.1)
    return Divergence(prompt=1, position=2, golden_token=5, token=6, margin=0.1, candidate=side, golden=side,
                      cause=cause, p=p)  # fmt: skip


def concluded(
    found: list[Finding],
    diverged: list[Divergence] | None = None,
    *,
    invalid: str | None = None,
    met: bool | None = False,
) -> Verdict:
    config = shipped().checkpoint.config
    return conclude(found, diverged or [], invalid=invalid, bar_met=met, config=config)


# --- what outweighs what ---


def test_local_replay_names_the_place_before_ladder_and_envelope() -> None:
    """A finding with a site leads, then one with a layer; whatever was found is kept."""
    v = concluded([OBSERVED, CLIMBED, ENVELOPED, REPLAYED])
    assert (v.run_class, v.site, v.layer, v.confidence) == (RunClass.defect, "mla_core", 3, "high")
    assert v.reason == f"{REPLAYED.reason}: defect"
    assert v.findings == (OBSERVED, CLIMBED, ENVELOPED, REPLAYED)
    assert concluded([OBSERVED, CLIMBED]).reason == f"{CLIMBED.reason}: defect"


def test_a_matter_of_probability_alone_has_low_confidence() -> None:
    """An envelope alone, or a divergence alone, is a defect at low confidence; what was seen to run is certain."""
    assert concluded([ENVELOPED]).confidence == "low"
    assert concluded([ENVELOPED, CLIMBED]).confidence == "high"
    assert concluded([OBSERVED]).confidence == "high"
    v = concluded([], [divergence(Cause.rounding, 0.5), divergence(Cause.defect, 1e-9)])
    assert (v.run_class, v.confidence, v.site) == (RunClass.defect, "low", None)
    assert v.reason.endswith(": defect")


def test_a_met_bar_does_not_hide_a_defect() -> None:
    """Every token may agree while an operation is wrong; without a finding a met bar is a PASS."""
    assert concluded([REPLAYED], met=True).run_class is RunClass.defect
    assert concluded([], met=True).run_class is RunClass.passed


def test_explained_divergences_are_rounding() -> None:
    """Ties, roundings and routing together are ROUNDING, counted, with the least likely one in the line."""
    found = [divergence(Cause.tie, 0.9), divergence(Cause.routing, 1e-6), divergence(Cause.rounding, 0.4)]
    v = concluded([], found)
    assert v.run_class is RunClass.rounding
    assert "all 3 divergences explained (1 tie, 1 rounding, 1 rounding amplified by routing)" in v.reason
    assert v.reason.endswith(found[1].reason)
    assert "no divergence" in concluded([]).reason


@pytest.mark.parametrize("cause", [Cause.defect, Cause.golden_side, Cause.non_finite])
def test_one_unexplained_divergence_is_enough(cause: Cause) -> None:
    """Beside any number that rounding explains."""
    assert concluded([], [divergence(Cause.rounding, 0.9), divergence(cause, 1e-8)]).run_class is RunClass.defect


def test_a_golden_of_other_weights_is_an_input_mismatch() -> None:
    """What nothing explains is then no defect of either side; what was found inside, or is not finite, still is."""
    golden, config = load_golden("gate"), shipped().checkpoint.config
    told = other_model(golden, "f" * 64)
    assert told is not None
    assert f"weights {golden.provenance['model_sha256'][:12]}, these are ffffffffffff" in told
    assert other_model(golden, golden.provenance["model_sha256"]) is None
    far = [divergence(Cause.golden_side, 1e-9)]

    def weighed(found: list[Finding], diverged: list[Divergence]) -> Verdict:
        return conclude(found, diverged, invalid=None, bar_met=False, config=config, other_model=told)

    assert weighed([], far).run_class is RunClass.invalid
    assert weighed([], far).reason.startswith(told)
    assert weighed([REPLAYED], far).run_class is RunClass.defect
    assert weighed([], [*far, divergence(Cause.non_finite, 1e-9)]).run_class is RunClass.defect
    assert weighed([], [divergence(Cause.rounding, 0.5)]).run_class is RunClass.rounding


def test_what_cannot_be_judged_is_invalid_and_says_where_from() -> None:
    """INVALID outweighs findings, which then name where the value was made."""
    made = Finding(instrument="local_replay", reason="first made at layer 7 mla_core", site="mla_core", layer=7)
    v = concluded([made], invalid="non-finite logits, first at prompt 0, step 1", met=True)
    assert (v.run_class, v.site, v.layer) == (RunClass.invalid, "mla_core", 7)
    assert v.reason == "non-finite logits, first at prompt 0, step 1; first made at layer 7 mla_core"
    assert concluded([], invalid="fixture cannot discriminate").site is None


def test_every_reason_is_one_line() -> None:
    """Whatever the class, the reason fits one line of a table."""
    verdicts = [concluded([REPLAYED]), concluded([]), concluded([], met=True), concluded([], invalid="why"),
                concluded([], [divergence(c, 0.5) for c in Cause])]  # fmt: skip
    assert all(v.reason and "\n" not in v.reason for v in verdicts)
    assert {v.record()["class"] for v in verdicts} == {"DEFECT", "ROUNDING", "PASS", "INVALID"}


# --- what an error looks like ---


def told(name: str, severity: Severity, recipe: Recipe | None = None, rows: tuple[int, ...] = (2,)) -> str:
    found = findings(replay(planted(name, severity), recipe, over=battery(rows, 5)), recipe)
    return found[0].reason


@pytest.mark.parametrize(
    ("name", "severity", "hint"),
    [
        ("mla_scaled", HEAVY, "position 0 exact, later ones wrong: scale or position"),  # P13
        ("chunk_state_transposed", HEAVY, "first bad position 4: the edge of a 4-token chunk"),  # P01
        ("rounded_beta", MEDIUM, "values fit bf16 where f32 is declared: an undeclared rounding"),
        ("rounded_kda_state", LIGHT, "values fit f16 where f32 is declared: an undeclared rounding"),
        ("beta_scaled", MEDIUM, "errors look like a scale: x 1.01"),
        ("routed_scale_twice", HEAVY, "x 2.446 (the routed scaling factor once too often)"),  # P14
        ("routed_scale_left_out", HEAVY, "(the routed scaling factor left out)"),
    ],
)
def test_an_error_is_told_by_what_it_looks_like(name: str, severity: Severity, hint: str) -> None:
    """The signature of each fault stands in the reason of its finding."""
    assert hint in told(name, severity)


def test_a_state_that_a_piece_forgets_is_told_by_the_piece() -> None:
    """P02: prefilled in pieces of 8, the first bad position is 8."""
    recipe = engine().recipe.with_execution(prefill_piece=8)
    assert "first bad position 8, a multiple of the prefill piece 8" in told("state_reset", HEAVY, recipe)


def rows_told(make: Callable[[Recipe, Tap], Model], site: str, layer: int, rows: tuple[int, ...]) -> str | None:
    """What is said of the rows in excess, once the prompts have changed places."""
    over, recipe = battery(rows, 5), engine().recipe
    arm = Arm(make=lambda b, tap: model_stepper(make(recipe, tap), b), recipe=recipe, battery=over)
    held = local_replay(
        lambda tap: arm.make(over, tap), make_oracle(shipped(), recipe), recipe, over.prompts, over.continuations
    )
    first = next(f for f in findings(held) if (f.site, f.layer) == (site, layer))
    told = replace(first, rung="as run")
    return explain(told, Subject(casts=shipped(), arms={"as run": arm}, named={}))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("slot_state_leaks", "only row 0 (slot 0) is wrong"),  # P12
        ("slot_snapshot_of_neighbour", "row 0 is right, every later row is wrong"),  # P11
    ],
)
def test_rows_of_a_batch_tell_a_slot_from_an_index(name: str, hint: str) -> None:
    """Only slot 0 is wrong, or every row but the first, and it is so in the opposite order of prompts too."""
    p = planted(name, LIGHT)
    said = rows_told(lambda at, tap: faulty(p, at, tap), p.defect.site, p.layers[0], (0, 2, 4))
    assert said is not None
    assert hint in said


def test_a_fault_that_goes_with_its_prompt_is_not_told_of_a_row() -> None:
    """One prompt alone is wrong and it is row 0: with the prompts in another order it is not, and nothing is said."""
    first = battery((0,), 5).prompts[0][0]

    def wrong(at: Recipe, tap: Tap) -> Model:
        return faulty(None, at, chain([Spoiled(first), tap]))

    assert rows_told(wrong, "beta", 4, (0, 2, 4)) is None


class Spoiled:
    """Halves beta of layer 4 in the row that begins with a token; that row is known by its embedding."""

    def __init__(self, token: int) -> None:
        self.mark = shipped().checkpoint.tensors["model.embed_tokens.weight"][token].double()
        self.rows: Tensor | None = None

    def begin(self, step: Step) -> None:
        if step.phase == "prefill":
            self.rows = None

    def bind(self, site: str, layer: int, rule: Rule, rounding: RoundAt | None) -> RoundAt | None:
        def see(x: Tensor) -> Tensor:
            self.rows = (x[:, 0].double() == self.mark).all(-1) if self.rows is None else self.rows
            return x if rounding is None else rounding(x)

        def spoil(x: Tensor) -> Tensor:
            y = x if rounding is None else rounding(x)
            assert self.rows is not None
            return torch.where(self.rows.view(-1, *[1] * (y.ndim - 1)), y / 2, y)

        return see if site == "embed" else spoil if (site, layer) == ("beta", 4) else rounding


def test_a_battery_of_one_row_says_nothing_of_rows() -> None:
    """With one row that is wrong there is no other to be right."""
    assert not findings(replay(planted("beta_doubled", HEAVY), over=LONG))[0].rows


def error(**changes: object) -> OpError:
    given = {"worst": 9.0, "over": 1, "positions": 9, "rows": {1}, "seen": {0, 1, 2}, "fits": {"f32"}}
    return OpError(**{**given, **changes})  # pyright: ignore[reportArgumentType]


def hinted(site: str, phase: str, e: OpError, recipe: Recipe | None = None) -> list[str]:
    at = recipe or engine().recipe
    return hints((site, 4, phase), e, recipe=at, config=shipped().checkpoint.config)


def test_edges_are_told_of_values_that_meet_earlier_tokens_alone() -> None:
    """A first bad position on the grid means nothing at an elementwise site or in decode; the grid is the recipe's."""
    at8 = error(first=(1, 8))
    assert any("4-token chunk" in h for h in hinted("kda_core", "prefill", at8))
    assert not any("chunk" in h for h in hinted("beta", "prefill", at8))
    assert not any("chunk" in h for h in hinted("kda_core", "decode", at8))
    assert not any("chunk" in h for h in hinted("kda_core", "prefill", error(first=(1, 6))))
    named_none = engine("f32").recipe
    assert any("16-token chunk" in h for h in hinted("kda_core", "prefill", error(first=(1, 48)), named_none))


def test_one_wide_value_denies_an_undeclared_rounding() -> None:
    """It is only told where every bad step's values fit the narrower format, and none is NaN."""
    assert any("fit bf16" in h for h in hinted("beta", "prefill", error(fits={"bf16"})))
    assert not any("fit" in h for h in hinted("beta", "prefill", error(fits={"bf16", "f32"})))
    assert not any("fit" in h for h in hinted("beta", "prefill", error(fits={"bf16"}, non_finite=1)))


# --- what explains it ---


def subject(make: Callable[[Recipe, Tap], Model], recipe: Recipe) -> Subject:
    arm = Arm(make=lambda b, tap: model_stepper(make(recipe, tap), b), recipe=recipe, battery=SHORT)
    named = {n: engine(n).recipe for n in ("transformers_mirror", "bf16_engine", "bf16_island_outputs")}
    return Subject(casts=shipped(), arms={"as run": arm}, named=named)


def found_at(site: str, layer: int) -> Finding:
    """As local replay would report a place, with its worst position in the prompt."""
    return Finding(instrument="local_replay", reason="", site=site, layer=layer, rung="as run", worst_at=(0, 5))


def explained(name: str, severity: Severity) -> str | None:
    p = planted(name, severity)
    made = subject(lambda at, tap: faulty(p, at, tap), engine().recipe)
    return explain(found_at(p.defect.site, p.layers[0]), made)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("rounded_A_log", "explained by A_log rounded to bf16 when loaded"),
        ("rounded_dt_bias", "explained by dt_bias rounded to bf16 when loaded"),
        ("rounded_beta", "explained by beta rounded to bf16 where f32 is declared"),
        ("rounded_mla_core", "explained by mla_core rounded to bf16 where f32 is declared"),
    ],
)
def test_a_rounding_to_bf16_is_explained_by_what_was_rounded(name: str, why: str) -> None:
    """Of several changes at a place the one that takes the excess away is named."""
    found = explained(name, MEDIUM)
    assert found is not None
    assert found.startswith(why)


@pytest.mark.parametrize("name", ["rounded_A_log", "gate_rate_scaled", "norm_eps_latent"])
def test_what_no_known_change_makes_is_not_explained(name: str) -> None:
    """A_log rounded to f16, a rate off by 0.1 %, twice the config's eps: no hypothesis at their places fits."""
    assert explained(name, LIGHT) is None


def with_eps(eps: float | None, recipe: Recipe) -> Recipe:
    return replace(recipe, semantics=Semantics(kv_eps=eps))


@pytest.mark.parametrize(
    ("ran", "said", "why"),
    [
        (1e-6, None, "explained by eps 1e-06 where the config says 1e-05"),
        (None, 1e-6, "explained by eps 1e-05 where the variant declares 1e-06"),
    ],
)
def test_another_eps_is_named_with_both_values(ran: float | None, said: float | None, why: str) -> None:
    """An eps that is not the declared one is found and named, whichever of the two was declared."""
    ran_as, declared = with_eps(ran, engine().recipe), with_eps(said, engine().recipe)
    arm = subject(lambda _, tap: engine().build(recipe=ran_as, probe=tap), declared)
    assert explain(found_at("kv_a_norm", 3), arm) == why


def test_only_what_local_replay_found_is_explained() -> None:
    """A ladder's finding names no place; a place that is not in excess has nothing to explain."""
    made = subject(lambda at, tap: engine().build(recipe=at, probe=tap), engine().recipe)
    assert explain(CLIMBED, made) is None
    assert explain(found_at("decay_gate", 4), made) is None


def left_of(share: float, positions: int, *, others: int = 0) -> str | None:
    """What explains an error of which one change leaves a share, beside others that leave half."""
    before = OpError(worst=9.0, error2=1.0, positions=positions)
    exact = engine().recipe
    tried = [Hypothesis(text=f"h{n}", exact=exact, recipe=exact) for n in range(others + 1)]
    after = [OpError(worst=1.0, error2=share), *(OpError(worst=1.0, error2=0.5) for _ in range(others))]
    found = best(before, list(zip(tried, after, strict=True)))
    return found and found.text


def test_a_change_that_fits_by_chance_explains_nothing() -> None:
    """A tenth of the squared error may be left; over few positions, or of many changes, that is no evidence.

    The chance of it is that of the correlation of unrelated vectors.
    """
    assert left_of(0.09, 40) == "h0"
    assert left_of(0.11, 40) is None
    assert left_of(0.09, 5) is None
    assert (left_of(0.09, 7), left_of(0.09, 7, others=7)) == ("h0", None)
    random = np.random.default_rng(0).normal(size=(20_000, 2, 5))
    unit = random / np.linalg.norm(random, axis=-1, keepdims=True)
    left = 1 - (unit[:, 0] * unit[:, 1]).sum(-1) ** 2
    assert (left <= 0.2).mean() == pytest.approx(by_chance(0.2, 5), rel=0.1)


def test_hypotheses_are_those_that_would_change_something() -> None:
    """A parameter that is stored in bf16, or declared to be rounded, and rules that are the same, are not tried."""

    def texts(site: str, recipe: Recipe) -> list[str]:
        made = subject(lambda at, tap: engine().build(recipe=at, probe=tap), recipe)
        return [h.text for h in hypotheses((site, 4), made.arms["as run"], made)]

    plain = engine().recipe
    stored = ["decay_gate rounded to bf16 where f32 is declared", "decay_gate rounded to f16 where f32 is declared"]
    loaded = ["A_log rounded to bf16 when loaded", "dt_bias rounded to bf16 when loaded"]
    assert texts("decay_gate", plain) == [*loaded, *stored]
    rounded = replace(plain, semantics=Semantics(bf16_params=frozenset({"A_log"})))
    assert texts("decay_gate", rounded) == [loaded[1], *stored]
    assert texts("router_ids", plain) == ["e_score_correction_bias rounded to bf16 when loaded"]
    assert texts("beta", plain)[2:] == ["computing beta as transformers_mirror does (output bf16)"]


# --- the end of a sequence ---


def ended(golden_id: int, candidate_id: int) -> Agreement:
    d = GateDivergence(prompt=3, position=5, kind="ended", golden_id=golden_id, candidate_id=candidate_id)
    row = PromptAgreement(prompt=3, matched=5, total=6, prefix=5, divergence=d)
    return Agreement(per_prompt=(row,), bar=Bar.STRICT, bar_met=False, members=5, non_finite=(), loops=())


@pytest.mark.parametrize(("golden_id", "candidate_id", "who"), [(-1, 7, "golden"), (7, -1, "candidate")])
def test_one_side_that_does_not_end_is_no_rounding(golden_id: int, candidate_id: int, who: str) -> None:
    """After the same tokens one ends and the other goes on: INVALID, a rule that differs, though all else is explained.

    The score that follows from it is no defect; an error of the arithmetic is one all the same, and leads.
    """
    found = end_findings(ended(golden_id, candidate_id))
    scored = Finding(instrument="expected_score", reason="score 3/128")
    for whole in (found, [*found, scored]):
        v = concluded(whole, [divergence(Cause.rounding, 0.5)])
        assert v.run_class is RunClass.invalid
        assert v.reason.startswith(f"EOS rule: at p3[5] the {who} has ended")
        assert "input mismatch, not rounding" in v.reason
    assert concluded([scored]).run_class is RunClass.defect
    for other in (REPLAYED, ENVELOPED, OBSERVED):
        v = concluded([*found, other])
        assert (v.run_class, v.reason) == (RunClass.defect, f"{other.reason}: defect")
    assert concluded(found, [divergence(Cause.defect, 1e-9)]).run_class is RunClass.defect


def test_rows_that_end_alike_are_no_finding() -> None:
    """A token that differs is none of this instrument's business."""
    row = PromptAgreement(prompt=0, matched=1, total=1, prefix=1, divergence=None)
    same = Agreement(per_prompt=(row,), bar=Bar.STRICT, bar_met=True, members=1, non_finite=(), loops=())
    assert end_findings(same) == []


# --- from end to end ---


class Faulty(LocalEngine):
    """A local engine with a defect planted in every model that it builds."""

    def __init__(self, p: Planted) -> None:
        super().__init__(shipped(), CARRIER, name="faulty")
        self.sound, self.planted = engine(), p

    def build(self, *, recipe: Recipe | None = None, probe: Probe | None = None, patch: Patch | None = None) -> Model:
        assert patch is None
        return defects.build(self.sound, recipe or self.recipe, self.planted, probe=probe)


def judged(p: Planted) -> Verdict:
    golden, run = part_of(load_golden("gate"), prompts=1, tokens=2), Faulty(p)
    reference = engine("bf16_engine").recipe
    question = Question(golden=golden, engine=run, casts=shipped(), declared=run.recipe, reference=reference, members=3)
    return judge_run(question, run_gate(golden, run))[0]


def test_a_faulty_engine_is_a_defect_with_its_place_and_cause() -> None:
    """A_log rounded to bf16 in one layer: site, layer, cause in one line; the envelope's figures stand beside it."""
    v = judged(planted("rounded_A_log", MEDIUM))
    assert (v.run_class, v.site, v.layer, v.confidence) == (RunClass.defect, "decay_gate", 4, "high")
    assert "explained by A_log rounded to bf16 when loaded: defect" in v.reason
    assert any(f.instrument == "ladder" and f.layer == 4 for f in v.findings)
    assert v.figures["members"] == 3


def test_logits_that_are_not_finite_are_invalid_and_located() -> None:
    """P19, P21: no agreement is counted and no rounding called; the operation that made the NaN is named."""
    v = judged(planted("nan_in_attention", HEAVY))
    assert (v.run_class, v.site, v.layer) == (RunClass.invalid, "mla_core", 7)
    assert v.reason.startswith("non-finite logits, first at prompt 0, step 0; first made at layer 7 mla_core")


def test_the_inspected_sample_is_spread_over_the_battery() -> None:
    """At most about so many positions, the first and the last prompt among them, every one where there are few."""
    full = battery(tuple(range(8)), 16)
    assert len(sample(full, 1000).prompts) == 8
    some = sample(full, 48)
    assert [some.prompts[0], some.prompts[-1], len(some.prompts)] == [full.prompts[0], full.prompts[7], 3]
    assert np.array_equal(sample(full, 1).prompts[0], full.prompts[0])


def test_declared_is_of_a_library_alone() -> None:
    """A local variant declares itself: naming another for it is refused with what to do."""
    with pytest.raises(UsageError, match="declared=f32 has no effect with engine=local"):
        Settings(declared="f32")
    assert Settings(declared="f32", engine=EngineChoice(kind=EngineKind.transformers)).declared == "f32"


def test_recompute_and_pieces_are_inspected_as_they_run() -> None:
    """A recompute run's whole prefix at every step, and a prompt's pieces one by one: nothing correct is in excess."""
    for changes in ({"mode": Execution.recompute}, {"prefill_piece": 3}):
        recipe = engine().recipe.with_execution(**changes)
        assert not findings(replay(None, recipe, over=SHORT), recipe)


def test_where_every_operation_was_replayed_an_alarm_of_the_outputs_alone_is_told_and_is_no_defect():
    """An envelope's alarm makes a defect of low confidence where nothing looked inside, and a remark where all did."""
    alarm = Finding(instrument="envelope", reason="layer 3 output: error e^+0.40 of the envelope", layer=3)
    config = shipped().checkpoint.config
    blind = conclude([alarm], [], invalid=None, bar_met=False, config=config)
    seen = conclude([alarm], [], invalid=None, bar_met=False, config=config, inspected=True)
    assert (blind.run_class, blind.confidence) == (RunClass.defect, "low")
    assert seen.run_class is RunClass.rounding
    assert "layer 3 output" in seen.reason


def shown_only_late(monkeypatch: pytest.MonkeyPatch, position: int) -> None:
    """Attention of every run that is not in float64 loses part of its output from a position on."""
    whole = mla.CORES["dense_f32"]

    def late(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, **options: object) -> Tensor:
        out = whole(q, k, v, positions, **options)
        return out if q.dtype == torch.float64 else torch.where(positions[..., None, None] >= position, out * 0.9, out)

    monkeypatch.setitem(mla.CORES, "dense_f32", late)


def asked(prompt_rows: int, tokens: int) -> Verdict:
    golden, run = part_of(load_golden("wide"), prompts=prompt_rows, tokens=tokens), of(named_variant("f32"))
    question = Question(
        golden=golden, engine=run, casts=shipped(), declared=run.recipe, reference=run.recipe, members=3
    )
    return judge_run(question, run_gate(golden, run))[0]


def test_a_fault_that_shows_after_the_sample_is_replayed_where_the_outputs_give_it_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sample ends after sixteen tokens; a fault from the eighteenth on still has its site and layer."""
    shown_only_late(monkeypatch, len(load_golden("wide").prompts[0]) + 17)
    v = asked(1, 20)
    assert (v.run_class, v.site, v.layer, v.confidence) == (RunClass.defect, "mla_core", 3, "high")


def test_a_fault_that_candidate_and_replay_share_is_not_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the replay runs the faulty function too it finds nothing; the definition does, and so does the envelope."""
    right = kda.CORES["recurrent"]

    def faster(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *rest: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        return right(q, k, v, g * 1.02, *rest, **options)

    monkeypatch.setitem(kda.CORES, "recurrent", faster)
    v = asked(1, 3)
    assert (v.run_class, v.confidence) == (RunClass.defect, "high")
    assert [f.instrument for f in v.findings] == ["definition", "envelope"]
    assert v.site == "kda_core"


def test_members_of_faulty_shared_code_are_no_measure_of_a_score() -> None:
    """12/48 beside "a correct run: 12" would praise the fault: its members ran it too, and so did what gave causes."""
    gate = Mock(agreement=Mock(matched=12, total=48), golden=load_golden("gate"), notes=())
    expected = {"mean": 12.0, "low": 12.0, "high": 12.0, "members": 8}
    departs = Finding(instrument="definition", reason="layer 5 kda_core: departs", site="kda_core", layer=5)
    told = []
    for finding in (departs, REPLAYED):
        v = replace(concluded([finding], [divergence(Cause.rounding, 0.5)]), figures={"expected": expected})
        told.append(text(Settings(), v, gate, "took 1.0 s"))
    assert "score 12/48; what a correct run scores cannot be told" in told[0]
    assert "causes by the same faulty code:" in told[0]
    assert "score 12/48; a correct run of this recipe: 12.0, 95 % in 12..12 (members 8)" in told[1]
    assert "faulty code" not in told[1]


def test_too_few_members_are_refused_before_a_token_is_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("experiments.verdict.run_gate", lambda *_, **__: pytest.fail("a token was run"))
    assert main(["verdict", "variant=f32", "members=4", f"results={tmp_path}"]) == UsageError.exit_code
    assert "made with 8 members, got 4; ask for as many" in capsys.readouterr().err


def test_random_weights_are_judged_by_their_own_oracle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not by the shipped checkpoint's: what runs is sound, and the golden is another model's."""
    random = ["model.weights=random", "model.sha256=null", "limit=1", "max_tokens=2", "device.threads=1"]
    assert main(["verdict", "variant=f32", *random, f"results={tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("INVALID  f32: the golden was made of weights")
    assert "local_replay" not in said
