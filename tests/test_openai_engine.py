"""A server as an engine: what it says is taken, what it does not say stays unknown, what is finished is kept."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mock_server import Handler, Misdeed, Reciter, completion, serving

from experiments.cli import main
from harness.compose import load
from harness.config import Dialect
from harness.engines import make_engine
from harness.engines.completion import read_answer
from harness.engines.openai_engine import OpenAIEngine
from harness.engines.protocol import Engine
from harness.golden import Golden, load_golden
from harness.ledger import Ledger
from variants.errors import EngineError, InputError, UsageError

Captured = pytest.CaptureFixture[str]
TOKENIZER = Path(__file__).parents[1] / "assets" / "kimi-linear-12m"
QUICK = ["engine.retries=0", "engine.timeout_s=5"]


@pytest.fixture(scope="module")
def golden() -> Golden:
    return load_golden("gate")


def words(server: Reciter, folder: Path, *more: str) -> list[str]:
    url = f"engine.url={server.url}"
    return ["engine=openai", url, "engine.dialect=vllm", f"results={folder}", *(more or QUICK)]


def engine_of(server: Reciter, folder: Path, *more: str) -> OpenAIEngine:
    made = make_engine(load(words(server, folder, *more)))
    assert isinstance(made, OpenAIEngine)
    return made


@pytest.mark.parametrize("more", [[], ["engine.concurrency=4"], ["engine.stream=true"]])
def test_a_server_that_recites_the_golden_meets_its_bar(
    more: list[str], golden: Golden, tmp_path: Path, capsys: Captured
) -> None:
    """One at a time, four at a time and streamed: 128/128, ids echoed, gaps those of the golden, nothing left over."""
    with serving(golden) as server:
        assert main(["gate", "--require", *words(server, tmp_path, *QUICK, *more)]) == 0
        assert len(server.asked) == 8
        asked = server.asked[0]
    assert {k: asked[k] for k in ("temperature", "repetition_penalty", "ignore_eos", "add_special_tokens")} == {
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "ignore_eos": True,
        "add_special_tokens": False,
    }
    (row,) = Ledger(tmp_path / "ledger").rows()
    assert (row["agreement"]["matched"], row["status"], row["engine"]) == (128, "ok", "openai")
    assert "url" not in row["detail"]["config"]["engine"]
    assert server.url not in json.dumps(row)
    assert (row["decode_tok_s"]["steps"] == 8 * 15) is ("stream" in " ".join(more))
    assert not list((tmp_path / "unfinished").glob("*"))
    assert "128/128" in capsys.readouterr().out


def test_it_is_an_engine_that_says_what_it_offers(golden: Golden, tmp_path: Path) -> None:
    """The protocol holds; a probe learns of ids, logprobs and a prompt's logprobs; scoring is told to be one pass."""
    with serving(golden) as server:
        engine = engine_of(server, tmp_path)
        assert isinstance(engine, Engine)
        engine.probe(golden.prompts[0])
        info = engine.info
        assert (info.can_score, info.echoes_ids, info.top_logprobs, info.max_length) == (True, True, 20, 512)
        scored = engine.score(golden.prompts[:2], golden.tokens[0, :2, :3].tolist(), top_k=4)
        assert set(engine.arms()) == {"4 at a time", "cold prefix cache"}
        engine.arms()["cold prefix cache"].generate(golden.prompts[:2], 2)
        salts = [body.get("cache_salt") for body in server.asked]
    assert golden.top_logprobs is not None
    assert scored.forced == "single_pass"
    np.testing.assert_allclose(scored.token_logprobs, golden.top_logprobs[:2, :3, 0])
    assert salts[-1] != salts[-2] is not None
    assert salts[0] is None


def from_the_third(kind: Misdeed) -> Misdeed:
    """Two requests are answered, the rest meet `kind`."""
    count = itertools.count()
    return lambda handler, body: next(count) >= 2 and kind(handler, body)


def says_500(handler: Handler, body: dict[str, Any]) -> bool:
    handler.answer({"error": {"message": "out of blocks"}}, 500)
    return True


def drops(handler: Handler, body: dict[str, Any]) -> bool:
    handler.close_connection = True
    handler.connection.close()
    return True


def garbage(handler: Handler, body: dict[str, Any]) -> bool:
    handler.raw(b"\xff<html>busy</html>")
    return True


def garbage_stream(handler: Handler, body: dict[str, Any]) -> bool:
    handler.raw(
        b'data: {"choices": [{"text": "a", "token_ids": [5]}]}\n\ndata: ]]garbage\n\n', kind="text/event-stream"
    )
    return True


def torn_stream(handler: Handler, body: dict[str, Any]) -> bool:
    handler.raw(b'data: {"choices": [{"text": "a", "token_ids": [5]}]}\n\n', kind="text/event-stream")
    return True


def hangs(handler: Handler, body: dict[str, Any]) -> bool:
    return handler.hang()


def refuses(handler: Handler, body: dict[str, Any]) -> bool:
    handler.answer({"detail": "no such field"}, 400)
    return True


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        (says_500, [], "the server answered 500: out of blocks"),
        (drops, [], "the server broke off its answer"),
        (garbage, [], "the server answered with no JSON: .*busy"),
        (garbage_stream, ["engine.stream=true"], "the server answered with no JSON: ]]garbage"),
        (torn_stream, ["engine.stream=true"], r"the stream broke off before \[DONE\]"),
        (hangs, ["engine.timeout_s=0.3"], "no answer within 0.3 s"),
        (refuses, [], "the server answered 400: no such field"),
    ],
)
def test_a_server_that_fails_in_the_middle_loses_nothing(
    kind: Misdeed, more: list[str], said: str, golden: Golden, tmp_path: Path, capsys: Captured
) -> None:
    """Exit 5, one line, a failed row; what was finished is kept, and the same command asks for the rest alone."""
    given = ["engine.retries=0", *more] if "engine.timeout_s=0.3" in more else [*QUICK, *more]
    with serving(golden, from_the_third(kind)) as server:
        assert main(["gate", *words(server, tmp_path, *given)]) == 5
        error = capsys.readouterr().err
        server.misdeed = None
        before = len(server.asked)
        assert main(["gate", *words(server, tmp_path, *given)]) == 0
        assert len(server.asked) - before == 6
    assert re.search(said, error), error
    assert "2 of 8 prompts are finished and kept" in error
    assert error.count("\n") == 1
    failed, done = Ledger(tmp_path / "ledger").rows()
    assert (failed["status"], done["status"]) == ("failed", "ok")
    assert "2 of 8 prompts are finished" in failed["error"]
    assert done["agreement"]["matched"] == 128
    assert any("2 of 8 prompts were answered before" in note for note in done["detail"]["notes"])


def test_a_dead_server_is_told_in_one_line(golden: Golden, tmp_path: Path, capsys: Captured) -> None:
    """Nobody listens: exit 5, and what to do."""
    with serving(golden) as server:
        gone = words(server, tmp_path)
    assert main(["gate", *gone]) == 5
    assert "no server answers at engine.url; start it" in capsys.readouterr().err


def test_what_passes_is_tried_again_with_back_off(
    golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One 500 costs a pause and nothing else; a refusal is not repeated."""
    pauses: list[float] = []
    count = itertools.count()
    with serving(golden, lambda h, b: next(count) in (0, 1, 3) and says_500(h, b)) as server:
        engine = engine_of(server, tmp_path, "engine.retries=2")
        monkeypatch.setattr(engine._server, "_pause", pauses.append)
        generation = engine.generate(golden.prompts[:2], 16)
        server.misdeed = refuses
        asked = len(server.asked)
        with pytest.raises(EngineError, match="400"):
            engine.generate(golden.prompts[:2], 15)
        assert len(server.asked) == asked + 1
    np.testing.assert_array_equal(generation.tokens, golden.tokens[0, :2])
    assert pauses == [0.5, 1.0, 0.5]


def test_an_answer_that_drips_is_cut_at_its_time(golden: Golden, tmp_path: Path) -> None:
    """The limit holds for the whole answer: a byte now and then does not extend it."""

    def drips(handler: Handler, body: dict[str, Any]) -> bool:
        whole = json.dumps(completion(golden, body)).encode()
        handler.send_response(200)
        handler.send_header("content-length", str(12 + len(whole)))
        handler.end_headers()
        for _ in range(12):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            handler.server.stop.wait(0.05)
        handler.wfile.write(whole)  # right, and too late
        return True

    with serving(golden, drips) as server:
        engine = engine_of(server, tmp_path, "engine.retries=0", "engine.timeout_s=0.3")
        with pytest.raises(EngineError, match="no answer within"):
            engine.generate(golden.prompts[:1], 16)


def changed(change: Any) -> Misdeed:
    """The right answer, changed in one way."""

    def misdeed(handler: Handler, body: dict[str, Any]) -> bool:
        whole = completion(handler.server.golden, body)
        change(whole, whole["choices"][0])
        handler.answer(whole)
        return True

    return misdeed


def fewer(whole: dict[str, Any], choice: dict[str, Any]) -> None:
    rows = choice["logprobs"]["top_logprobs"]
    choice["logprobs"]["top_logprobs"] = [dict(list(row.items())[:5]) for row in rows]


def half(whole: dict[str, Any], choice: dict[str, Any]) -> None:
    choice["logprobs"]["top_logprobs"] = choice["logprobs"]["top_logprobs"][:3]


def none(whole: dict[str, Any], choice: dict[str, Any]) -> None:
    choice["logprobs"] = None


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (fewer, "logprobs: 20 requested, 5 returned"),
        (half, "logprobs returned for 3 of 16 tokens: not used, gaps are unknown"),
        (none, "20 logprobs asked for with each token, none returned"),
    ],
)
def test_fewer_logprobs_make_gaps_unknown_and_are_told(change: Any, note: str, golden: Golden, tmp_path: Path) -> None:
    """Tokens still count, 128/128, and no gap is computed from a list that came short."""
    with serving(golden, changed(change)) as server:
        assert main(["gate", *words(server, tmp_path)]) == 0
        generation = engine_of(server, tmp_path).generate(golden.prompts, 16)
    assert np.isnan(generation.gaps).all()
    (row,) = Ledger(tmp_path / "ledger").rows()
    assert row["agreement"]["matched"] == 128
    assert note in row["detail"]["notes"]


def another_bos(whole: dict[str, Any], choice: dict[str, Any]) -> None:
    choice["prompt_token_ids"] = [1, *choice["prompt_token_ids"]]


def counts_one_more(whole: dict[str, Any], choice: dict[str, Any]) -> None:
    whole["usage"]["prompt_tokens"] += 1
    del choice["prompt_token_ids"]


def stops_at_eos(whole: dict[str, Any], choice: dict[str, Any]) -> None:
    choice["token_ids"], choice["finish_reason"] = choice["token_ids"][:9], "stop"
    choice["logprobs"] = None


def short_context(whole: dict[str, Any], choice: dict[str, Any]) -> None:
    choice["token_ids"] = choice["token_ids"][:9]
    choice["logprobs"] = None


def penalised(whole: dict[str, Any], choice: dict[str, Any]) -> None:
    choice["token_ids"][4] = int(list(choice["logprobs"]["top_logprobs"][4])[1].removeprefix("token_id:"))


def sampled(whole: dict[str, Any], choice: dict[str, Any]) -> None:
    whole["generation_settings"] = {"temperature": 0.8}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (another_bos, "double BOS"),
        (counts_one_more, "it adds a BOS of its own"),
        (stops_at_eos, "ended after 9 of 16 tokens (stop)"),
        (short_context, "ended at 9 of 16 tokens by its own length limit"),
        (penalised, "token 4 is not the first of its own logprobs"),
        (sampled, "not plain greedy (temperature 0.8)"),
    ],
)
def test_a_wrong_question_is_never_a_score(
    change: Any, said: str, golden: Golden, tmp_path: Path, capsys: Captured
) -> None:
    """A doubled BOS, another end, a penalty, a temperature: input mismatch, exit 3, a failed row without a count."""
    with serving(golden, changed(change)) as server:
        assert main(["gate", *words(server, tmp_path)]) == 3
    assert said in capsys.readouterr().err
    (row,) = Ledger(tmp_path / "ledger").rows()
    assert row["status"] == "failed"
    assert row["agreement"]["matched"] is None


def test_a_golden_longer_than_the_servers_model_is_refused_before_a_token(
    golden: Golden, tmp_path: Path, capsys: Captured
) -> None:
    """What `/v1/models` says of the greatest length is believed."""
    with serving(golden) as server:
        Handler.do_GET, kept = (lambda self: self.answer({"data": [{"id": "t", "max_model_len": 20}]})), Handler.do_GET
        try:
            assert main(["gate", *words(server, tmp_path)]) == 3
        finally:
            Handler.do_GET = kept
        assert server.asked == []
    assert "engine openai has room for 20" in capsys.readouterr().err


def test_the_key_comes_from_the_environment_and_goes_nowhere_else(
    golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """It is sent as a bearer token and is in no row, journal or message."""
    monkeypatch.setenv("MY_KEY", "s3cret-of-mine")
    with serving(golden, from_the_third(says_500)) as server:
        main(["gate", *words(server, tmp_path, *QUICK, "engine.key=MY_KEY")])
        assert {h["authorization"] for h in server.headers_seen} == {"Bearer s3cret-of-mine"}
    captured = capsys.readouterr()
    files = [p.read_text() for p in tmp_path.rglob("*") if p.is_file()]
    assert len(files) == 2
    assert all("s3cret" not in text for text in (captured.out, captured.err, *files))


def test_text_goes_out_and_comes_back_as_ids(golden: Golden, tmp_path: Path) -> None:
    """With the server's tokenizer, prompts go as text (BOS written out), and token texts become ids again."""
    seen: list[object] = []

    def as_text(handler: Handler, body: dict[str, Any]) -> bool:
        seen.append(body["prompt"])
        n = [engine._habits.text.ids(body["prompt"]) == list(p) for p in golden.prompts].index(True)  # type: ignore[union-attr]
        tokens = ["<|bos|>", "<|eos|>"]
        tops = [{"<|bos|>": -0.5, "<|eos|>": -1.5}] * 2
        logprobs = {"tokens": tokens, "token_logprobs": [-0.5, -1.5], "top_logprobs": tops}
        handler.answer({"choices": [{"text": "x", "finish_reason": "length", "logprobs": logprobs}], "n": n})
        return True

    with serving(golden, as_text) as server:
        more = ["engine.feed=text", f"engine.tokenizer={TOKENIZER}", "engine.top_k=2", *QUICK]
        url = [f"engine.url={server.url}", f"results={tmp_path}"]
        made = make_engine(load(["engine=openai", *url, *more]))
        assert isinstance(made, OpenAIEngine)
        engine = made
        generation = engine.generate(golden.prompts[:2], 2)
    assert generation.tokens.tolist() == [[1, 2], [1, 2]]
    assert generation.gaps.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert str(seen[0]).startswith("<|bos|>The capital")
    assert engine.info.tokenizer_sha256 == golden.provenance["tokenizer_sha256"]
    assert engine.info.tokenizer_class == "PreTrainedTokenizerFast"


def test_text_that_is_lost_on_the_way_is_refused(golden: Golden, tmp_path: Path) -> None:
    """Ids that text cannot carry stop before a request; text alone, or an ambiguous one, is no answer."""
    url = ["engine=openai", "engine.url=http://127.0.0.1:9", "engine.served=m", f"results={tmp_path}", *QUICK]
    with pytest.raises(UsageError, match=r"needs engine\.tokenizer"):
        make_engine(load([*url, "engine.feed=text"]))
    engine = make_engine(load([*url, "engine.feed=text", f"engine.tokenizer={TOKENIZER}"]))
    with pytest.raises(InputError, match="prompt 0 does not survive being text"):
        engine.generate([(0x80, 0x81, 0x82, 0x83)], 2)
    alone = {"choices": [{"text": "hello", "finish_reason": "length"}]}
    with pytest.raises(EngineError, match="returns text alone"):
        read_answer(alone, top_k=0, id_of=None, where="prompt 0")
    texts = {"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "top_logprobs": [{"a": -1.0}]}}]}
    with pytest.raises(EngineError, match="returns texts, not ids; name its tokenizer"):
        read_answer(texts, top_k=1, id_of=None, where="prompt 0")


@pytest.mark.parametrize(
    "logprobs",
    [
        {"content": [{"id": 7, "token": "a", "logprob": -0.1, "top_logprobs": [{"id": 7, "logprob": -0.1},
                                                                              {"id": 9, "logprob": -2.1}]}]},
        {"tokens": [7], "token_logprobs": [-0.1], "top_logprobs": [{"7": -0.1, "9": -2.1}]},
        {"tokens": ["token_id:7"], "top_logprobs": [{"token_id:7": -0.1, "token_id:9": -2.1}]},
    ],
)  # fmt: skip
def test_every_dialect_gives_one_answer(logprobs: dict[str, Any]) -> None:
    """llama.cpp's list, mlx-lm's ids and vLLM's token_id strings say the same."""
    body = {"choices": [{"text": "a", "finish_reason": "length", "logprobs": logprobs}]}
    answer = read_answer(body, top_k=2, id_of=None, where="prompt 0")
    assert (answer.tokens, answer.ranked) == ((7,), (((7, -0.1), (9, -2.1)),))
    assert answer.gaps == (2.0,)
    assert type(answer).of_plain(json.loads(json.dumps(answer.plain()))) == answer


def test_texts_that_two_ids_share_have_no_gap() -> None:
    """P30: a list keyed by text that lost an entry says so, and its gap is unknown, not small."""
    ids = {"true": 10, "false": 2, "a": 3, "b": 4}
    tops = [{"true": -1.6, "false": -2.0, "a": -3.0, "b": -4.0}]
    logprobs = {"tokens": ["true"], "token_logprobs": [-0.1], "top_logprobs": tops}
    body = {"choices": [{"text": "true", "finish_reason": "length", "logprobs": logprobs}]}
    answer = read_answer(body, top_k=5, id_of=lambda text, where: ids[text], where="prompt 0")
    assert answer.gaps == (None,)
    assert answer.notes[0].startswith("logprobs: 5 requested, 4 returned")


def test_a_nan_logprob_makes_a_row_invalid(golden: Golden, tmp_path: Path) -> None:
    """A server that says NaN has no token: INVALID, exit 5."""

    def nan(whole: dict[str, Any], choice: dict[str, Any]) -> None:
        row = choice["logprobs"]["top_logprobs"][2]
        row[next(iter(row))] = float("nan")

    with serving(golden, changed(nan)) as server:
        assert main(["gate", *words(server, tmp_path)]) == 5
    (row,) = Ledger(tmp_path / "ledger").rows()
    assert (row["status"], row["verdict"]["class"]) == ("invalid", "INVALID")


def test_dialects_are_told_apart() -> None:
    """Only a dialect that takes extra fields is sent them."""
    assert load(["engine=openai", "engine.url=http://a"]).engine.dialect is Dialect.openai
    with pytest.raises(UsageError, match=r"needs engine\.url"):
        load(["engine.kind=openai"])
    with pytest.raises(UsageError, match="engine=replay does not read it"):
        load(["engine=replay", "engine.folder=/r", "engine.concurrency=2"])
