"""One answer of a request on its way: what is asked of the runner, and each of its tokens as a piece of the answer."""

import time
from dataclasses import dataclass, field

from harness.serving.transcript import Transcript
from variants.request import Finish, Logprobs, Output, Request

NOT_FINITE = "the model's logits are not finite at token {}: the answer means nothing"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What a step added to an answer.

    token: None where no token came (the prompt alone was asked about, or a failure). text: what may be said now.
    offset: characters of the answer before the token. prompt: logprobs of the prompt from its second token on. finish:
    `stop`, `length`, or `cancelled`; None goes on. error: why there is no answer; the sequence has then ended too.
    """

    token: int | None = None
    text: str = ""
    offset: int = 0
    logprobs: Logprobs | None = None
    prompt: tuple[Logprobs, ...] = ()
    finish: str | None = None
    error: str | None = None
    code: str | None = None

    @property
    def last(self) -> bool:
        return self.finish is not None or self.error is not None


@dataclass(eq=False)
class Sequence:
    """One answer. top: logprobs with each token, so many of the best; None for none.

    place: which choice of which ticket it is. arrived_s, first_s, last_s: of the monotonic clock.
    """

    request: Request
    transcript: Transcript
    top: int | None
    place: int
    owner: object
    number: int | None = None
    made: int = 0
    arrived_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    last_s: float | None = None

    @property
    def entries(self) -> int:
        """Tokens and logprobs that its answer may hold, which is what it costs in memory."""
        request = self.request
        prompt = 0 if request.prompt_top is None else len(request.ids) * (request.prompt_top + 1)
        return prompt + request.max_tokens * ((self.top or 0) + 1)

    def take(self, output: Output) -> Piece:
        """The piece that an output of the runner is."""
        self.last_s = time.monotonic()
        self.first_s = self.first_s or self.last_s
        if not output.finite or any(x.logprob != x.logprob for x in output.prompt):
            return Piece(error=NOT_FINITE.format(output.index), code="non_finite_logits")
        if output.token is None:
            return Piece(prompt=output.prompt, finish=Finish.length.value)
        self.made += 1
        offset = len(self.transcript.text)
        text, stopped = self.transcript.add(output.token)
        finish = Finish.stop.value if stopped else output.finish and output.finish.value
        if finish and not stopped:
            rest, stopped = self.transcript.end()
            text, finish = text + rest, Finish.stop.value if stopped else finish
        return Piece(
            token=output.token,
            text=text,
            offset=offset,
            logprobs=None if self.top is None else output.logprobs(self.top),
            prompt=output.prompt,
            finish=finish,
        )
