"""A request that was let in, and its answer: whole, or as events while its tokens come."""

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from harness.serving.answers import Choice, Style, chat_logprobs, usage_of
from harness.serving.desk import Ticket
from harness.serving.requests import ChatRequest, CompletionRequest
from harness.serving.sequence import Piece
from harness.serving.service import Service
from harness.serving.wire import EventStream, Whole, unless_gone


@dataclass(kw_only=True)
class Answering:
    """A request that was let in: its ticket, its choices, how it is answered."""

    service: Service
    asked: CompletionRequest | ChatRequest
    style: Style
    ticket: Ticket
    choices: list[Choice]
    prompt_tokens: int
    number: str = field(default_factory=lambda: secrets.token_hex(12))

    @property
    def chat(self) -> bool:
        return isinstance(self.asked, ChatRequest)

    async def answer(self, http: Request) -> Response:
        """Whole, or as events."""
        if self.asked.stream:
            return EventStream(self.ticket, self._events(), self.service.limits)
        with ExitStack() as held:
            held.enter_context(self.ticket)
            content = await unless_gone(http, self._whole())
            return Whole(content, held.pop_all(), self.service.limits)

    async def _whole(self) -> dict[str, Any]:
        pieces: list[list[Piece]] = [[] for _ in self.choices]
        async for batch in self.ticket.pieces():
            for place, piece in batch:
                pieces[place].append(piece)
        parts = [c.part(p) for c, p in zip(self.choices, pieces, strict=True)]
        if self.chat:
            parts = [self._message(c, p, "message") for c, p in zip(parts, pieces, strict=True)]
        whole = self._head("chat.completion" if self.chat else "text_completion")
        return whole | {"choices": parts, "usage": usage_of(self.choices, self.prompt_tokens)}

    async def _events(self) -> AsyncGenerator[dict[str, Any], None]:
        """An event a choice for what has come since the last; all at once where the reader is slow."""
        head = self._head("chat.completion.chunk" if self.chat else "text_completion")
        async for batch in self.ticket.pieces():
            for choice in self.choices:
                pieces = [piece for place, piece in batch if place == choice.index]
                first = not choice.begun
                if not pieces:
                    continue
                part = choice.part(pieces)
                if self.chat:
                    part = self._message(part, pieces, "delta")
                    if first:
                        part["delta"] = {"role": "assistant", **part["delta"]}
                elif not (part["text"] or part["logprobs"] or part.get("token_ids") or part["finish_reason"]):
                    continue
                yield head | {"choices": [part]}
        if self.asked.stream_options is not None and self.asked.stream_options.include_usage:
            yield head | {"choices": [], "usage": usage_of(self.choices, self.prompt_tokens)}

    def _head(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {
            "id": f"{prefix}-{self.number}",
            "object": kind,
            "created": int(time.time()),
            "model": self.service.name,
        }

    def _message(self, part: dict[str, Any], pieces: Sequence[Piece], key: str) -> dict[str, Any]:
        """A choice of the legacy form as one of the chat API."""
        said = {"content": part.pop("text")} | ({"role": "assistant"} if key == "message" else {})
        part["logprobs"] = None if self.style.top is None else chat_logprobs(self.style, pieces)
        return {"index": part.pop("index"), key: said, **part}
