"""Continuous batching: requests join and leave between steps, prompts run in pieces beside sequences that decode.

runner = Runner(model, max_len=4096)
number = runner.add(Request(ids=(1, 2, 3), max_tokens=16))
while runner.busy:
    for output in runner.step().outputs: ...

Given the same calls in the same order every step is the same. A step makes one forward for the sequences that decode
and one for every `prefill_batch` pieces, so the number of rows of each product follows who runs: `Stepped.passes`
names it, and `batch_dependent` of the recipe says where bits may follow it. Under `execution.graph` a decode is the
replay of a graph (`variants.decode_graph`), unless a probe watches.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from variants.axes import Execution, ExecutionAxes, Graph
from variants.batch import NOBODY
from variants.decode import padded
from variants.decode_graph import DecodeGraphs
from variants.errors import UsageError
from variants.model import Model
from variants.request import Finish, Logprobs, Output, Request, chosen, logprobs, told
from variants.rounding import NoProbe
from variants.scheduler import Live, Scheduler
from variants.state import State


@dataclass(frozen=True)
class Pass:
    """One forward: its phase, the requests of its rows, the tokens of each, tokens a row is filled up to, seconds.

    rows: NOBODY for a row that fills the batch up.
    """

    phase: str
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    width: int
    seconds: float


@dataclass(frozen=True)
class Stepped:
    """What one step gave."""

    outputs: tuple[Output, ...]
    passes: tuple[Pass, ...]


@dataclass(frozen=True)
class Stats:
    """Where a runner stands. pages_cached: of those in use, held by kept prefixes."""

    waiting: int
    running: int
    slots: int
    pages: int
    pages_used: int
    pages_cached: int
    preemptions: int
    prefix_hit_tokens: int


class Runner:
    """Runs requests on one model under `execution.mode: paged`. max_len: prompt and answer of the longest request."""

    def __init__(self, model: Model, *, max_len: int) -> None:
        run = model.recipe.execution
        if run.mode is not Execution.paged:
            raise UsageError(f"a runner needs execution.mode=paged, got {run.mode.name}")
        self.model, self.run = model, run
        self.state = model.new_state(slots=run.batch + run.prefix_cache, max_len=max_len, pages=pages_for(run, max_len))
        self.scheduler = Scheduler(self.state, run)
        graphed = run.graph is Graph.cuda and isinstance(model.probe, NoProbe)
        self.graphs = DecodeGraphs(model, self.state) if graphed else None
        self.live: dict[int, Live] = {}
        self.next_number = 0

    def add(self, request: Request) -> int:
        """Queue a request; its number. Raises UsageError for one that does not fit or has ids that the model lacks."""
        vocab = self.model.config.vocab_size
        if not all(0 <= token < vocab for token in (*request.ids, *(request.forced or ()))):
            raise UsageError(f"request: a token id outside 0..{vocab - 1}; another tokenizer made it")
        live = Live(self.next_number, request)
        self.scheduler.add(live)
        self.live[live.number] = live
        self.next_number += 1
        return live.number

    def cancel(self, number: int) -> bool:
        """End a request and free what it owns; False where it has ended already."""
        live = self.live.pop(number, None)
        if live is None:
            return False
        self.scheduler.leave(live)
        return True

    @property
    def busy(self) -> bool:
        return bool(self.live)

    def step(self) -> Stepped:
        """Run what the scheduler chose; outputs in the order of arrival within prefill, then within decode."""
        schedule = self.scheduler.schedule()
        outputs: list[Output] = []
        passes: list[Pass] = []
        for start in range(0, len(schedule.prefill), self.run.prefill_batch):
            self._prefill(schedule.prefill[start : start + self.run.prefill_batch], outputs, passes)
        if schedule.decode:
            self._decode(schedule.decode, outputs, passes)
        return Stepped(tuple(outputs), tuple(passes))

    def stats(self) -> Stats:
        s = self.scheduler
        return Stats(
            waiting=len(s.waiting),
            running=len(s.running),
            slots=s.slots.count,
            pages=s.pages.count,
            pages_used=len(s.pages.owners),
            pages_cached=len({page for p in s.prefixes.kept.values() for page in p.pages}),
            preemptions=s.preemptions,
            prefix_hit_tokens=s.prefixes.hit_tokens,
        )

    def _prefill(self, pieces: list[tuple[Live, int]], outputs: list[Output], passes: list[Pass]) -> None:
        began = time.perf_counter()
        rows = [live for live, _ in pieces]
        tokens, lengths = padded([x.request.ids[x.computed : x.computed + n] for x, n in pieces], self.model.device)
        last, every = self.model.forward_both(
            tokens, self.state, slots=_slots(rows), lengths=lengths, every=any(_scores(x) for x in rows)
        )
        answers = told(last).tolist()
        passes.append(_pass("prefill", rows, lengths, tokens.shape[1], began))
        for row, (live, n) in enumerate(pieces):
            if _scores(live):
                assert every is not None
                live.scored += _prompt_logprobs(live, every[row, :n])
            live.computed += n
            self._keep_prefix(live)
            if not live.in_prompt and not live.made:
                outputs.append(self._answer(live, last[row], *answers[row]))

    def _decode(self, rows: list[Live], outputs: list[Output], passes: list[Pass]) -> None:
        if self.graphs is not None:
            self.graphs.prepare(len(rows))  # a capture is no part of a pass
        began = time.perf_counter()
        tokens, slots = [x.next_token() for x in rows], _slots(rows)
        lengths = [1] * len(rows) + [0] * (self.run.filled(len(rows)) - len(rows))
        logits, known = (self._forward if self.graphs is None else self.graphs.run)(tokens, slots)
        answers = known.tolist()
        passes.append(_pass("decode", rows, lengths, 1, began))
        for live, own, answer in zip(rows, logits.unbind(0), answers, strict=False):  # rows that fill up are the last
            live.computed += 1
            if live.computed == len(live.request.ids) + len(live.made):  # else an answer that is run again
                outputs.append(self._answer(live, own, *answer))

    def _forward(self, tokens: list[int], slots: list[int]) -> tuple[Tensor, Tensor]:
        """A decode launched operation by operation: logits of all rows, and what the host is told of them."""
        fill = self.run.filled(len(slots)) - len(slots)
        ids = torch.tensor([[t] for t in tokens] + [[0]] * fill, device=self.model.device)
        lengths = [1] * len(slots) + [0] * fill
        logits = self.model.forward(ids, self.state, slots=[*slots, *[NOBODY] * fill], lengths=lengths, phase="decode")
        return logits, told(logits)

    def _keep_prefix(self, live: Live) -> None:
        assert live.slot is not None
        self.scheduler.prefixes.keep(live.request.ids, live.computed, live.table, live.slot)

    def _answer(self, live: Live, logits: Tensor, best: int, finite: int) -> Output:
        request, index = live.request, len(live.made)
        token = chosen(request, index, logits, best, finite=bool(finite)) if request.max_tokens else None
        if token is not None:
            live.made.append(token)
        finish = Finish.stop if token in request.stop else Finish.length if index + 1 >= request.max_tokens else None
        if finish:
            del self.live[live.number]
            self.scheduler.leave(live)
        prompt = tuple(live.scored) if index == 0 else ()
        return Output(request=live.number, index=index, token=token, logits=logits, finish=finish,
                      finite=bool(finite), prompt=prompt)  # fmt: skip


def pages_for(run: ExecutionAxes, max_len: int) -> int:
    """Pages that are named, or as many as `batch` sequences of max_len tokens need."""
    return run.pages or run.batch * -(-max_len // run.block_size)


def memory_plan(model: Model, *, max_len: int) -> list[str]:
    """What a runner will hold, one line a cache group, without holding it: units, bytes of each, bytes in all."""
    run = model.recipe.execution
    state = State(
        model.config,
        model.recipe,
        slots=run.batch + run.prefix_cache,
        max_len=max_len,
        device="meta",
        block_size=run.block_size,
        pages=pages_for(run, max_len),
    )
    units = {
        "kda": f"state slots ({run.batch} run, {run.prefix_cache} kept)",
        "mla": f"pages of {run.block_size} tokens",
    }
    lines = []
    for group, (layers, count, each) in state.groups().items():
        total = (count + 1) * each  # one more, which belongs to nobody
        lines.append(f"{group}: {layers} layers, {count} {units[group]}, {each} bytes each, {total / 2**20:.1f} MiB")
    return lines


def _slots(rows: Sequence[Live]) -> list[int]:
    return [x.slot for x in rows if x.slot is not None]


def _scores(live: Live) -> bool:
    return live.request.prompt_top is not None and not live.made


def _prompt_logprobs(live: Live, logits: Tensor) -> list[Logprobs]:
    """Logprobs of the tokens that follow those of a piece, as far as the prompt has them; logits [n, V]."""
    following = live.request.ids[live.computed + 1 : live.computed + 1 + len(logits)]
    assert live.request.prompt_top is not None
    return [logprobs(row, token, live.request.prompt_top) for row, token in zip(logits, following, strict=False)]


def _pass(phase: str, rows: Sequence[Live], lengths: Sequence[int], width: int, began: float) -> Pass:
    """The greedy tokens are on the host by now, so the device has really finished."""
    numbers = [x.number for x in rows] + [NOBODY] * (len(lengths) - len(rows))
    return Pass(phase, tuple(numbers), tuple(lengths), width, time.perf_counter() - began)
