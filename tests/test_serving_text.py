"""Text of the server: characters whole, stops never said, chat templates in a sandbox, sampling by the seed."""

import json
import random
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the [serve] extra is not installed")
pytest.importorskip("uvicorn", reason="the [serve] extra is not installed")

import torch
from serving import CHECKPOINT, Client, local, serving

from harness.engines.local import LocalEngine
from harness.engines.prompt_text import PromptText
from harness.serving.api_error import ApiError
from harness.serving.chat_template import load
from harness.serving.transcript import Transcript
from harness.serving.vocabulary import Vocabulary
from variants.errors import InputError, UsageError
from variants.request import Request, logprobs, nucleus
from variants.weights import Casts

VOCABULARY = Vocabulary(CHECKPOINT, 4096)
TOKENIZER = PromptText(CHECKPOINT)
TEXTS = ("The quick brown fox", "naïve café", "漢字と仮名", "🙂🙃 🙂", "a<|eos|>b", "tabs\tand\nlines")


@pytest.mark.parametrize("seed", range(20))
def test_text_by_tokens_is_the_tokenizers_own(seed: int) -> None:
    """Any ids, also ones that end or begin within a character, joined one by one, are what the tokenizer decodes."""
    draw = random.Random(seed)
    ids = [draw.randrange(3, 4096) for _ in range(draw.randrange(1, 60))]
    said = Transcript(VOCABULARY)
    parts = [said.add(i)[0] for i in ids]
    assert "".join(parts) + said.end()[0] == TOKENIZER._tokenizer.decode(ids, skip_special_tokens=True)
    assert VOCABULARY.text(ids) == TOKENIZER._tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("text", TEXTS)
def test_a_character_is_said_when_it_is_whole(text: str) -> None:
    """No part of one is ever said; special tokens only where they are asked for."""
    ids = VOCABULARY.encode(text, longest=100)
    assert ids == TOKENIZER.ids(text)
    for skip in (False, True):
        said = Transcript(VOCABULARY, skip_special=skip)
        parts = [said.add(i)[0] for i in ids]
        assert not any("\ufffd" in p for p in parts)
        assert "".join(parts) == (text.replace("<|eos|>", "") if skip else text)


@pytest.mark.parametrize("text", TEXTS)
def test_every_stop_of_every_text_is_kept_back(text: str) -> None:
    """Whatever part of a text is the stop, all before it is said, nothing of it, and never more than is sure."""
    ids = VOCABULARY.encode(text, longest=100)
    for start in range(len(text)):
        for end in range(start + 1, len(text) + 1):
            stop, said, parts = text[start:end], None, []
            said = Transcript(VOCABULARY, stops=(stop, "never"), skip_special=False)
            for token in ids:
                part, stopped = said.add(token)
                parts.append(part)
                assert text[: text.index(stop)].startswith("".join(parts))
                if stopped:
                    break
            assert stopped
            assert "".join(parts) == text[: text.index(stop)]


def test_what_only_looked_like_a_stop_is_said_in_the_end() -> None:
    """Half a character at the end is U+FFFD, and a stop that it completes is one."""
    ids = VOCABULARY.encode("abcab", longest=9)
    said = Transcript(VOCABULARY, stops=("abd",))
    assert "".join(said.add(i)[0] for i in ids) + said.end()[0] == "abcab"
    half = next(i for i in range(4096) if VOCABULARY.bytes_of(i) == "é".encode()[:1])
    said = Transcript(VOCABULARY, stops=("\ufffd",))
    assert said.add(half) == ("", False)
    assert said.end() == ("", True)


def test_the_names_of_tokens_are_all_different() -> None:
    """Also of those that are part of a character, so that no logprob hides another."""
    assert len({VOCABULARY.name(i) for i in range(4096)}) == 4096


def test_a_folder_without_a_tokenizer_is_served_by_ids(tmp_path: Path) -> None:
    """Ids in and out; a text is refused; another kind of tokenizer is refused at the start."""
    none = Vocabulary(tmp_path, 10)
    assert (none.text([1]), none.name(1)) == ("", "token_id:1")
    with pytest.raises(ApiError, match="no tokenizer"):
        none.encode("a", longest=9)
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {}}, "decoder": {"type": "Metaspace"}}')
    with pytest.raises(InputError, match="byte-level"):
        Vocabulary(tmp_path, 10)


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ bos_token }}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_a_conversation_is_a_prompt(tmp_path: Path) -> None:
    """Chat answers as the completion of the rendered text does, whole and streamed; a template may refuse."""
    folder = tmp_path / "chatty"
    folder.mkdir()
    for file in Path(CHECKPOINT).iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    template = load(folder)
    assert template is not None
    engine = local()
    checkpoint = type(engine.casts.checkpoint)(**{**vars(engine.casts.checkpoint), "path": folder})
    chatty = LocalEngine(Casts(checkpoint), engine.variant, name="chatty", device=engine.device)
    messages = [{"role": "user", "content": [{"type": "text", "text": "The "}, {"type": "text", "text": "quick"}]}]
    text = template.render([{"role": "user", "content": "The quick"}])
    assert text == "<|bos|>user: The quick\nassistant:"
    with serving(chatty) as server, Client(server.url) as client:
        want = client.said(text, max_tokens=5)["text"]
        asked = {"messages": messages, "temperature": 0, "max_completion_tokens": 5}
        whole = client.http.post("/v1/chat/completions", json={**asked, "logprobs": True, "top_logprobs": 2}).json()
        (choice,) = whole["choices"]
        assert choice["message"] == {"role": "assistant", "content": want}
        assert [len(c["top_logprobs"]) for c in choice["logprobs"]["content"]] == [2] * 5
        assert bytes(b for c in choice["logprobs"]["content"] for b in c["bytes"]).decode() == want
        lines = client.http.post("/v1/chat/completions", json={**asked, "stream": True}).text.split("\n\n")
        events = [json.loads(x.removeprefix("data: ")) for x in lines if x and x != "data: [DONE]"]
        assert events[0]["choices"][0]["delta"]["role"] == "assistant"
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == want
        assert {e["object"] for e in events} == {"chat.completion.chunk"}
        for wrong in ([{"role": "tool", "content": "x"}], [{"role": "user", "content": None}], []):
            answer = client.http.post("/v1/chat/completions", json={"messages": wrong})
            assert answer.status_code == 400, wrong
        unbounded = client.http.post("/v1/chat/completions", json={"messages": messages, "stop": want[:3]}).json()
        assert unbounded["usage"]["completion_tokens"] <= 256


def test_a_template_reaches_nothing(tmp_path: Path) -> None:
    """The sandbox refuses what is not a template's business."""
    (tmp_path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    template = load(tmp_path)
    assert template is not None
    with pytest.raises(ApiError, match="refuses"):
        template.render([])
    (tmp_path / "chat_template.jinja").write_text("{% broken")
    with pytest.raises(InputError, match="cannot be read"):
        load(tmp_path)


@pytest.mark.parametrize("top", [0, 1, 3, 20, 67])
def test_the_best_tokens_are_those_of_a_whole_sort(top: int) -> None:
    """In decreasing order, ties to the lower id, also where the last place is tied."""
    draw = torch.Generator().manual_seed(top)
    for levels in (1, 3, 1000):
        logits = torch.randint(levels, (67,), generator=draw).float()
        whole = torch.sort(logits.double(), descending=True, stable=True).indices[:top].tolist()
        assert [i for i, _ in logprobs(logits, 5, top).top] == whole


def test_a_nucleus_holds_its_share_and_no_more() -> None:
    """The fewest likeliest tokens with the share, the lower id on ties; at least one."""
    weights = torch.tensor([0.1, 0.4, 0.1, 0.4], dtype=torch.float64)
    for share, kept in (
        (1e-9, [1]),
        (0.4, [1]),
        (0.41, [1, 3]),
        (0.8, [1, 3]),
        (0.85, [0, 1, 3]),
        (0.95, [0, 1, 2, 3]),
    ):
        assert nucleus(weights, share).nonzero().flatten().tolist() == kept, share
    for wrong in (0.0, -1.0, 1.1, float("nan")):
        with pytest.raises(UsageError, match="top_p"):
            Request(ids=(1,), max_tokens=1, top_p=wrong)
