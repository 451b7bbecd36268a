"""Answers in the API's shapes: of `/v1/completions`, whole and as events; logprobs as its legacy form has them."""

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

from harness.serving.sequence import Piece, Sequence
from harness.serving.vocabulary import Vocabulary
from variants.request import Logprobs


@dataclass(frozen=True, kw_only=True)
class Style:
    """How answers are written. top: logprobs with each token; None: none. as_ids: tokens are named token_id:N."""

    vocabulary: Vocabulary
    top: int | None
    echo: bool
    token_ids: bool
    as_ids: bool
    prompt_top: int | None
    skip_special: bool = True

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self.as_ids else self.vocabulary.name(token)

    def ranked(self, said: Logprobs) -> dict[str, float]:
        """The best tokens by name, and the one that was taken, which may be none of them."""
        return {self.name(i): value for i, value in (*said.top, (said.token, said.logprob))}


@dataclass
class Choice:
    """One answer and what is in it so far; `part` makes of new pieces what they add to it."""

    style: Style
    sequence: Sequence
    index: int
    prompt_text: str
    prompt_offsets: list[int]
    begun: bool = False
    tokens: list[int] = field(default_factory=list)

    def part(self, pieces: Many[Piece]) -> dict[str, Any]:
        """A choice of the API with what these pieces add, the prompt before the first of them where it is echoed."""
        style, first, self.begun = self.style, not self.begun, True
        new = [p for p in pieces if p.token is not None]
        self.tokens += [p.token for p in new if p.token is not None]
        echo = style.echo and first
        out: dict[str, Any] = {
            "index": self.index,
            "text": (self.prompt_text if echo else "") + "".join(p.text for p in pieces),
            "logprobs": None,
            "finish_reason": pieces[-1].finish if pieces else None,
        }
        if style.top is not None:
            out["logprobs"] = self._logprobs(new, pieces[0].prompt if echo else None)
        if style.token_ids:
            out["token_ids"] = [p.token for p in new]
            if first:
                out["prompt_token_ids"] = list(self.sequence.request.ids)
        if style.prompt_top is not None and first:
            out["prompt_logprobs"] = [None, *(self._vllm(x) for x in pieces[0].prompt)]
        return out

    def _logprobs(self, new: Many[Piece], prompt: Many[Logprobs] | None) -> dict[str, list[Any]]:
        """tokens, token_logprobs, top_logprobs, text_offset; the first token of a prompt has no logprob."""
        style, base = self.style, len(self.prompt_text) if self.style.echo else 0
        said = [p.logprobs for p in new if p.logprobs is not None]
        out = {
            "tokens": [style.name(x.token) for x in said],
            "token_logprobs": [x.logprob for x in said],
            "top_logprobs": [style.ranked(x) for x in said],
            "text_offset": [base + p.offset for p in new],
        }
        if prompt is None:
            return out
        assert style.top is not None
        before: dict[str, list[Any]] = {
            "tokens": [style.name(t) for t in self.sequence.request.ids],
            "token_logprobs": [None, *(x.logprob for x in prompt)],
            "top_logprobs": [None, *(style.ranked(_cut(x, style.top)) for x in prompt)],
            "text_offset": self.prompt_offsets,
        }
        return {name: before[name] + values for name, values in out.items()}

    def _vllm(self, said: Logprobs) -> dict[str, dict[str, Any]]:
        """vLLM's prompt_logprobs: by id; a rank only where the list tells it."""
        assert self.style.prompt_top is not None
        top = said.top[: self.style.prompt_top]
        ranks = {i: n for n, (i, _) in enumerate(top, 1)}
        return {
            str(i): {"logprob": value, "rank": ranks.get(i), "decoded_token": self.style.vocabulary.name(i)}
            for i, value in (*top, (said.token, said.logprob))
        }


def _cut(said: Logprobs, top: int) -> Logprobs:
    return Logprobs(said.token, said.logprob, said.top[:top])


def usage_of(choices: Many[Choice], prompt_tokens: int) -> dict[str, int]:
    """prompt_tokens: each prompt's once, however many answers it has."""
    made = sum(len(c.tokens) for c in choices)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": made, "total_tokens": prompt_tokens + made}


def chat_logprobs(style: Style, pieces: Many[Piece]) -> dict[str, Any]:
    """The chat API's logprobs: an object a token."""
    said = [p.logprobs for p in pieces if p.logprobs is not None]
    return {"content": [{**_chat(style, x.token, x.logprob), "top_logprobs": _top(style, x)} for x in said]}


def _top(style: Style, said: Logprobs) -> list[dict[str, Any]]:
    return [_chat(style, i, value) for i, value in said.top]


def _chat(style: Style, token: int, value: float) -> dict[str, Any]:
    return {"token": style.name(token), "logprob": value, "bytes": list(style.vocabulary.bytes_of(token))}
