"""From the fields of a request to sequences for the engine: what cannot be run is refused before anything runs."""

import asyncio
import secrets
from dataclasses import dataclass

from harness.serving.answering import Answering
from harness.serving.answers import Choice, Style
from harness.serving.api_error import ApiError
from harness.serving.desk import Ticket
from harness.serving.requests import ChatRequest, CompletionRequest
from harness.serving.sequence import Sequence
from harness.serving.service import Service
from harness.serving.transcript import Transcript
from variants.request import Request

SEED_BITS = 64
DEFAULT_TOKENS = 16  # of a completion, as the API has it


async def complete(service: Service, asked: CompletionRequest) -> Answering:
    """Let a completion in. Raises ApiError."""
    service.check_model(asked.model)
    _check_completion(service, asked)
    service.desk.check_open(len(asked.prompt) * asked.choices)
    prompts = [await _ids(service, p, add_special=asked.add_special_tokens) for p in asked.prompt]
    style = Style(
        vocabulary=service.vocabulary,
        top=asked.logprobs,
        echo=bool(asked.echo),
        token_ids=bool(asked.return_token_ids),
        as_ids=bool(asked.return_tokens_as_token_ids),
        prompt_top=asked.prompt_logprobs,
        skip_special=asked.skip_special_tokens,
    )
    tokens = DEFAULT_TOKENS if asked.max_tokens is None else asked.max_tokens
    return _Draft(service, asked, style, tokens).let_in(prompts)


def _check_completion(service: Service, asked: CompletionRequest) -> None:
    scores = asked.echo or asked.prompt_logprobs is not None
    if asked.max_tokens == 0 and not scores:
        raise ApiError(400, "max_tokens: 0 asks for nothing without echo or prompt_logprobs", param="max_tokens")
    if asked.best_of not in (None, asked.choices):
        raise ApiError(400, "best_of: this server chooses none out of several; leave it out", param="best_of")
    if asked.cache_salt is not None and service.shares_prefixes:
        raise ApiError(400, "cache_salt: the prefix cache is on and knows no salts", param="cache_salt")


async def chat(service: Service, asked: ChatRequest) -> Answering:
    """Let a chat completion in. Raises ApiError."""
    service.check_model(asked.model)
    if service.template is None:
        raise ApiError(400, "this model's tokenizer has no chat template; use /v1/completions", code="no_chat_template")
    if asked.top_logprobs is not None and not asked.logprobs:
        raise ApiError(400, "top_logprobs: needs logprobs=true", param="top_logprobs")
    service.desk.check_open(asked.choices)
    messages = [m.model_dump(exclude_none=True) for m in asked.messages]
    for message in messages:
        if isinstance(message["content"], list):
            message["content"] = "".join(part["text"] for part in message["content"])
    text = await asyncio.to_thread(service.template.render, messages)
    ids = await _ids(service, text, add_special=False)
    style = Style(
        vocabulary=service.vocabulary,
        top=(asked.top_logprobs or 0) if asked.logprobs else None,
        echo=False,
        token_ids=bool(asked.return_token_ids),
        as_ids=False,
        prompt_top=None,
        skip_special=asked.skip_special_tokens,
    )
    room = max(1, service.longest - len(ids))
    return _Draft(service, asked, style, asked.max_completion_tokens or asked.max_tokens or room).let_in([ids])


async def _ids(service: Service, prompt: str | list[int], *, add_special: bool) -> list[int]:
    """Token ids of a prompt; a text is read beside the event loop, for a long one takes its time."""
    vocabulary, longest = service.vocabulary, service.longest
    if isinstance(prompt, str):
        ids = await asyncio.to_thread(vocabulary.encode, prompt, add_special=add_special, longest=longest)
        if not ids:
            raise ApiError(400, "prompt: the text has no token", param="prompt")
        prompt = ids
    if max(prompt) >= vocabulary.size:
        raise ApiError(400, f"prompt: a token id outside 0..{vocabulary.size - 1}", param="prompt")
    return prompt


@dataclass(frozen=True)
class _Draft:
    """A request whose prompts are ids by now."""

    service: Service
    asked: CompletionRequest | ChatRequest
    style: Style
    max_tokens: int

    def let_in(self, prompts: list[list[int]]) -> Answering:
        """Every answer as a sequence, those of one prompt together. Raises ApiError."""
        if self.asked.stream_options is not None and not self.asked.stream:
            raise ApiError(400, "stream_options: needs stream=true", param="stream_options")
        for ids in prompts:
            self._check_length(len(ids))
        drawn = secrets.randbits(SEED_BITS) if self.asked.seed is None else self.asked.seed % 2**SEED_BITS
        # The answers of one prompt draw from keys that differ above the seed's own bits; the first from the seed's.
        keys = [(ids, drawn + (n << SEED_BITS)) for ids in prompts for n in range(self.asked.choices)]
        ticket = Ticket(self.service.desk)
        choices = [self._choice(place, self._request(*key), ticket) for place, key in enumerate(keys)]
        self.service.desk.admit([c.sequence for c in choices], ticket)
        return Answering(
            service=self.service,
            asked=self.asked,
            style=self.style,
            ticket=ticket,
            choices=choices,
            prompt_tokens=sum(map(len, prompts)),
        )

    def _check_length(self, prompt: int) -> None:
        if prompt + self.max_tokens > self.service.longest:
            raise ApiError(
                400,
                f"this model's maximum context length is {self.service.longest} tokens; you asked for {prompt} of a "
                f"prompt and {self.max_tokens} of an answer",
                param="max_tokens" if prompt < self.service.longest else "prompt",
                code="context_length_exceeded",
            )

    def _request(self, ids: list[int], seed: int) -> Request:
        style = self.style
        wanted = [top for top in (style.top if style.echo else None, style.prompt_top) if top is not None]
        if not self.max_tokens:
            wanted.append(0)
        return Request(
            ids=tuple(ids),
            max_tokens=self.max_tokens,
            temperature=self.asked.heat,
            top_p=self.asked.share,
            seed=seed,
            stop=frozenset() if self.asked.ignore_eos else self.service.stop,
            prompt_top=max(wanted, default=None),
        )

    def _choice(self, place: int, request: Request, ticket: Ticket) -> Choice:
        style = self.style
        transcript = Transcript(style.vocabulary, stops=self.asked.stop, skip_special=style.skip_special)
        text, offsets = transcript.prompt(request.ids) if style.echo else ("", [])
        sequence = Sequence(request=request, transcript=transcript, top=style.top, place=place, owner=ticket)
        return Choice(style, sequence, place, text, offsets)
