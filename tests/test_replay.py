"""Replay: recorded tokens answer as an engine does, and never with more than was recorded."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.engines.protocol import Engine
from harness.engines.replay import ReplayEngine
from harness.gate import run_gate
from harness.golden import Golden, import_folder, load_golden, write_golden
from harness.pregate import pregate
from harness.sampling import plain_greedy_settings
from harness.score import score
from variants.errors import EngineError, InputError

SAMPLES = Path(__file__).parents[1].parent / "shared" / "samples"
GATE = Path(__file__).parents[1] / "assets" / "goldens" / "vllm-0.26.0-h200" / "gate.json"


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="the recorded samples are not on this machine")
@pytest.mark.parametrize(
    ("name", "matched", "exact", "first"),
    [
        ("deepseek_v2_greedy", (92, 128), 5, {2: (1, None), 3: (9, 0.25), 5: (1, None)}),
        ("olmo2_greedy_1b", (241, 256), 13, {1: (7, 0.031), 6: (12, None), 10: (8, None)}),
    ],
)
def test_recorded_samples_score_their_known_figures(
    name: str, matched: tuple[int, int], exact: int, first: dict[int, tuple[int, float | None]]
) -> None:
    """Two real engines' candidates score 92/128 and 241/256 with their known divergences; a gap of 0 is no margin."""
    golden, engine = import_folder(SAMPLES / name), ReplayEngine(SAMPLES / name)
    assert pregate(golden, engine.info, prompts=engine.prompts).notes == ()
    eos_stops = golden.sampling["eos"] == "stop"
    agreement = score(golden, engine.generate(golden.prompts, golden.tokens.shape[2], stop_at_eos=eos_stops))
    assert (agreement.matched, agreement.total) == matched
    assert agreement.exact_prompts == exact
    assert {d.prompt: (d.position, d.golden_margin_nats) for d in agreement.first_divergence} == first
    assert agreement.bar_met is False


def test_a_golden_replayed_against_itself_agrees_and_obeys_the_protocol() -> None:
    """gate replayed as a candidate is 128/128 with its own gaps, and passes for an Engine."""
    engine, golden = ReplayEngine(GATE), load_golden("gate")
    assert isinstance(engine, Engine)
    assert engine.info.can_score
    assert engine.info.model_sha256 == golden.provenance["model_sha256"]
    assert engine.info.device == "recorded on NVIDIA H200"
    generation = engine.generate(golden.prompts, 16)
    assert score(golden, generation).matched == 128
    assert golden.top_logprobs is not None
    top = golden.top_logprobs.astype(np.float64)
    np.testing.assert_array_equal(generation.gaps, top[..., 0] - top[..., 1])
    assert np.isnan(generation.prefill_s).all()
    assert generation.decode_s == ()


def test_a_path_that_is_not_there_is_told_as_the_engines_folder(tmp_path: Path) -> None:
    """A path is no name of a golden: nothing is said of goldens where the folder or file of tokens is missing."""
    for path in (tmp_path / "absent", tmp_path / "absent.npy", Path("absent.npy")):
        with pytest.raises(InputError, match=f"^engine.folder={path}: no such file or folder"):
            ReplayEngine(path)
    with pytest.raises(InputError, match="no golden 'gaet'"):
        ReplayEngine("gaet")


def test_what_was_recorded_on_a_gpu_is_replayed_without_one(tmp_path: Path) -> None:
    """The device of the record is no device of this run: memory is that of this process."""
    golden = replace(load_golden("gate"), provenance={"engine": "vllm", "device": "cuda"})
    result = run_gate(load_golden("gate"), ReplayEngine(write_golden(golden, tmp_path / "made").path or ""))
    assert (result.agreement.matched, result.memory.since) == (128, "run")


def test_prompts_are_found_by_their_ids() -> None:
    """Any subset in any order, cut at max_tokens, answers with its own rows."""
    engine, golden = ReplayEngine(GATE), load_golden("gate")
    some = [golden.prompts[5], golden.prompts[2]]
    np.testing.assert_array_equal(engine.generate(some, 7).tokens, golden.tokens[0][[5, 2], :7])


def test_an_unrecorded_prompt_is_an_input_mismatch() -> None:
    """A prompt that was not recorded is refused, naming a BOS that went missing."""
    engine, golden = ReplayEngine(GATE), load_golden("gate")
    with pytest.raises(InputError, match=r"prompt 0 is not among the 8 recorded \(candidate lacks BOS"):
        engine.generate([(1, *golden.prompts[0])], 4)


def test_a_prompt_that_stands_twice_answers_from_its_own_row(tmp_path: Path) -> None:
    """A battery may hold one prompt twice; asked in the recorded order, each row answers for itself."""
    golden = Golden(
        name="twice",
        prompts=((1, 2), (1, 2)),
        tokens=np.array([[[3, 4], [3, 5]]]),
        sampling=plain_greedy_settings(),
    )
    engine = ReplayEngine(write_golden(golden, tmp_path / "twice").path or "")
    assert engine.generate(golden.prompts, 2).tokens.tolist() == [[3, 4], [3, 5]]
    assert engine.generate([golden.prompts[0]], 2).tokens.tolist() == [[3, 4]]


@pytest.mark.parametrize("asked", [0, 17])
def test_more_than_was_recorded_is_an_input_error(asked: int) -> None:
    """Sixteen recorded tokens do not answer for seventeen, nor for none."""
    engine = ReplayEngine(GATE)
    with pytest.raises(InputError, match="holds 16 tokens a prompt, the golden"):
        engine.generate(load_golden(GATE).prompts, asked)


def test_the_recorded_eos_rule_cannot_be_changed(tmp_path: Path) -> None:
    """Tokens recorded past EOS cannot stop there, and rows that ended cannot go on."""
    engine = ReplayEngine(GATE)
    with pytest.raises(InputError, match="recorded past EOS"):
        engine.generate(load_golden(GATE).prompts, 4, stop_at_eos=True)
    golden = Golden(
        name="ends",
        prompts=((1, 2),),
        tokens=np.array([[[3, -1]]]),
        sampling=plain_greedy_settings(eos="stop"),
    )
    ended = ReplayEngine(write_golden(golden, tmp_path / "ends").path or "")
    assert ended.generate(golden.prompts, 2, stop_at_eos=True).tokens.tolist() == [[3, -1]]
    with pytest.raises(InputError, match="prompt 0: its recorded row ends after 1 tokens"):
        ended.generate(golden.prompts, 2)


def test_scores_are_the_recorded_logprobs_in_the_protocols_order() -> None:
    """Along the recorded tokens the logprobs are the file's, sorted, ties to the lower id."""
    engine, golden = ReplayEngine(GATE), load_golden("gate")
    assert golden.top_logprobs is not None
    scored = engine.score(golden.prompts, golden.tokens[0].tolist(), top_k=20)
    np.testing.assert_array_equal(scored.token_logprobs, golden.top_logprobs[..., 0].astype(np.float64))
    np.testing.assert_array_equal(scored.top_logprobs, golden.top_logprobs.astype(np.float64))
    np.testing.assert_array_equal(scored.top_ids[..., 0], golden.tokens[0])
    tied = np.diff(scored.top_logprobs, axis=-1) == 0.0
    assert tied.any()
    assert (np.diff(scored.top_ids, axis=-1)[tied] > 0).all()
    assert scored.forced == "decode"


def test_a_continuation_may_leave_the_record_in_its_last_token_only() -> None:
    """The distribution at a first divergence was recorded; what follows another token was not."""
    engine, golden = ReplayEngine(GATE), load_golden("gate")
    assert golden.top_ids is not None
    assert golden.top_logprobs is not None
    forced = golden.tokens[0, 0, :4].tolist()
    forced[3] = int(golden.top_ids[0, 3, 1])
    scored = engine.score(golden.prompts[:1], [forced], top_k=2)
    assert scored.token_logprobs[0, 3] == np.float64(golden.top_logprobs[0, 3, 1])
    absent = next(i for i in range(4096) if i not in golden.top_ids[0, 3])
    assert np.isnan(engine.score(golden.prompts[:1], [[*forced[:3], absent]], top_k=2).token_logprobs[0, 3])
    with pytest.raises(EngineError, match="continuation 0 leaves the recorded tokens"):
        engine.score(golden.prompts[:1], [[*forced, 7]], top_k=2)


def test_ragged_continuations_are_padded_with_unknown() -> None:
    """Past a shorter row's end the logprobs are NaN and the ids -1."""
    engine, golden = ReplayEngine(GATE), load_golden("gate")
    rows = golden.tokens[0].tolist()
    scored = engine.score(golden.prompts[:2], [rows[0][:5], rows[1][:2]], top_k=3)
    assert scored.top_ids.shape == (2, 5, 3)
    assert np.isnan(scored.token_logprobs[1, 2:]).all()
    assert (scored.top_ids[1, 2:] == -1).all()
    assert not np.isnan(scored.token_logprobs[0]).any()


def test_what_holds_no_logprobs_cannot_score() -> None:
    """Another run than run 0 has no logprobs: the info says so and asking raises; k is bounded by the record."""
    engine = ReplayEngine(GATE, run=2)
    assert not engine.info.can_score
    assert np.isnan(engine.generate(load_golden(GATE).prompts, 3).gaps).all()
    with pytest.raises(EngineError, match="no logprobs"):
        engine.score(load_golden(GATE).prompts[:1], [[1]])
    with pytest.raises(EngineError, match="top 21 asked for, top 20 recorded"):
        ReplayEngine(GATE).score(load_golden(GATE).prompts[:1], [[1]], top_k=21)


def test_a_folder_without_a_candidate_is_not_scored_against_itself(tmp_path: Path) -> None:
    """Token files of a reference alone are no candidate, unless a run is named; an absent run is refused."""
    np.save(tmp_path / "greedy_ids.npy", np.array([[3, 4]], np.int32))
    np.array([1, 2], "<i4").tofile(tmp_path / "p0_prompt.i32")
    with pytest.raises(InputError, match="holds no our_ids"):
        ReplayEngine(tmp_path)
    assert ReplayEngine(tmp_path, run=0).generate([(1, 2)], 2).tokens.tolist() == [[3, 4]]
    with pytest.raises(InputError, match="got run 1, expected 0 to 0"):
        ReplayEngine(tmp_path, run=1)


def test_a_recorded_candidate_claims_nothing_of_the_reference(tmp_path: Path) -> None:
    """The golden's model and device are the reference's: a candidate that came with it is of unknown make."""
    ids = np.array([[3, 4]], np.int32)
    np.save(tmp_path / "greedy_ids.npy", ids)
    np.save(tmp_path / "our_ids.npy", ids + 1)
    np.array([1, 2], "<i4").tofile(tmp_path / "p0_prompt.i32")
    engine = ReplayEngine(tmp_path)
    assert (engine.info.device, engine.info.dtype, engine.info.model_sha256) == ("unknown", "unknown", None)
    assert not engine.info.can_score
    assert engine.generate([(1, 2)], 2).tokens.tolist() == [[4, 5]]


def test_logprobs_that_are_not_finite_are_told(tmp_path: Path) -> None:
    """A NaN among the recorded top logprobs marks the step as non-finite, so its token cannot agree."""
    golden = Golden(
        name="nan",
        prompts=((1, 2),),
        tokens=np.array([[[3, 4]]]),
        top_ids=np.array([[[3, 5], [4, 6]]], np.int32),
        top_logprobs=np.array([[[np.nan, np.nan], [-0.1, -3.0]]]),
        sampling=plain_greedy_settings(),
    )
    engine = ReplayEngine(write_golden(golden, tmp_path / "nan").path or "")
    agreement = score(golden, engine.generate(golden.prompts, 2))
    assert agreement.matched == 1
    assert agreement.non_finite == ((0, 0),)
