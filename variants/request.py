"""What is asked of a runner and what it answers, token by token."""

from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from variants.decode import greedy, is_finite
from variants.errors import UsageError


class Finish(Enum):
    """Why a request ended: an end token, or as many tokens as were asked for."""

    stop = "stop"
    length = "length"


@dataclass(frozen=True, kw_only=True)
class Request:
    """Token ids to go on from.

    max_tokens: 0 asks for the prompt's logprobs alone. temperature: 0 is greedy, the lowest id on ties; above it the
    draw of each token depends on the seed and the token's number alone, not on what runs beside it. top_p: draw among
    the fewest likeliest tokens that hold this share. stop: ids that end the answer, the last one of it. forced: tokens
    that are taken in place of chosen ones. prompt_top: give the logprobs of the prompt's own tokens too, each with so
    many of the best.
    """

    ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: frozenset[int] = frozenset()
    forced: tuple[int, ...] | None = None
    prompt_top: int | None = None

    def __post_init__(self) -> None:
        if not self.ids:
            raise UsageError("request: got no prompt tokens, expected one or more")
        if self.max_tokens < (self.prompt_top is None):
            raise UsageError(f"request: max_tokens={self.max_tokens}, expected 1 or more (0 with prompt logprobs)")
        if not (0 <= self.temperature < float("inf")) or self.seed < 0:
            raise UsageError(f"request: temperature={self.temperature} seed={self.seed}, expected 0 or more of each")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"request: top_p={self.top_p}, expected a share above 0 and up to 1")
        if self.forced is not None and len(self.forced) < self.max_tokens:
            raise UsageError(f"request: {len(self.forced)} forced tokens for max_tokens={self.max_tokens}")

    @property
    def longest(self) -> int:
        """Tokens that are run when nothing ends it early: all but the last of the answer."""
        return len(self.ids) + max(self.max_tokens - 1, 0)


@dataclass(frozen=True)
class Logprobs:
    """A token's logprob in nats and the best tokens with theirs, in decreasing order, ties to the lower id."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Output:
    """One token of one request, or none where only the prompt was asked about.

    index: the token's number in the answer. logits [V], as stored. prompt: logprobs of the prompt's tokens from the
    second on, with the first output of a request that asked for them. finite: False where the logits hold a NaN or an
    infinity: the token then means nothing.
    """

    request: int
    index: int
    token: int | None
    logits: Tensor
    finish: Finish | None
    finite: bool
    prompt: tuple[Logprobs, ...] = ()

    def logprobs(self, top: int = 0) -> Logprobs:
        assert self.token is not None, "an output without a token has no logprob"
        return logprobs(self.logits, self.token, top)


def logprobs(logits: Tensor, token: int, top: int) -> Logprobs:
    """Log-softmax in float64 of logits [V]."""
    row = torch.log_softmax(logits.double(), -1)
    return Logprobs(token, float(row[token]), tuple((i, float(row[i])) for i in _best(row, top)))


def _best(row: Tensor, top: int) -> list[int]:
    """Ids of the `top` largest of [V], ties to the lower id: only what may be among them is sorted."""
    if not top:
        return []
    least = row.topk(min(top, len(row))).values[-1]
    near = (row >= least).nonzero().squeeze(1)
    return near[torch.sort(row[near], descending=True, stable=True).indices[:top]].tolist()


def chosen(request: Request, index: int, logits: Tensor, best: int, *, finite: bool) -> int:
    """The token number `index` of an answer; best: the greedy one of these logits [V], finite: whether they all are.

    Sampling inverts the cumulative softmax in float64, in the order of ids, at a draw of Philox keyed by seed and
    index; logits that are not finite give the greedy token, which then means nothing either.
    """
    if request.forced is not None:
        return request.forced[index]
    if not request.temperature or not finite:
        return best
    draw = np.random.Generator(np.random.Philox(key=request.seed, counter=index)).random()
    row = logits.double().cpu()
    weights = torch.softmax((row - row.amax()) / request.temperature, -1)  # a tiny temperature overflows no quotient
    upto = (weights if request.top_p == 1 else nucleus(weights, request.top_p)).cumsum(-1)
    last = torch.searchsorted(upto, upto[-1:])[0]  # the last id that has a share
    return int(torch.searchsorted(upto, draw * upto[-1], right=True).clamp_max(last))


def nucleus(weights: Tensor, top_p: float) -> Tensor:
    """Weights [V] of the fewest likeliest tokens that hold the share top_p, 0 for all others; ties: lower ids first."""
    order = torch.sort(weights, descending=True, stable=True).indices
    ahead = weights[order].cumsum(-1) - weights[order]
    return torch.zeros_like(weights).index_put((order[ahead < top_p],), weights[order[ahead < top_p]])


def told(logits: Tensor) -> Tensor:
    """What the host is told of logits [B, V]: int64 [B, 2] of each row's greedy token and whether it is finite."""
    return torch.stack([greedy(logits), is_finite(logits).long()], 1)
