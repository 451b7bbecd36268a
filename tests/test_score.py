"""Scoring: what counts as agreement, what never does, and what is known about a first divergence."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.engines.protocol import Generation, Scored
from harness.gaps import gap_ulp, ulp
from harness.golden import Bar, Golden, Recorded, load_golden
from harness.score import Agreement, score
from harness.token_text import token_text
from variants import dtypes
from variants.errors import InputError, UsageError

TOKENIZER = Path(__file__).parents[1] / "assets" / "kimi-linear-12m" / "tokenizer.json"


def make(runs: object, **fields: object) -> Golden:
    tokens = np.asarray(runs, dtype=np.int32)
    prompts = tuple((1, 5 + n) for n in range(tokens.shape[1]))
    return Golden(**{"name": "tiny", "prompts": prompts, "tokens": tokens, **fields})  # type: ignore[arg-type]


def said(tokens: object, **fields: object) -> Generation:
    ids = np.asarray(tokens, dtype=np.int32)
    given = {
        "tokens": ids,
        "finite": np.ones(ids.shape, dtype=bool),
        "gaps": np.full(ids.shape, np.nan),
        "prefill_s": np.zeros(len(ids)),
        "prefill_tokens": np.zeros(len(ids), dtype=np.int64),
        "decode_s": (),
    }
    return Generation(**{**given, **fields})


def counts(agreement: Agreement) -> tuple[int, int, int, int]:
    return agreement.matched, agreement.total, agreement.exact_prompts, agreement.prompts


def test_agreement_after_a_divergence_counts_and_is_kept_apart_from_the_prefix() -> None:
    """A row that diverges at 6 and agrees again in four places scores 10 of 16 with a prefix of 6."""
    golden = np.arange(100, 116)
    candidate = golden.copy()
    candidate[[6, 7, 8, 10, 12, 14]] = 3
    row = score(make([[golden]]), said([candidate])).per_prompt[0]
    assert (row.matched, row.total, row.prefix, row.exact) == (10, 16, 6, False)
    assert row.divergence is not None
    assert (row.divergence.position, row.divergence.golden_id, row.divergence.candidate_id) == (6, 106, 3)


def test_a_golden_agrees_with_itself_in_every_place() -> None:
    """gate against its own run 0 is 128/128, 8 of 8, STRICT and met."""
    golden = load_golden("gate")
    agreement = score(golden, said(golden.tokens[0]))
    assert counts(agreement) == (128, 128, 8, 8)
    assert agreement.bar is Bar.STRICT
    assert agreement.bar_met is True
    assert agreement.first_divergence == ()
    assert agreement.record()["first_divergence"] == []


@pytest.mark.parametrize("place", [(0, 0), (3, 9), (7, 15)])
def test_one_wrong_token_is_seen_wherever_it_is(place: tuple[int, int]) -> None:
    """Any single changed id costs one place, one exact prompt and the STRICT bar."""
    golden = load_golden("gate")
    tokens = golden.tokens[0].copy()
    tokens[place] += 1
    agreement = score(golden, said(tokens))
    assert counts(agreement) == (127, 128, 7, 8)
    assert agreement.bar_met is False
    (divergence,) = agreement.first_divergence
    assert (divergence.prompt, divergence.position) == place


@pytest.mark.parametrize("name", ["all NaN", "one NaN", "infinity"])
def test_non_finite_logits_never_agree_even_where_ids_match(name: str) -> None:
    """An argmax over NaN gives a token like any other: it is named, not counted, and is no member of the K runs."""
    logits = np.zeros((1, 1, 8))
    logits[0, 0, {"all NaN": slice(None), "one NaN": 3, "infinity": 5}[name]] = np.inf if name == "infinity" else np.nan
    token = int(np.argmax(logits[0, 0]))
    runs = np.array([[[token, 9]], [[token, 9]]])
    good = score(make(runs), said([[token, 9]]))
    assert good.matched == 2
    finite = np.array([[bool(np.isfinite(logits).all()), True]])
    agreement = score(make(runs), said([[token, 9]], finite=finite))
    assert counts(agreement) == (1, 2, 0, 1)
    assert agreement.bar_met is False
    assert agreement.messages == ("prompt 0: non-finite logits at step 0",)
    assert agreement.first_divergence[0].kind == "non-finite"
    assert agreement.record()["non_finite"] == [{"prompt": 0, "step": 0}]


@pytest.mark.parametrize(
    ("golden", "candidate", "expected"),
    [
        ([4, 5, -1, -1], [4, 5, -1, -1], (2, 2, 1, 1)),  # both ended: nothing past it is counted
        ([4, 5, 6, 7], [4, 5, -1, -1], (2, 4, 0, 1)),  # the candidate stopped early
        ([4, 5, -1, -1], [4, 5, 6, 7], (2, 4, 0, 1)),  # the candidate went on
        ([4, 5, 6, -1], [4, 5, -1, -1], (2, 3, 0, 1)),
        ([4, -1, -1, -1], [-1, -1, -1, -1], (0, 1, 0, 1)),
    ],
)
def test_the_end_of_a_row(golden: list[int], candidate: list[int], expected: tuple[int, int, int, int]) -> None:
    """One side ending is disagreement, both ending is not counted."""
    agreement = score(make([[golden], [golden]]), said([candidate]))
    assert counts(agreement) == expected
    assert agreement.bar_met is (golden == candidate)
    for divergence in agreement.first_divergence:
        assert divergence.kind == "ended"
        assert -1 in (divergence.golden_id, divergence.candidate_id)


def test_padding_past_an_end_is_not_read_as_non_finite() -> None:
    """`finite` says nothing where a row has no logits."""
    finite = np.array([[True, False]])
    agreement = score(make([[[4, -1]]]), said([[4, -1]], finite=finite))
    assert counts(agreement) == (1, 1, 1, 1)
    assert agreement.non_finite == ()


def test_a_prompt_without_a_counted_place_is_not_exact() -> None:
    """A row that is empty on both sides agrees in nothing."""
    agreement = score(make([[[4, 5], [-1, -1]]]), said([[4, 5], [-1, -1]]))
    assert counts(agreement) == (2, 2, 1, 2)


@pytest.mark.parametrize(
    ("candidate", "met", "members"),
    [
        ([1, 2, 3, 4], True, 4),  # run 0
        ([1, 7, 8, 4], True, 4),  # run 1
        ([1, 7, 3, 4], False, 2),  # each token stands in some run, but no run has this prefix
        ([1, 2, 3, 5], False, 3),
        ([9, 2, 3, 4], False, 0),
    ],
)
def test_distributional_bar_asks_for_a_run_with_the_same_prefix(candidate: list[int], met: bool, members: int) -> None:
    """A row meets the bar when it is one of the K runs; a mixture of runs does not."""
    golden = make([[[1, 2, 3, 4]], [[1, 7, 8, 4]]])
    agreement = score(golden, said([candidate]))
    assert agreement.bar is Bar.DISTRIBUTIONAL
    assert agreement.bar_met is met
    assert agreement.members == members
    assert agreement.matched == sum(a == b for a, b in zip(candidate, [1, 2, 3, 4], strict=True))


def test_one_run_measures_no_bar() -> None:
    """With K = 1 full agreement neither meets nor misses the bar."""
    assert score(make([[[1, 2]]]), said([[1, 2]])).bar_met is None
    assert score(make([[[1, 2]]]), said([[1, 3]])).bar_met is None


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        (said([[1, 2], [3, 4]]), r"1 prompts of 2 tokens.*tokens have shape \[2, 2\]"),
        (said([[1, 2, 3]]), r"tokens have shape \[1, 3\]"),
        (said(np.zeros((0, 2))), r"tokens have shape \[0, 2\]"),
        (said([[1, 2]], finite=np.ones((1, 1), bool)), "finite have shape"),
        (said([[1, 2]], gaps=np.zeros(2)), "gaps have shape"),
        (said([[-1, 2]]), "after its end"),
        (said([[1, -5]]), "expected -1"),
    ],
)
def test_what_cannot_be_laid_over_the_golden_is_refused(generation: Generation, message: str) -> None:
    """Other shapes are an input error, never a score of nothing."""
    with pytest.raises(InputError, match=message):
        score(make([[[1, 2]]]), generation)


def test_margin_and_gaps_of_a_divergence() -> None:
    """Both gaps in nats, the golden's margin over the candidate's token, and what is unknown as None."""
    ids = np.array([[[4, 5, 6]] * 3], dtype=np.int32)
    values = np.array([[[-0.5, -1.5, -4.0]] * 3], dtype=np.float32)
    golden = make([[[4, 4, 4]]], top_ids=ids, top_logprobs=values)
    inside = score(golden, said([[4, 6, 4]], gaps=np.array([[0.1, 0.2, 0.3]]))).first_divergence[0]
    assert (inside.golden_gap_nats, inside.golden_margin_nats) == (1.0, 3.5)
    assert inside.candidate_gap_nats == 0.2
    assert inside.golden_margin_at_least_nats is None
    assert inside.golden_gap_ulp is None
    assert inside.candidate_gap_ulp is None
    outside = score(golden, said([[4, 9, 4]])).first_divergence[0]
    assert outside.golden_margin_nats is None
    assert outside.golden_margin_at_least_nats == 3.5
    assert outside.candidate_gap_nats is None


def test_an_exact_tie_is_zero_ulp_without_the_logits() -> None:
    """Equal logprobs are equal logits: 0 ULP is known although the magnitude is not."""
    ids = np.array([[[4, 5]]], dtype=np.int32)
    golden = make([[[4]]], top_ids=ids, top_logprobs=np.array([[[-0.7, -0.7]]], dtype=np.float32))
    tie = score(golden, said([[5]])).first_divergence[0]
    assert (tie.golden_gap_nats, tie.golden_gap_ulp, tie.golden_margin_nats) == (0.0, 0.0, 0.0)


def test_candidate_gap_in_ulp_from_its_logits() -> None:
    """Full logits and their dtype give the candidate's gap in last places; without the dtype they are refused."""
    logits = np.array([[[0.0, 12.0, 11.9375]]])
    scored = Scored(
        token_logprobs=np.zeros((1, 1)),
        top_ids=np.zeros((1, 1, 1), np.int32),
        top_logprobs=np.zeros((1, 1, 1)),
        finite=np.ones((1, 1), bool),
        forced="decode",
        logits=logits,
    )
    golden, generation = make([[[2]]]), said([[1]])
    found = score(golden, generation, scored=scored, logits_dtype="bfloat16").first_divergence[0]
    assert found.candidate_gap_ulp == 1.0
    with pytest.raises(UsageError, match="logits_dtype"):
        score(golden, generation, scored=scored)
    broken = replace(scored, logits=np.array([[[0.0, np.nan, 1.0]]]))
    found = score(golden, generation, scored=broken, logits_dtype="bfloat16").first_divergence[0]
    assert found.candidate_gap_ulp is None


def test_recorded_gap_speaks_for_the_recorded_candidate_alone() -> None:
    """A recorded gap is the margin where the candidate has the recorded tokens up to there, else unknown."""
    recorded = Recorded(
        tokens=np.array([[1, 8, 3]], np.int32),
        gap_nats=np.array([[0.0, 0.25, np.inf]]),
        outside=np.array([[False, False, True]]),
    )
    golden = make([[[1, 2, 3]]], recorded=recorded)
    assert score(golden, said([[1, 8, 3]])).first_divergence[0].golden_margin_nats == 0.25
    assert score(golden, said([[1, 9, 3]])).first_divergence[0].golden_margin_nats is None


def test_loops_come_with_the_score() -> None:
    """A candidate that repeats itself is told so, with the golden's state beside it."""
    agreement = score(make([[list(range(12))]]), said([[0, 1, *([7] * 10)]]))
    assert agreement.loops[0].candidate.start == 2
    assert agreement.messages == ("prompt 0: repeats every 1 tokens from 2; the golden does not loop",)


def test_the_record_is_strict_json() -> None:
    """Unknown figures are null, so that a strict reader takes the record."""
    record = score(load_golden("gate"), said(load_golden("gate").tokens[0] + 1)).record()
    again = json.loads(json.dumps(record, allow_nan=False))
    assert (again["matched"], again["total"], again["exact_prompts"], again["prompts"]) == (0, 128, 0, 8)
    assert len(again["first_divergence"]) == 8
    assert again["first_divergence"][0]["candidate_gap_nats"] is None


def test_divergence_is_shown_as_text() -> None:
    """Ids are decoded where a tokenizer is at hand; an end has no text."""
    pytest.importorskip("tokenizers")
    text = token_text(TOKENIZER)
    assert text is not None
    assert text(-1) is None
    assert text(10**6) is None
    assert text(1) == "<|bos|>"
    golden = load_golden("gate")
    tokens = golden.tokens[0].copy()
    tokens[0, 3] = 2
    divergence = score(golden, said(tokens), text=text).first_divergence[0]
    assert divergence.candidate_text == "<|eos|>"
    assert divergence.golden_text == text(int(golden.tokens[0, 0, 3]))
    assert divergence.golden_text


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    """A missing or foreign tokenizer.json is one clear error."""
    pytest.importorskip("tokenizers")
    with pytest.raises(InputError, match="cannot read tokenizer"):
        token_text(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="not a tokenizer"):
        token_text(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (8.5, "bfloat16", 2.0**-4),
        (1.0, "bfloat16", 2.0**-7),
        (0.99, "bfloat16", 2.0**-8),
        (-16.0, "bfloat16", 2.0**-3),
        (65504.0, "float16", 32.0),
        (0.0, "float16", 2.0**-24),
        (0.0, "float32", 2.0**-149),
        (1e-320, "float64", 5e-324),
    ],
)
def test_ulp_values(value: float, dtype: str, expected: float) -> None:
    """The distance to the next larger magnitude, also at powers of two and below the normal range."""
    assert ulp(value, dtype) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_ulp_equals_the_step_that_the_format_takes(dtype: str) -> None:
    """The scalar definition equals torch's own next value and the vectorised twin, at 200 magnitudes."""
    rng = np.random.default_rng(1)
    x = torch.tensor(np.exp(rng.uniform(-9, 9, 200)), dtype=torch.float64).to(getattr(torch, dtype))
    step = torch.nextafter(x, torch.full_like(x, math.inf)).double() - x.double()
    ours = [ulp(v, dtype) for v in x.double().tolist()]
    assert ours == step.tolist()
    assert ours == [float(dtypes.ulp(v, dtypes.DType(dtype))) for v in x.double()]


def test_ulp_of_what_the_format_cannot_hold() -> None:
    """A value past the largest has no last place, and an unknown format is refused."""
    assert math.isnan(ulp(70000.0, "float16"))
    assert math.isnan(ulp(math.nan, "float32"))
    assert math.isnan(ulp(math.inf, "bfloat16"))
    with pytest.raises(UsageError, match="fp8"):
        ulp(1.0, "fp8")


def test_a_tie_flip_of_0_0355_is_no_tie() -> None:
    """A gap of 0.0355 at logits near 12 is some 37,000 float32 ULPs and 0.6 of a bf16 ULP: magnitude is reported."""
    assert gap_ulp(12.0, 12.0 - 0.0355, "float32") == pytest.approx(37_224, abs=1.0)
    assert gap_ulp(12.0, 12.0 - 0.0355, "bfloat16") == pytest.approx(0.568)
    below = float(np.nextafter(np.float32(30), np.float32(31)))
    assert gap_ulp(below, 30.0, "float32") == 1.0
