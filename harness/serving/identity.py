"""One arithmetic three ways: the library on carried state, its paged runner, and the server; tokens and logprobs.

Each arm gives the same arrays, so that equal bits can be told from equal tokens.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx2
import numpy as np

from harness.config import Dialect
from harness.engines.http_server import JsonServer
from harness.engines.local import LocalEngine
from harness.engines.openai_engine import Habits, OpenAIEngine
from harness.engines.paged_rows import outputs, runner_for
from harness.engines.protocol import Generation
from harness.golden_data import ENDED, Golden
from harness.score import score
from harness.serving.build import Offer, make_service
from harness.serving.server import Beside
from harness.verdict_tokens import judge_tokens
from variants import decode
from variants.axes import Execution, ExecutionAxes, Variant
from variants.errors import EngineError
from variants.request import Logprobs, Request, logprobs

TOP = 20
TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to run a battery. generation holds tokens int32 [N, T] and the TOP best logprobs of each."""

    name: str
    generation: Generation
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """An arm beside the library's run. equal: places with its token; bits: of these, with all logprobs equal.

    furthest_nats: the largest distance of a logprob at places with one prefix. verdict: of the tokens that differ.
    """

    arm: str
    equal: int
    bits: int
    total: int
    furthest_nats: float
    verdict: str
    reason: str
    seconds: float


def incremental(variant: Variant) -> Variant:
    """The same arithmetic on carried state, a prompt at a time."""
    piece = variant.execution.prefill_piece
    return replace(variant, execution=ExecutionAxes(mode=Execution.incremental, prefill_piece=piece))


def library(engine: LocalEngine, golden: Golden) -> Arm:
    """Each prompt by itself. engine: of an incremental variant; the caller has set the numerics policy."""
    table = _Table(golden)
    began = time.monotonic()
    for n, prompt in enumerate(golden.prompts):

        def choose(t: int, logits: decode.Tensor, n: int = n) -> decode.Tensor:
            token = decode.greedy(logits)
            table.put(n, t, logprobs(logits[0], int(token), TOP))
            return token

        decode.steps(engine.model, [prompt], table.length, choose)
    return table.arm("library", began)


def runner(engine: LocalEngine, golden: Golden) -> Arm:
    """All prompts through the paged runner, as its batch takes them."""
    table = _Table(golden)
    began = time.monotonic()
    requests = [Request(ids=p, max_tokens=table.length) for p in golden.prompts]
    for output in outputs(runner_for(engine.model, requests), requests):
        table.put(output.request, output.index, output.logprobs(TOP))
    return table.arm("runner", began)


def server(engine: LocalEngine, golden: Golden, *, at_once: int, others: int, folder: Path) -> Arm:
    """The gate as a client of a server of its own. at_once: requests; others: clients beside it that come and go."""
    longest = max(map(len, golden.prompts)) + golden.tokens.shape[2]
    service = make_service(engine, Offer(max_len=longest, queue=at_once + 2 * others + 1))
    with Beside(service) as beside:
        asked = JsonServer(beside.url, timeout_s=TIMEOUT_S, retries=0)
        habits = Habits(dialect=Dialect.vllm, top_k=TOP, concurrency=at_once, folder=folder)
        began = time.monotonic()
        with _company(beside.url, others, longest, engine.casts.checkpoint.config.vocab_size):
            made = OpenAIEngine(asked, habits).generate(golden.prompts, golden.tokens.shape[2])
        seconds = time.monotonic() - began
    left = service.desk.live, service.desk.engine.stats.pages_used
    if left != (0, 0):
        raise EngineError(f"the server kept {left[0]} answers and {left[1]} pages after all had ended")
    name = f"server, {at_once} at a time" + (f", {others} others beside" if others else "")
    return Arm(name=name, generation=made, seconds=seconds)


def compare(reference: Arm, arm: Arm, golden: Golden) -> Comparison:
    """An arm held against the library's run, with the verdict by tokens on what differs."""
    ours, theirs = reference.generation, arm.generation
    same = ours.tokens == theirs.tokens
    shared = np.logical_and.accumulate(np.pad(same[:, :-1], ((0, 0), (1, 0)), constant_values=True), axis=1)
    assert ours.top_logprobs is not None
    assert theirs.top_logprobs is not None
    alike = (ours.top_ids == theirs.top_ids) & (ours.top_logprobs == theirs.top_logprobs)
    run = as_golden(golden, ours)
    verdict = judge_tokens(run, theirs, score(run, theirs), noise=None)
    return Comparison(
        arm=arm.name,
        equal=int(same.sum()),
        bits=int((alike.all(-1) & same).sum()),
        total=same.size,
        furthest_nats=float(np.abs(ours.top_logprobs - theirs.top_logprobs)[shared].max()),
        verdict=verdict.run_class.value,
        reason=verdict.reason,
        seconds=arm.seconds,
    )


def as_golden(golden: Golden, made: Generation) -> Golden:
    """A run as the reference that others are held against, on the golden's prompts."""
    return replace(
        golden,
        tokens=made.tokens[None],
        top_ids=made.top_ids,
        top_logprobs=made.top_logprobs,
        recorded=None,
        provenance={"engine": "library"},
    )


class _Table:
    """Tokens and logprobs of a battery as they come."""

    def __init__(self, golden: Golden) -> None:
        shape = len(golden.prompts), golden.tokens.shape[2]
        self.prompts, self.length = golden.prompts, golden.tokens.shape[2]
        self.tokens = np.full(shape, ENDED, np.int32)
        self.top_ids = np.full((*shape, TOP), -1, np.int32)
        self.top_logprobs = np.full((*shape, TOP), np.nan)

    def put(self, n: int, t: int, said: Logprobs) -> None:
        self.tokens[n, t] = said.token
        self.top_ids[n, t] = [i for i, _ in said.top]
        self.top_logprobs[n, t] = [value for _, value in said.top]

    def arm(self, name: str, began: float) -> Arm:
        made = Generation(
            tokens=self.tokens,
            finite=np.asarray(np.isfinite(self.top_logprobs).all(-1)),
            gaps=self.top_logprobs[..., 0] - self.top_logprobs[..., 1],
            prefill_s=np.full(len(self.tokens), np.nan),
            prefill_tokens=np.array([len(p) for p in self.prompts]),
            decode_s=(),
            top_ids=self.top_ids,
            top_logprobs=self.top_logprobs,
        )
        return Arm(name=name, generation=made, seconds=time.monotonic() - began)


@contextmanager
def _company(url: str, count: int, longest: int, vocab: int) -> Iterator[None]:
    """Other clients for as long as the block lasts: prompts of their own, and most leave before their answer ends."""
    stop = threading.Event()
    threads = [threading.Thread(target=_other, args=(url, n, longest, vocab, stop.is_set)) for n in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _other(url: str, seed: int, longest: int, vocab: int, ended: Callable[[], bool]) -> None:
    draw = random.Random(seed)
    with httpx2.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:
        while not ended():
            ids = [draw.randrange(3, vocab) for _ in range(draw.randrange(1, longest // 2))]
            body = {"prompt": ids, "max_tokens": longest // 2, "temperature": 1.0, "seed": seed, "stream": True}
            leave = draw.randrange(1, longest // 2)
            with client.stream("POST", "/v1/completions", json=body) as answer:
                for number, _ in enumerate(answer.iter_lines()):
                    if number > leave or ended():
                        break
