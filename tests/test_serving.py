"""The server: the API's shapes, the library's bits, and nothing left behind by whoever leaves."""

from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="the [serve] extra is not installed")
pytest.importorskip("uvicorn", reason="the [serve] extra is not installed")

from serving import Client, local, raw, serving

from harness.golden import load_golden

TEXT = "The quick brown"
TOKENS = 6


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving() as server, Client(server.url) as client:
        yield client


def test_ids_in_and_out_are_the_librarys(client: Client) -> None:
    """Lists of ids, all prompts of the gate in one request: each answer has the tokens of the library's paged run."""
    golden = load_golden("gate")
    made = local().generate(golden.prompts, TOKENS)
    status, body = client.ask(
        [list(p) for p in golden.prompts], max_tokens=TOKENS, ignore_eos=True, return_token_ids=True
    )
    assert status == 200
    assert [c["token_ids"] for c in body["choices"]] == made.tokens.tolist()
    assert [tuple(c["prompt_token_ids"]) for c in body["choices"]] == list(golden.prompts)
    assert {c["finish_reason"] for c in body["choices"]} == {"length"}
    given = sum(map(len, golden.prompts))
    assert body["usage"] == {
        "prompt_tokens": given,
        "completion_tokens": 8 * TOKENS,
        "total_tokens": given + 8 * TOKENS,
    }


def test_texts_and_ids_are_one_prompt(client: Client) -> None:
    """A text, a list of one text and its ids are answered alike; a list of texts has a choice each, in order."""
    one = client.said(TEXT, max_tokens=4, return_token_ids=True)
    assert client.said([TEXT], max_tokens=4)["text"] == one["text"]
    assert client.said(one["prompt_token_ids"], max_tokens=4)["text"] == one["text"]
    _, body = client.ask([TEXT, "In the"], max_tokens=4, n=2)
    texts = [c["text"] for c in body["choices"]]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert texts == [one["text"]] * 2 + [client.said("In the", max_tokens=4)["text"]] * 2


def test_logprobs_have_the_apis_legacy_shape(client: Client) -> None:
    """Four lists of one length; the best token is the one that was taken; offsets count characters of the text."""
    said = client.said(TEXT, max_tokens=5, logprobs=3)
    found = said["logprobs"]
    assert {k: len(v) for k, v in found.items()} == dict.fromkeys(
        ("tokens", "token_logprobs", "top_logprobs", "text_offset"), 5
    )
    assert [said["text"][i:].startswith(t) for i, t in zip(found["text_offset"], found["tokens"], strict=True)]
    for token, value, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert len(top) == 3
        assert top[token] == value == max(top.values())
    (only,) = client.said(TEXT, max_tokens=1, logprobs=0)["logprobs"]["top_logprobs"]
    assert len(only) == 1


def test_echo_scores_the_prompt(client: Client) -> None:
    """The prompt's text and logprobs come first, nothing for its first token, and equal those of a forced run."""
    said = client.said(TEXT, max_tokens=1, logprobs=1, echo=True, return_token_ids=True)
    ids, found = said["prompt_token_ids"], said["logprobs"]
    assert said["text"].startswith(TEXT)
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    scored = local().score_single_pass([ids[:1]], [ids[1:]])
    # The order of a softmax's float64 sum may follow where its row lies in memory.
    assert found["token_logprobs"][1:-1] == pytest.approx(scored.token_logprobs[0].tolist(), rel=1e-13)
    none = client.said(TEXT, max_tokens=0, logprobs=1, echo=True)
    assert none["text"] == TEXT
    assert none["logprobs"]["token_logprobs"] == found["token_logprobs"][:-1]
    assert none["finish_reason"] == "length"


def test_a_stream_says_what_a_whole_answer_says(client: Client) -> None:
    """Texts, ids and logprobs of the events add up to the answer; the usage comes last where it is asked for."""
    more = {"max_tokens": 12, "logprobs": 2, "echo": True, "return_token_ids": True}
    whole = client.said(TEXT, **more)
    events = client.events(TEXT, stream_options={"include_usage": True}, **more)
    parts = [e["choices"][0] for e in events[:-1]]
    assert "".join(p["text"] for p in parts) == whole["text"]
    assert [i for p in parts for i in p["token_ids"]] == whole["token_ids"]
    for name, values in whole["logprobs"].items():
        assert [v for p in parts for v in p["logprobs"][name]] == values
    assert [p["finish_reason"] for p in parts] == [None] * (len(parts) - 1) + ["length"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 12


def test_a_stop_ends_the_answer_before_it(client: Client) -> None:
    """Also where it lies across tokens or ends within one; a stream never says a part of it."""
    text = client.said(TEXT, max_tokens=12)["text"]
    for at in (1, 5, len(text) - 8):
        stop = text[at : at + 4]
        want = text[: text.index(stop)]
        said = client.said(TEXT, max_tokens=12, stop=["never said", stop])
        assert (said["text"], said["finish_reason"]) == (want, "stop")
    events = client.events(TEXT, max_tokens=12, stop=stop)
    assert "".join(e["choices"][0]["text"] for e in events) == want
    assert client.said(TEXT, max_tokens=12, stop="never said")["text"] == text


def test_an_end_token_ends_the_answer() -> None:
    """It is the last of the ids and counts as one; ignore_eos goes on past it."""
    with serving() as beside, Client(beside.url) as client:
        ids = client.said(TEXT, max_tokens=5, return_token_ids=True)["token_ids"]
        beside.service.stop = frozenset({ids[2]})
        said = client.said(TEXT, max_tokens=5, return_token_ids=True)
        assert (said["token_ids"], said["finish_reason"]) == (ids[:3], "stop")
        assert client.said(TEXT, max_tokens=5, ignore_eos=True, return_token_ids=True)["token_ids"] == ids


def test_sampling_depends_on_the_seed_alone(client: Client) -> None:
    """A seed repeats its answer beside others and alone; the choices of one prompt differ; the first is that of n=1."""
    how = {"temperature": 1.5, "top_p": 0.9, "seed": 7, "max_tokens": 6}
    one = client.said(TEXT, **how)["text"]
    _, body = client.ask(["In the", TEXT], n=3, **how)
    texts = [c["text"] for c in body["choices"]]
    assert texts[3] == one
    assert len(set(texts)) == 6
    assert client.said(TEXT, **{**how, "seed": 8})["text"] != one
    assert client.said(TEXT, **{**how, "seed": -7})["text"] != one
    greedy = client.said(TEXT, max_tokens=6)["text"]
    assert client.said(TEXT, **{**how, "top_p": 1e-9})["text"] == greedy
    assert client.said(TEXT, **{**how, "temperature": 1e-300})["text"] == greedy


def test_prompt_logprobs_are_vllms(client: Client) -> None:
    """By id, nothing for the first; they are the echo's."""
    said = client.said(TEXT, max_tokens=1, prompt_logprobs=2, return_token_ids=True)
    echo = client.said(TEXT, max_tokens=1, logprobs=2, echo=True)["logprobs"]
    assert said["prompt_logprobs"][0] is None
    for token, row, value in zip(
        said["prompt_token_ids"][1:], said["prompt_logprobs"][1:], echo["token_logprobs"][1:], strict=False
    ):
        assert row[str(token)]["logprob"] == value
    assert [row["rank"] for row in said["prompt_logprobs"][1].values()][:2] == [1, 2]


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[[1]]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [4096]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": "a" * 100_000}, "prompt"),
        ({"prompt": [5] * 256}, "prompt"),
        ({"prompt": [5] * 255}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": 7}, "stop"),
        ({"seed": 2**70}, "seed"),
        ({"best_of": 3}, "best_of"),
        ({"logit_bias": {"5": 100}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"top_k": 40}, "top_k"),
        ({"suffix": "end"}, "suffix"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
)
def test_a_field_that_is_wrong_is_named(client: Client, wrong: dict[str, object], param: str) -> None:
    """400 in the API's shape, before anything runs."""
    status, body = client.ask(**{"prompt": TEXT, "max_tokens": 2, **wrong})  # pyright: ignore[reportArgumentType]
    assert status == 400, body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b"\xff\xfe",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "a", "\\ud800": 1}',
        b'{"prompt": "\\ud800"}',
    ],
)
def test_a_body_that_is_no_request_is_refused(client: Client, body: bytes) -> None:
    """400 in the API's shape."""
    status, said = raw(client, body)
    assert status == 400
    assert said["error"]["message"]


def test_null_bytes_and_one_token_are_text(client: Client) -> None:
    """A prompt may hold anything that the tokenizer knows; one token is enough."""
    assert client.said("\x00", max_tokens=1)["finish_reason"] == "length"
    assert client.said([5], max_tokens=2)["finish_reason"] == "length"


def test_paths_methods_and_models_that_are_not_there(client: Client) -> None:
    """404 and 405 in the API's shape; the one model is listed with its length."""
    assert client.ask(model="gpt-4")[0] == 404
    assert client.ask(path="/v1/nothing")[1]["error"]["type"] == "not_found_error"
    assert client.http.get("/v1/completions").status_code == 405
    assert client.http.get("/v1/models/gpt-4").json()["error"]["code"] == "model_not_found"
    (model,) = client.http.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("kimi-linear-12m", 256)
    assert client.http.get(f"/v1/models/{model['id']}").json() == model
    assert client.said(model=model["id"], max_tokens=1)
    assert client.http.get("/health").json() == {"status": "ok"}
    assert raw(client, b"{}", content_type="text/plain")[0] == 415


def test_metrics_count_what_was_served(client: Client) -> None:
    """Prometheus text; tokens and answers go up by what was asked."""

    def read() -> dict[str, float]:
        lines = client.http.get("/metrics").text.splitlines()
        return {name: float(value) for name, _, value in (x.rpartition(" ") for x in lines if x[0] != "#")}

    before = read()
    client.said(max_tokens=3)
    after = read()
    for name, more in (
        ('neartie_tokens_total{kind="completion"}', 3),
        ('neartie_tokens_total{kind="prompt"}', 3),
        ('neartie_sequences_total{reason="length"}', 1),
        ('neartie_http_responses_total{path="/v1/completions",status="200"}', 1),
    ):
        assert after[name] - before[name] == more, name
    assert (after["neartie_live"], after["neartie_pages_used"], after["neartie_slots"]) == (0, 0, 8)


def test_chat_needs_a_template(client: Client) -> None:
    """The shipped tokenizer has none, and the API's error says so."""
    answer = client.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "no_chat_template"


@pytest.mark.parametrize("how", [{"pages": 5, "block_size": 8}, {"prefix_cache": 2, "prefill_piece": 64}], ids=str)
def test_no_schedule_shows_in_an_answer(how: dict[str, int]) -> None:
    """Few pages, so that answers give way to each other, and shared prefixes: the tokens are those of the library."""
    long = list(range(100, 170)) if "prefix_cache" in how else list(range(100, 112))
    prompts = [[*long, 5], [*long, 6], [*long, 5]]
    want = [local().generate([p], TOKENS).tokens[0].tolist() for p in prompts]
    with serving(local(**how), max_len=96) as beside, Client(beside.url) as client:
        first = client.said(prompts[0], max_tokens=TOKENS, return_token_ids=True, ignore_eos=True)
        _, body = client.ask(prompts, max_tokens=TOKENS, return_token_ids=True, ignore_eos=True)
        stats = beside.service.desk.engine.stats
    assert [c["token_ids"] for c in (first, *body["choices"])] == [want[0], *want]
    assert (stats.preemptions > 0) is ("pages" in how)
    assert (stats.prefix_hit_tokens > 0) is ("prefix_cache" in how)
