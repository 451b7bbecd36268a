"""The engine over our own forward: batches, EOS, scores and settings, against the functions it is made of."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import ODD, SMALL, build, casts, oracle, plain, prompt, ragged

from harness.config import DeviceChoice
from harness.engines.local import LocalEngine, shared_casts
from harness.engines.logits import log_softmax
from harness.engines.protocol import Engine
from variants import decode
from variants.axes import Execution, ExecutionAxes, Gemm, Param, ParamAxes, Stream, Variant
from variants.checkpoint_write import random_checkpoint, write_checkpoint
from variants.errors import InputError, UsageError
from variants.weights import Casts

F32 = plain(Stream.f32, Gemm.f32, batch_invariant=True)
PROMPTS = ragged([7, 1, 4, 12, 3])


def batched(variant: Variant, batch: int) -> Variant:
    return replace(variant, execution=ExecutionAxes(mode=Execution.incremental, batch=batch))


@pytest.fixture(scope="module")
def made() -> Casts:
    return casts()


def engine(made: Casts, variant: Variant = F32) -> LocalEngine:
    return LocalEngine(made, variant, name="test")


def alone(made: Casts, variant: Variant, tokens: Sequence[int], steps: int) -> list[int]:
    """Greedy tokens of one prompt by its own little loop over single-token steps."""
    model = build(variant, made)
    state, out = model.new_state(slots=1, max_len=len(tokens) + steps), []
    logits = decode.prefill(model, state, [0], [tokens])[0]
    for _ in range(steps):
        best = max(range(ODD.vocab_size), key=lambda i: (float(logits[i]), -i))
        out.append(best)
        logits = decode.decode_one_token(model, state, [0], torch.tensor([best]))[0]
    return out


def test_it_is_an_engine(made: Casts) -> None:
    """The protocol's calls are there, and what it says of itself is the checkpoint's and the variant's."""
    made_engine = engine(made)
    assert isinstance(made_engine, Engine)
    info = made_engine.info
    assert (info.name, info.device, info.dtype, info.full_logits) == ("local", "cpu", "f32", True)
    assert info.model_sha256 == made.checkpoint.sha256


@pytest.mark.parametrize("batch", [1, 2, 5, 8])
def test_tokens_are_those_of_each_prompt_alone(made: Casts, batch: int) -> None:
    """Whatever number of rows run together, the last batch filled or not, bit for bit when batch-invariant."""
    run = engine(made, batched(F32, batch)).generate(PROMPTS, 5)
    assert run.tokens.tolist() == [alone(made, F32, p, 5) for p in PROMPTS]
    assert run.tokens.dtype == np.int32
    assert run.finite.all()
    assert (run.batch, len(run.decode_s)) == (batch, -(-len(PROMPTS) // batch))
    assert all(len(seconds) == 4 for seconds in run.decode_s)
    assert run.prefill_tokens.tolist() == [7, 1, 4, 12, 3]


def test_gaps_are_the_lead_of_what_was_chosen(made: Casts) -> None:
    """Top-1 minus top-2 of the logits that chose each token, as teacher forcing along it gives them."""
    run = engine(made).generate(PROMPTS[:2], 4)
    scored = engine(made).score(PROMPTS[:2], run.tokens.tolist(), full_logits=True)
    assert scored.logits is not None
    ordered = np.sort(scored.logits, axis=-1)
    assert np.array_equal(run.gaps, ordered[..., -1] - ordered[..., -2])
    assert np.array_equal(scored.top_ids[..., 0], run.tokens)


def with_eos(made: Casts, eos: int | None) -> Casts:
    checkpoint = made.checkpoint
    return Casts(replace(checkpoint, config=replace(checkpoint.config, eos_token_id=eos)))


@pytest.mark.parametrize("batch", [1, 3])
def test_a_row_ends_after_the_end_token_it_emitted(made: Casts, batch: int) -> None:
    """The end token is kept, then -1 and no gap; rows that go on keep their bits; without the flag none ends."""
    free = engine(made).generate(PROMPTS[:3], 6)
    eos = int(free.tokens[1, 2])
    ending = engine(with_eos(made, eos), batched(F32, batch))
    run = ending.generate(PROMPTS[:3], 6, stop_at_eos=True)
    for row, whole in zip(run.tokens.tolist(), free.tokens.tolist(), strict=True):
        end = whole.index(eos) + 1 if eos in whole else 6
        assert row == whole[:end] + [-1] * (6 - end)
    assert np.array_equal(np.isnan(run.gaps), run.tokens == -1)
    assert run.finite.all()
    assert np.array_equal(ending.generate(PROMPTS[:3], 6).tokens, free.tokens)


def test_a_batch_ends_when_all_its_rows_have(made: Casts) -> None:
    """One prompt that ends at once leaves no decode steps behind it."""
    eos = int(engine(made).generate(PROMPTS[:1], 1).tokens[0, 0])
    run = engine(with_eos(made, eos)).generate(PROMPTS[:1], 6, stop_at_eos=True)
    assert run.tokens.tolist() == [[eos, -1, -1, -1, -1, -1]]
    assert [len(s) for s in run.decode_s] == [0]


def test_an_end_that_the_config_does_not_name_is_refused(made: Casts) -> None:
    """stop_at_eos needs an eos_token_id."""
    with pytest.raises(InputError, match="names no eos_token_id"):
        engine(with_eos(made, None)).generate(PROMPTS, 3, stop_at_eos=True)


def test_logits_that_are_not_finite_are_flagged_where_they_chose(made: Casts) -> None:
    """One prompt whose embedding is NaN: its row is not finite, the others are, and its score is NaN."""
    checkpoint = made.checkpoint
    name = "model.embed_tokens.weight"
    broken = checkpoint.tensors[name].clone()
    broken[PROMPTS[1][0]] = float("nan")
    others = [p for i, p in enumerate(PROMPTS[:3]) if i != 1 and PROMPTS[1][0] not in p]
    sick = Casts(replace(checkpoint, tensors={**checkpoint.tensors, name: broken}))
    rows = [others[0], PROMPTS[1]]
    run = engine(sick, batched(F32, 2)).generate(rows, 3)
    assert run.finite.tolist() == [[True] * 3, [False] * 3]
    assert np.isnan(engine(sick).score(rows, [[5], [5]]).token_logprobs).tolist() == [[False], [True]]


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_scores_are_those_of_each_row_alone(made: Casts, batch: int) -> None:
    """Rows of different lengths forced together: values, ids and what lies past a row's end."""
    prompts, forced = PROMPTS[:3], [prompt(4, seed=5), prompt(1, seed=6), prompt(3, seed=7)]
    scored = engine(made, batched(F32, batch)).score(prompts, forced, top_k=3, full_logits=True)
    assert scored.forced == "decode"
    assert scored.logits is not None
    model = build(F32, made)
    for i, (p, c) in enumerate(zip(prompts, forced, strict=True)):
        tokens = torch.tensor([c])
        runs = decode.steps(model, [p], len(c), lambda t, _, tokens=tokens: tokens[:, t])
        for t, run in enumerate(runs):
            row = run.logits[0].double().numpy()
            assert np.array_equal(scored.logits[i, t], row)
            assert scored.token_logprobs[i, t] == log_softmax(row)[c[t]]
            assert scored.top_ids[i, t].tolist() == np.argsort(-row, kind="stable")[:3].tolist()
        assert np.isnan(scored.token_logprobs[i, len(c) :]).all()
        assert (scored.top_ids[i, len(c) :] == -1).all()
    assert scored.finite.all()


def test_a_single_pass_is_named_and_agrees_in_float64(made: Casts) -> None:
    """The prefill's arithmetic at every position: the oracle's two ways agree to 1e-12, and their names differ."""
    wide = engine(made, oracle())
    forced = [prompt(4, seed=5), prompt(2, seed=6)]
    single, stepped = wide.score_single_pass(PROMPTS[:2], forced), wide.score(PROMPTS[:2], forced)
    assert (single.forced, stepped.forced) == ("single_pass", "decode")
    assert np.allclose(single.token_logprobs, stepped.token_logprobs, rtol=0, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda e: e.generate([], 3), InputError, "got no prompts"),
        (lambda e: e.generate([[5], []], 3), InputError, "prompt 1 is empty"),
        (lambda e: e.generate([[5, 67]], 3), InputError, r"prompt 0 holds an id outside 0\.\.66"),
        (lambda e: e.generate([[-1]], 3), InputError, r"prompt 0 holds an id outside 0\.\.66"),
        (lambda e: e.generate([[5]], 0), UsageError, "max_tokens: got 0"),
        (lambda e: e.score([[5]], [[6], [7]]), UsageError, "got 2 continuations for 1 prompts"),
        (lambda e: e.score([[5]], [[]]), InputError, "continuation 0 is empty"),
        (lambda e: e.score([[5]], [[99]]), InputError, "continuation 0 holds an id outside"),
        (lambda e: e.score([[5]], [[6]], top_k=68), UsageError, "top_k: got 68"),
        (lambda e: e.score_single_pass([], []), InputError, "got no prompts"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(made: Casts, call, error: type[Exception], said: str) -> None:
    """Empty and foreign input, no tokens, unpaired rows: each named before anything runs."""
    with pytest.raises(error, match=said) as refused:
        call(engine(made))
    assert "\n" not in str(refused.value)


def test_a_setting_without_effect_on_the_device_is_refused(made: Casts) -> None:
    """TF32 on a CPU."""
    with pytest.raises(UsageError, match="tf32=true has no effect on the cpu"):
        engine(made, replace(F32, tf32=True))


def test_engines_share_the_casts_of_a_checkpoint(made: Casts) -> None:
    """Two variants over one checkpoint make each cast once; a dropped cache is made again with the same bits."""
    shared = casts()
    a = engine(shared).generate(PROMPTS[:1], 3).tokens
    held = shared.nbytes
    assert held > 0
    engine(shared, plain(Stream.f32, Gemm.f32)).generate(PROMPTS[:1], 3)
    assert shared.nbytes == held
    shared.drop()
    assert shared.nbytes == 0
    assert np.array_equal(engine(shared).generate(PROMPTS[:1], 3).tokens, a)


def test_variants_over_one_checkpoint_do_not_see_each_others_parameters() -> None:
    """A float32 checkpoint whose weights one variant rounds: the other runs, before and after, as it does alone."""
    shared, rounding = casts(dtype=torch.float32), replace(F32, params=ParamAxes(weights=Param.bf16))

    def logits(variant: Variant, over: Casts) -> np.ndarray:
        scored = engine(over, variant).score(PROMPTS[:1], [[5, 6]], full_logits=True).logits
        assert scored is not None
        return scored

    before = logits(F32, shared)
    assert not np.array_equal(logits(rounding, shared), before)
    assert np.array_equal(logits(F32, shared), before)
    assert np.array_equal(logits(rounding, shared), logits(rounding, casts(dtype=torch.float32)))


def test_first_seen_steps_are_those_of_a_batch_that_had_not_run(made: Casts) -> None:
    """The first decode step of each number of rows is marked, once an engine."""
    twice = engine(made, batched(F32, 2))
    assert twice.generate(PROMPTS, 3).first_seen == ((0, 0), (2, 0))
    assert twice.generate(PROMPTS, 3).first_seen == ()


def test_threads_change_no_bit_of_a_batch_invariant_variant(made: Casts) -> None:
    """One thread and three, on rows long enough to be shared out."""
    rows = ragged([90, 70])
    one, three = (
        LocalEngine(made, batched(F32, 2), name="t", device=DeviceChoice(threads=n)).score(
            rows, [[5, 6], [7, 8]], full_logits=True
        )
        for n in (1, 3)
    )
    assert one.logits is not None
    assert np.array_equal(one.logits, three.logits)  # pyright: ignore[reportArgumentType]


def test_a_folder_is_loaded_once_a_process(tmp_path: Path) -> None:
    """The same folder gives the same casts; what was written and read back runs as what was drawn."""
    checkpoint = random_checkpoint(SMALL, seed=3)
    write_checkpoint(checkpoint, tmp_path)
    shared_casts.cache_clear()
    loaded = shared_casts(str(tmp_path), None, "cpu")
    assert shared_casts(str(tmp_path), None, "cpu") is loaded
    assert np.array_equal(
        engine(loaded).generate(PROMPTS, 4).tokens, engine(Casts(checkpoint)).generate(PROMPTS, 4).tokens
    )
    shared_casts.cache_clear()
