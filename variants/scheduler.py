"""Who runs in the next step, and who owns which slot and pages: no tensor is computed here.

First come, first served. A step holds one token of every sequence that decodes, and prefill pieces as far as the
token budget goes. Where pages run out, prefixes are let go first; then the sequence that came last gives its pages up
and waits to come back. A token's path is always the same: prompt tokens through prefill pieces on one grid, answer
tokens through decode, again when it is run again; so what happened to a sequence never shows in its bits.
"""

from bisect import insort
from dataclasses import dataclass, field

from variants.axes import ExecutionAxes, Preempt
from variants.errors import UsageError
from variants.pool import Pool
from variants.prefix import PrefixCache
from variants.request import Logprobs, Request
from variants.state import Saved, State


@dataclass(eq=False)
class Live:
    """A request on its way. computed: tokens that slot and pages hold. saved: what they held, while it is away."""

    number: int
    request: Request
    made: list[int] = field(default_factory=list)
    computed: int = 0
    slot: int | None = None
    table: list[int] = field(default_factory=list)
    saved: Saved | None = None
    scored: list[Logprobs] = field(default_factory=list)

    @property
    def in_prompt(self) -> bool:
        return self.computed < len(self.request.ids)

    def piece(self, size: int) -> int:
        """Tokens of the next prefill piece."""
        left = len(self.request.ids) - self.computed
        return min(size or left, left)

    def next_token(self) -> int:
        """What a decode step runs: an answer token, again where the sequence is run again."""
        return self.made[self.computed - len(self.request.ids)]


@dataclass(frozen=True)
class Schedule:
    """Prefill pieces with their lengths, and the sequences that decode, each in the order of arrival."""

    prefill: list[tuple[Live, int]]
    decode: list[Live]


class Scheduler:
    """Slots, pages and prefixes of one state, and the requests that wait or run."""

    def __init__(self, state: State, run: ExecutionAxes) -> None:
        self.state, self.run = state, run
        self.slots, self.pages = Pool(run.batch), Pool(state.pages)
        snapshots = Pool(run.prefix_cache, first=run.batch)
        self.prefixes = PrefixCache(state, self.pages, snapshots, piece=run.prefill_piece)
        self.waiting: list[Live] = []
        self.running: list[Live] = []
        self.preemptions = 0

    def add(self, live: Live) -> None:
        """Queue a request; raises UsageError for one that could never run to its end."""
        longest, most = live.request.longest, min(self.state.max_len, self.state.pages * self.state.page_size)
        if longest > most:
            raise UsageError(f"request of {longest} tokens, expected at most {most}: max_len or execution.pages")
        self.waiting.append(live)

    def leave(self, live: Live) -> None:
        """A request has ended, or nobody wants it any more."""
        if live.slot is None:
            self.waiting.remove(live)
            live.saved = None
        else:
            self.running.remove(live)
            self._release(live)

    def schedule(self) -> Schedule:
        """The next step; every sequence in it has its slot and its pages."""
        step, preempted = Schedule([], []), self.preemptions
        budget = self.run.token_budget or float("inf")
        budget -= sum(not live.in_prompt for live in self.running)
        for live in list(self.running):
            if live.slot is None:
                continue  # it gave its pages up in this step
            if not live.in_prompt:
                if self._grow(live, live.computed + 1, preempt=True):
                    step.decode.append(live)
            elif (n := live.piece(self.run.prefill_piece)) <= budget and self._grow(
                live, live.computed + n, preempt=True
            ):
                step.prefill.append((live, n))
                budget -= n
        while self.waiting and self.preemptions == preempted and self._admit(self.waiting[0], budget):
            live = self.waiting.pop(0)
            self.running.append(live)
            if live.in_prompt:
                n = live.piece(self.run.prefill_piece)
                step.prefill.append((live, n))
                budget -= n
        return step

    def _admit(self, live: Live, budget: float) -> bool:
        """Give a waiting sequence a clean slot and what it needs to go on; False leaves everything as it was."""
        if not self.slots.free or live.piece(self.run.prefill_piece) > budget:
            return False
        (live.slot,) = self.slots.take(1)
        self.state.tables[live.slot] = live.table
        self.state.reset([live.slot])
        fits = self._bring_back(live) if live.saved else self._begin(live)
        if not fits:
            self._release(live)
        return fits

    def _bring_back(self, live: Live) -> bool:
        assert live.slot is not None
        assert live.saved is not None
        more = live.piece(self.run.prefill_piece) if live.in_prompt else 0
        if not self._grow(live, live.computed + more, preempt=False):
            return False
        self.state.load(live.slot, live.saved)
        live.saved = None
        return True

    def _begin(self, live: Live) -> bool:
        assert live.slot is not None
        prefix = None if live.request.prompt_top is not None else self.prefixes.find(live.request.ids)
        if prefix is not None:
            live.table += self.pages.share(prefix.pages)
            self.state.copy_slot(prefix.slot, live.slot)
            live.computed = prefix.tokens
        if self._grow(live, live.computed + live.piece(self.run.prefill_piece), preempt=False):
            return True
        live.computed = 0
        return False

    def _grow(self, live: Live, tokens: int, *, preempt: bool) -> bool:
        """Give a sequence the pages that `tokens` tokens need, with others' pages where it may take them."""
        missing = -(-tokens // self.state.page_size) - len(live.table)
        while self.pages.free < missing:
            if self.prefixes.evict():
                continue
            if not preempt:
                return False
            last = self.running[-1]
            self._preempt(last)
            if last is live:
                return False
        if missing > 0:
            fresh = self.pages.take(missing)
            self.state.clear_pages(fresh)
            live.table += fresh
        return True

    def _preempt(self, live: Live) -> None:
        assert live.slot is not None
        self.preemptions += 1
        self.running.remove(live)
        if self.run.preempt is Preempt.offload:
            live.saved = self.state.save(live.slot)
        else:
            live.computed = 0
            live.scored.clear()
        self._release(live)
        insort(self.waiting, live, key=lambda x: x.number)

    def _release(self, live: Live) -> None:
        assert live.slot is not None
        self.pages.give_back(live.table)
        self.slots.give_back([live.slot])
        live.table = self.state.tables[live.slot] = []
        live.slot = None

    def audit(self) -> None:
        """Raise AssertionError unless every slot and page has exactly the owners that hold it."""
        held = [*(x.table for x in self.running), *(p.pages for p in self.prefixes.kept.values())]
        counted: dict[int, int] = {}
        for page in (page for pages in held for page in pages):
            counted[page] = counted.get(page, 0) + 1
        assert counted == self.pages.owners, "a page has owners that do not hold it, or holders that do not own it"
        assert set(self.slots.owners) == {x.slot for x in self.running}, "a slot leaked"
        assert set(self.prefixes.slots.owners) == {p.slot for p in self.prefixes.kept.values()}, "a snapshot leaked"
        assert all(x.slot is None and not x.table for x in self.waiting), "a waiting sequence owns something"
