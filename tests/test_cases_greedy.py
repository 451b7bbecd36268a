"""Cases from practice about greedy divergence (P21 to P26): rounding, tie, defect, and what cannot be told apart."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from instruments import battery, engine, findings, of, planted, replay, shipped
from torch import Tensor

from harness.compose import named_variant
from harness.divergence import Cause, Side, cause_of
from harness.engines.local import LocalEngine
from harness.gaps import cannot_discriminate, fixture_discrimination, gap_ulp
from harness.gate import part_of, run_gate
from harness.golden import Golden, load_golden
from harness.lockstep import walk
from harness.pregate import pregate
from harness.probes import Place, Tap
from harness.score import score
from harness.verdict import Finding, RunClass, conclude
from variants.axes import NormVariance, Variant
from variants.decode import gaps, greedy
from variants.defects_kinds import Severity
from variants.dtypes import DType, round_to, ulp
from variants.errors import InputError
from variants.ops import kda
from variants.recipe import difference

ALPHA, MEMBERS = 1e-3, 8
PROMPTS, TOKENS = 4, 4


def golden(name: str = "gate") -> Golden:
    return part_of(load_golden(name), prompts=PROMPTS, tokens=TOKENS)


def batched(name: str, batch: int) -> LocalEngine:
    variant = named_variant(name)
    return LocalEngine(shipped(), replace(variant, execution=replace(variant.execution, batch=batch)), name=name)


# --- P21: batched greedy differs from one at a time ---


def test_p21_in_f32_the_batch_changes_no_token() -> None:
    """float32 rows decode the same tokens alone and together: what remains between them is the order of sums."""
    alone, together = (batched("f32", b).generate(golden().prompts, TOKENS) for b in (1, PROMPTS))
    assert np.array_equal(alone.tokens, together.tokens)


def test_p21_in_bf16_what_the_batch_changes_is_rounding() -> None:
    """The shape may move bf16 logits, by no more than a few ULP at the top, and no operation of either is in excess."""
    logits = []
    for batch in (1, PROMPTS):
        run = batched("bf16_engine", batch)
        forced = [[int(t) for t in row] for row in golden().tokens[0]]
        scored = run.score(golden().prompts, forced, full_logits=True)
        assert scored.logits is not None
        logits.append(scored.logits)
        assert not findings(replay(None, run.recipe, over=battery((0, 2) if batch > 1 else (2,), 3)), run.recipe)
    alone, together = (torch.from_numpy(x).double() for x in logits)
    moved = (alone - together).abs().amax(-1) / ulp(alone.abs().amax(-1), DType.bf16)
    assert moved.median() <= 4


def test_p21_a_row_that_attends_to_nothing_stays_a_defect_beside_rounding() -> None:
    """The same batch with a NaN in one attention: found where it is made, while the sound run beside it has nothing."""
    bad = findings(replay(planted("nan_in_attention", Severity.light)))
    assert [(f.site, f.layer) for f in bad] == [("mla_core", 7)]
    assert "not finite" in bad[0].reason
    assert not findings(replay(None))


# --- P22: the residual sum rounded before the variance, or not ---


def with_variance(variance: NormVariance) -> Variant:
    stream = named_variant("bf16_stream")
    return replace(stream, norm=replace(stream.norm, variance=variance))


def stepped(a: Variant, b: Variant) -> tuple[list[Place], float]:
    """The places that differ in the first step, in order, and the largest difference at the first one, in bf16 ULP."""
    taps = Tap(), Tap()
    models = [of(v).build(probe=tap) for v, tap in zip((a, b), taps, strict=True)]
    part = battery((2,), 1)
    next(iter(walk(models, part.prompts, part.continuations)))
    x, y = (tap.values for tap in taps)
    places = [p for p in x if not torch.equal(x[p], y[p])]
    if not places:
        return [], 0.0
    first = places[0]
    unit = ulp(torch.maximum(x[first].double().abs(), y[first].double().abs()), DType.bf16)
    return places, float(((x[first].double() - y[first].double()).abs() / unit).max())


@pytest.mark.parametrize("variance", list(NormVariance))
def test_p22_each_order_reproduces_itself_and_is_sound(variance: NormVariance) -> None:
    """None of the three orders is wrong: each gives its own bits again, and none has an operation in excess."""
    assert stepped(with_variance(variance), with_variance(variance)) == ([], 0.0)
    recipe = of(with_variance(variance)).recipe
    assert not findings(replay(None, recipe, over=battery((2,), 2)), recipe)


@pytest.mark.parametrize("other", [NormVariance.pre_store, NormVariance.mixed])
def test_p22_the_difference_begins_at_a_norm_and_is_an_ulp(other: NormVariance) -> None:
    """The first value that differs is the norm after the first rounded sum, by at most two ULP an element."""
    places, ulps = stepped(with_variance(NormVariance.stored), with_variance(other))
    assert places[0] == ("post_attn_norm", 0)
    assert 0 < ulps <= 2


def test_p22_the_report_names_the_order_and_calls_neither_wrong() -> None:
    """Two recipes differ in the algorithm of the norms alone, by name."""
    a, b = (of(with_variance(v)).recipe for v in (NormVariance.stored, NormVariance.pre_store))
    rows = difference(a, b)
    assert {row["site"] for row in rows} == {"input_norm", "post_attn_norm", "final_norm"}
    named = ("algorithm", "rms_norm_stored", "rms_norm_pre_store")
    assert {(row["field"], row["a"], row["b"]) for row in rows} == {named}


# --- P23: ties ---


def test_p23_the_first_maximum_wins_twenty_times_of_twenty() -> None:
    """Of equal logits the lowest id is chosen, always."""
    assert [int(greedy(torch.tensor([[0.0, 1.0, 1.0]]))) for _ in range(20)] == [1] * 20


def test_p23_a_gap_that_bf16_rounds_away_is_a_tie() -> None:
    """f32 has a gap of 2e-6 and another argmax; after rounding the gap is exactly 0: a tie, never a defect."""
    exact = torch.tensor([[-5.0, 30.0, np.nextafter(np.float32(30), np.float32(31))]])
    rounded = round_to(exact, DType.bf16)
    assert (int(greedy(exact)), int(greedy(rounded))) == (2, 1)
    assert float(gaps(exact)) == pytest.approx(1.9e-6, rel=0.01)
    assert float(gaps(rounded)) == 0.0
    noise = 0.29 * float(ulp(torch.tensor(30.0), DType.bf16))
    golden_side, candidate = Side(margin=float(gaps(exact)), sigma=1e-6), Side(margin=0.0, sigma=noise)
    cause, p = cause_of(candidate, golden_side, float(gaps(exact)), members=MEMBERS, alpha=ALPHA)
    assert (cause, p) == (Cause.tie, pytest.approx(1.0, abs=1e-3))


# --- P24: is a "tie-flip" really a tie? ---


@pytest.mark.parametrize(("gap", "cause", "sigmas"), [(0.036, Cause.rounding, "1.0"), (0.36, Cause.defect, "10.3")])
def test_p24_a_gap_is_judged_by_the_measured_noise(gap: float, cause: Cause, sigmas: str) -> None:
    """At a noise of 0.035 a gap of 0.036 is rounding at 1 sigma and one of 0.36 a defect at 10; neither is a tie."""
    noise = 0.035
    candidate, golden_side = Side(margin=0.0, sigma=noise, least=True), Side(margin=gap, sigma=noise)
    found, _ = cause_of(candidate, golden_side, gap, members=MEMBERS, alpha=ALPHA)
    assert found is cause
    assert f"{candidate.z(gap):.1f}" == sigmas
    # In float32 it is thousands of units in the last place of a logit near 9: no tie of floating point.
    assert gap_ulp(9.0 + gap, 9.0, "float32") > 30_000


# --- P25: full forward against prefill and decode ---


def delta_inputs(tokens: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(tokens)
    shape = (1, tokens, 2, 16)
    q, k, v = (torch.randn(shape, generator=random, dtype=torch.float64) for _ in range(3))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    g = -0.5 * torch.rand(shape, generator=random, dtype=torch.float64)
    beta = torch.rand(shape[:3], generator=random, dtype=torch.float64)
    state = torch.zeros(1, 2, 16, 16, dtype=torch.float64)
    return tuple(x.to(dtype) for x in (q * 0.25, k, v, g, beta, state))


def both_forms(tokens: int, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Output and state of the chunked and of the recurrent form."""
    inputs = delta_inputs(tokens, dtype)
    return kda.CORES["chunk"](*inputs, chunk_size=64), kda.CORES["recurrent"](*inputs)


def apart(tokens: int, dtype: torch.dtype) -> float:
    """Largest difference of outputs and states of the two forms."""
    pairs = zip(*both_forms(tokens, dtype), strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("tokens", [5, 63, 64, 65])
def test_p25_both_forms_differ_by_rounding_alone(tokens: int) -> None:
    """Chunked against recurrent falls with the unit roundoff, and stored in bf16 they are an ULP apart at most."""
    assert apart(tokens, torch.float64) < 4e-15
    assert apart(tokens, torch.float32) < 2e-6
    (chunked, _), (recurrent, _) = both_forms(tokens, torch.float32)
    a, b = (round_to(x, DType.bf16).double() for x in (chunked, recurrent))
    typical = ulp(torch.maximum(a.abs(), b.abs()).clamp_min(float(b.square().mean().sqrt())), DType.bf16)
    assert float(((a - b).abs() / typical).max()) <= 1


@pytest.mark.parametrize("pads", [1, 59])
def test_p25_zero_pads_do_not_touch_the_state(pads: int) -> None:
    """A pad whose k, v, beta and gate are zero leaves the recurrent state bit for bit, the chunked one within 2e-16."""
    q, k, v, g, beta, state = delta_inputs(5, torch.float64)
    padded = [torch.cat([x, x.new_zeros(1, pads, *x.shape[2:])], 1) for x in (q, k, v, g, beta)]
    assert torch.equal(kda.CORES["recurrent"](*padded, state)[1], kda.CORES["recurrent"](q, k, v, g, beta, state)[1])
    plain, longer = (kda.CORES["chunk"](*x, state, chunk_size=64)[1] for x in ((q, k, v, g, beta), padded))
    assert float((plain - longer).abs().max()) < 2e-16


# --- P26: an untrained model as the fixture ---


def random_fixture(deviation: float) -> Golden:
    """A golden of independent normal logits over 32000 ids, as an untrained model gives."""
    random = np.random.default_rng(3)
    logits = deviation * random.standard_normal((8, 16, 32_000))
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ids = np.argsort(-logits, -1)[..., :2].astype(np.int32)
    top = np.take_along_axis(logprobs, ids, -1)
    tokens = ids[..., 0][None]
    return Golden(name="random", prompts=tuple((1, n) for n in range(8)), tokens=tokens, top_ids=ids, top_logprobs=top)


@pytest.mark.parametrize(("deviation", "share"), [(0.5, 0.65), (1.0, 0.40), (3.0, 0.13)])
def test_p26_the_share_of_gaps_under_the_noise_is_told_before_any_verdict(deviation: float, share: float) -> None:
    """65, 40 and 13 % of an untrained model's gaps lie under an eighth; above a quarter the fixture says nothing."""
    fixture = random_fixture(deviation)
    found = fixture_discrimination(fixture, 0.125)
    assert found == pytest.approx(share, abs=0.10)
    why = cannot_discriminate(fixture, 0.125)
    assert (why is not None) == (share > 0.25)
    if why is not None:
        verdict = conclude([], [], invalid=why, bar_met=True, config=shipped().checkpoint.config)
        assert verdict.run_class is RunClass.invalid
        assert "cannot discriminate" in verdict.reason


def test_p26_a_trained_fixture_can_tell() -> None:
    """The shipped battery's gaps are wide enough for the noise of bf16, and for an operation in excess anyway."""
    assert cannot_discriminate(load_golden("gate"), 0.07) is None
    finding = Finding(instrument="local_replay", reason="layer 3 beta: 9x its bound", site="beta", layer=3)
    assert conclude([finding], [], invalid=None, bar_met=True, config=shipped().checkpoint.config).layer == 3


# --- classes beside the cases ---


def test_another_question_is_an_input_mismatch_and_no_verdict() -> None:
    """A prompt that lost its first id is refused before any token is judged."""
    asked = [list(p) for p in golden().prompts]
    asked[1] = asked[1][1:]
    with pytest.raises(InputError, match="input mismatch at prompt 1: candidate lacks BOS"):
        pregate(golden(), engine("f32").info, prompts=asked)


def test_a_token_of_logits_that_are_not_finite_agrees_with_nothing() -> None:
    """P19: where the logits held a NaN even the golden's own token does not count, and the run is INVALID."""
    result = run_gate(golden(), engine("f32"))
    generation = replace(result.generation, tokens=golden().tokens[0], finite=np.ones((PROMPTS, TOKENS), bool))
    assert score(golden(), generation).matched == PROMPTS * TOKENS
    finite = generation.finite.copy()
    finite[2, 1] = False
    broken = score(golden(), replace(generation, finite=finite))
    assert broken.matched < PROMPTS * TOKENS
    assert broken.non_finite == ((2, 1),)
    verdict = replace(result, agreement=broken).verdict
    assert verdict == {"class": "INVALID", "reason": "non-finite logits, first at prompt 2, step 1"}
