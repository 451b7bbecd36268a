"""The pre-gate: a wrong question is refused before an answer is scored."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.engines.protocol import EngineInfo, Generation
from harness.golden import Golden, load_golden, write_golden
from harness.pregate import check_answers, check_prompts, gap_of_top_list, pregate, prompt_mismatch
from harness.sampling import greedy_problems, normalize_sampling, plain_greedy_settings
from variants.errors import InputError

BOS = 1


def golden(**fields: object) -> Golden:
    given = {
        "name": "tiny",
        "prompts": ((BOS, 5, 6, 7),),
        "tokens": np.array([[[8, 9]]], np.int32),
        "sampling": plain_greedy_settings(),
    }
    return Golden(**{**given, **fields})  # type: ignore[arg-type]


def info(**fields: object) -> EngineInfo:
    return EngineInfo(**{"name": "e", "version": "1", "device": "cpu", "dtype": "float32", **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize("bos_id", [None, BOS])
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((5, 6, 7), "candidate lacks BOS"),
        ((BOS, BOS, 5, 6, 7), "double BOS"),
        ((BOS, 5, 6), "candidate has 3 ids, the golden 4"),
        ((BOS, 5, 9, 7), "candidate has id 9 at 2, the golden 6"),
    ],
)
def test_other_prompt_ids_are_an_input_mismatch(ids: tuple[int, ...], message: str, bos_id: int | None) -> None:
    """A lost or doubled BOS is named as such, with the exit code of an input error."""
    with pytest.raises(InputError, match=f"input mismatch at prompt 0: {message}") as caught:
        pregate(golden(), info(), prompts=(ids,), bos_id=bos_id)
    assert caught.value.exit_code == 3


def test_equal_prompts_pass_and_a_missing_one_does_not() -> None:
    """The golden's own ids pass, as any sequence; another number of prompts does not."""
    check_prompts(golden(), [[BOS, 5, 6, 7]])
    with pytest.raises(InputError, match="candidate has 0 prompts"):
        check_prompts(golden(), [])
    assert prompt_mismatch((5, 6), (BOS, 5, 6), bos_id=BOS) == f"candidate adds a BOS ({BOS}) that the golden lacks"


def test_another_tokenizer_leaves_ids_alone_to_compare() -> None:
    """Where tokenizer hashes differ, text is ignored and the note says so; equal or unknown hashes are silent."""
    made = golden(provenance={"tokenizer_sha256": "a" * 64, "model_sha256": "b" * 64})
    differs = pregate(made, info(tokenizer_sha256="c" * 64, model_sha256="b" * 64))
    assert not differs.compare_text
    assert differs.notes == (
        "tokenizer differs (golden aaaaaaaaaaaa, candidate cccccccccccc): ids alone are compared, text was ignored",
    )
    for same in ("a" * 64, None):
        assert pregate(made, info(tokenizer_sha256=same)).notes == ()
    other = pregate(made, info(model_sha256="d" * 64))
    assert other.compare_text
    assert other.notes == ("model differs (golden bbbbbbbbbbbb, candidate dddddddddddd)",)


def test_an_id_past_the_vocabulary_is_another_tokenizer() -> None:
    """A golden whose ids the model cannot say, in prompt or tokens, is refused by name."""
    pregate(golden(), info(), vocab_size=10)
    for made in (golden(), golden(prompts=((BOS, 9),), tokens=np.array([[[2]]]))):
        with pytest.raises(InputError, match="holds id 9, the candidate's vocabulary ends at 8"):
            pregate(made, info(), vocab_size=9)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "not recorded"),
        ({"temperature": 0.7}, "temperature 0.7"),
        ({"eos": "ignored"}, "temperature is not recorded"),
        ({"top_k": 1}, "temperature is not recorded"),
        ({"temperature": 0, "repetition_penalty": 1.1}, "repetition_penalty 1.1"),
        ({"temperature": 0, "presence_penalty": 0.5}, "presence_penalty 0.5"),
        ({"temperature": 0, "no_repeat_ngram_size": 3}, "no_repeat_ngram_size 3"),
        ({"temperature": 0, "suppress_tokens": [5]}, "suppress_tokens"),
        ({"temperature": 0, "logit_bias": {"5": -1.0}}, "logit_bias"),
        ({"temperature": 0, "num_beams": 4}, "num_beams 4"),
        ({"temperature": 0, "brand_new_penalty": 1.3}, "brand_new_penalty 1.3"),
        ("greedy, repetition penalty 1.1", "repetition_penalty 1.1"),
        ("greedy with a penalty", "a penalty without a value"),
        ("temperature 0.6, top_p 0.95", "temperature 0.6"),
        ("as usual", "temperature is not recorded"),
        ("not greedy", "temperature is not recorded"),
    ],
)
def test_settings_that_are_not_plain_greedy_are_refused(settings: object, reason: str) -> None:
    """Whatever can change an argmax makes a golden unusable as one, and is named."""
    made = golden(sampling=normalize_sampling(settings))
    assert not made.plain_greedy
    with pytest.raises(InputError, match=f"golden tiny: not plain greedy.*{reason}"):
        pregate(made, info())


@pytest.mark.parametrize(
    "settings",
    [
        plain_greedy_settings(),
        {"temperature": 0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "top_k": 50, "num_beams": 1},
        {"do_sample": False, "min_length": 0, "suppress_tokens": [], "bad_words_ids": None},
        "greedy (temperature 0), no penalties, EOS ignored",
    ],
)
def test_neutral_settings_are_plain_greedy(settings: object) -> None:
    """Settings that leave the argmax alone do not get in the way."""
    assert greedy_problems(normalize_sampling(settings)) == []


def test_free_text_is_read_for_what_it_says() -> None:
    """The shipped sentence becomes temperature 0, no penalty, EOS ignored, with the sentence kept."""
    text = "greedy (temperature 0), no penalties, EOS ignored"
    assert normalize_sampling(text) == {
        "stated": text,
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "eos": "ignored",
    }
    assert normalize_sampling("greedy, stops at EOS")["eos"] == "stop"
    assert normalize_sampling("greedy")["eos"] == "unknown"
    with pytest.raises(InputError, match="eos is 'maybe'"):
        normalize_sampling({"eos": "maybe"})
    with pytest.raises(InputError, match="got list"):
        normalize_sampling([])


def test_a_hidden_repetition_penalty_beside_the_golden_is_found(tmp_path: Path) -> None:
    """generation_config.json with repetition_penalty 1.1 makes the golden not plain greedy, wherever it is copied."""
    path = write_golden(load_golden("gate"), tmp_path / "gate").path
    assert path is not None
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"do_sample": True, "temperature": 0.6, "repetition_penalty": 1.0}))
    assert load_golden(path).plain_greedy  # the golden's temperature is stated, and 1.0 is neutral
    file.write_text(json.dumps({"repetition_penalty": 1.1, "eos_token_id": 2}))
    found = load_golden(path)
    assert found.sampling["generation_config"] == {"repetition_penalty": 1.1}
    with pytest.raises(InputError, match=r"not plain greedy \(repetition_penalty 1.1 \(from generation_config.json\)"):
        pregate(found, info())
    elsewhere = write_golden(found, tmp_path / "other" / "gate").path
    assert not load_golden(elsewhere or "").plain_greedy
    said = replace(load_golden("gate"), sampling={**found.sampling, "generation_config": "ignored"})
    file.unlink()
    kept = write_golden(said, tmp_path / "said").path
    file.write_text(json.dumps({"repetition_penalty": 1.1}))
    assert load_golden(kept or "").plain_greedy


def test_a_torn_generation_config_is_refused(tmp_path: Path) -> None:
    """A file that cannot be read is not taken for one without penalties."""
    path = write_golden(golden(), tmp_path / "g").path
    (tmp_path / "generation_config.json").write_text('{"repetition_pen')
    with pytest.raises(InputError, match=r"generation_config.json: not JSON"):
        load_golden(path or "")


def test_a_candidate_that_does_not_take_the_argmax_is_refused() -> None:
    """An engine that reports a penalty of its own is not scored."""
    pregate(golden(), info(sampling={"temperature": 0.0}))
    with pytest.raises(InputError, match="engine e: not plain greedy"):
        pregate(golden(), info(sampling={"temperature": 0.0, "frequency_penalty": 0.2}))


def test_top_list_keyed_by_text_that_lost_an_entry_has_no_gap() -> None:
    """Two ids with one string shadow each other: the second place is not trusted, and ids are asked for."""
    shadowed = {"true": -1.6, "false": -2.0, "a": -3.0, "b": -4.0}
    for entries in (shadowed.items(), [("true", -0.1), ("true", -1.6), ("false", -2.0), ("a", -3.0), ("b", -4.0)]):
        gap = gap_of_top_list(entries, 5, chosen="true")
        assert gap.nats is None
        assert gap.note == "5 requested, 4 returned: ambiguous strings, ask the server for token ids"
    by_id = gap_of_top_list([(10, -0.1), (11, -1.6), (2, -2.0), (3, -3.0), (4, -4.0)], 5, chosen=10)
    assert by_id.nats == 1.5
    assert by_id.note is None


def test_chosen_token_outside_the_top_list_is_unknown_not_zero() -> None:
    """A token that was not returned has a gap of at least the list's width."""
    gap = gap_of_top_list([(10, -0.25), (11, -1.25)], 2, chosen=99)
    assert gap.nats is None
    assert gap.at_least_nats == 1.0
    assert gap.note == "chosen token not returned: unknown, at least 1"
    assert gap_of_top_list([], 5, chosen=1).note == "5 requested, 0 returned"
    assert gap_of_top_list([(1, -0.1)], 5, chosen=1).note == "5 requested, 1 returned"


def generation(tokens: list[list[int]], **more: object) -> Generation:
    made = np.array(tokens, np.int32)
    n = len(made)
    given = {"tokens": made, "finite": np.ones(made.shape, bool), "gaps": np.full(made.shape, np.nan)}
    given |= {"prefill_s": np.full(n, np.nan), "prefill_tokens": np.full(n, 4), "decode_s": ()}
    return Generation(**{**given, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt_ids": ((BOS, BOS, 5, 6, 7),)}, "input mismatch at prompt 0: double BOS"),
        ({"sampling": {"temperature": 0.0, "repeat_penalty": 1.1}}, "not plain greedy .repeat_penalty 1.1"),
        ({"tokens": [[8, -1]], "finish": ("length",)}, "input mismatch .* ended at 1 of 2 tokens by its own length"),
        ({"tokens": [[8, -1]], "finish": ("stop",)}, r"ended after 1 of 2 tokens \(stop\).*let it ignore EOS"),
        ({"tokens": [[8, -1]]}, r"ended after 1 of 2 tokens \(unsaid\)"),
        (
            {
                "top_ids": np.array([[[8, 3], [3, 9]]]),
                "top_logprobs": np.array([[[-0.1, -2.0], [-0.1, -2.0]]]),
            },
            "prompt 0, token 1 is not the first of its own logprobs",
        ),
    ],
)
def test_an_answer_to_another_question_is_no_score(given: dict[str, object], message: str) -> None:
    """Other ids, other settings, another end and a hidden penalty each stop the gate with an input error."""
    tokens = given.pop("tokens", [[8, 9]])
    check_answers(golden(), info(), generation([[8, 9]]), stop_at_eos=False)
    with pytest.raises(InputError, match=message):
        check_answers(golden(), info(), generation(tokens, **given), stop_at_eos=False)  # type: ignore[arg-type]


def test_a_row_may_end_where_the_golden_stops_at_eos() -> None:
    """With EOS as the stop a short row is an answer like any other, and a tie is no other choice than the first."""
    check_answers(golden(), info(), generation([[8, -1]], finish=("stop",)), stop_at_eos=True)
    tied = {"top_ids": np.array([[[8, 3], [3, 9]]]), "top_logprobs": np.full((1, 2, 2), -0.5)}
    check_answers(golden(), info(), generation([[8, 9]], **tied), stop_at_eos=False)


def test_a_golden_longer_than_the_engine_is_refused() -> None:
    """Four ids and two tokens do not fit an engine of five."""
    pregate(golden(), info(max_length=6))
    with pytest.raises(InputError, match="needs 6 tokens, engine e has room for 5"):
        pregate(golden(), info(max_length=5))


def test_another_tokenizer_class_is_told() -> None:
    """A slow tokenizer and a fast one may cut text differently though they share their files: text is not compared."""
    made = golden(provenance={"tokenizer_class": "TikTokenTokenizer"})
    assert pregate(made, info(tokenizer_class="TikTokenTokenizer")).compare_text
    found = pregate(made, info(tokenizer_class="PreTrainedTokenizerFast"))
    assert not found.compare_text
    assert "tokenizer class differs (golden TikTokenTokenizer" in found.notes[0]
