"""Continuous batching: whatever joins, leaves, waits or is shared, a sequence has the bits of its own run."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
import torch
from test_paged_state import hashes, incremental, made, variant
from tiny import build, prompt, ragged, relative
from torch import Tensor

from variants import decode, prefix, scheduler
from variants.axes import Preempt, Variant
from variants.errors import UsageError
from variants.prefix import Prefix, PrefixCache
from variants.request import Finish, Output, Request, chosen
from variants.runner import Runner, memory_plan
from variants.scheduler import Scheduler
from variants.state import PAGED, SLOTTED, State

LENGTHS = (17, 1, 35, 20, 8)
TOKENS = 6


def run(runner: Runner, requests: Iterable[Request]) -> list[list[Output]]:
    """Outputs by request; slots and pages are counted after every step."""
    numbers = [runner.add(r) for r in requests]
    got: dict[int, list[Output]] = {n: [] for n in numbers}
    while runner.busy:
        for output in runner.step().outputs:
            got[output.request].append(output)
        runner.scheduler.audit()
    return [got[n] for n in numbers]


def logits(outputs: Sequence[Output]) -> Tensor:
    return torch.stack([o.logits for o in outputs])


def requests(prompts: Iterable[Sequence[int]], **more: object) -> list[Request]:
    return [Request(ids=tuple(p), max_tokens=TOKENS, **more) for p in prompts]  # pyright: ignore[reportArgumentType]


ALONE: dict[tuple[str, tuple[int, ...]], Tensor] = {}


def alone(v: Variant, ids: Sequence[int]) -> Tensor:
    """Greedy logits [T, V] of one prompt on carried state, by itself; computed once for each arithmetic and prompt."""
    v = incremental(v)
    key = (repr(v), tuple(ids))
    if key not in ALONE:
        runs = decode.steps(build(v, made()), [ids], TOKENS, lambda _, x: decode.greedy(x))
        ALONE[key] = torch.cat([r.logits for r in runs])
    return ALONE[key]


SCHEDULES: dict[str, dict[str, object]] = {
    "whole prompts": {},
    "one at a time": {"batch": 1},
    "pieces": {"prefill_piece": 16, "token_budget": 19},
    "pieces together": {"prefill_piece": 16, "prefill_batch": 3},
    "fixed rows": {"prefill_piece": 16, "fixed_rows": True},
    "few pages": {"prefill_piece": 16, "pages": 16, "block_size": 4},
    "few pages, offloaded": {"prefill_piece": 16, "pages": 16, "block_size": 4, "preempt": Preempt.offload},
    "prefixes": {"prefill_piece": 16, "block_size": 4, "prefix_cache": 2},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_changes_a_bit(name: str) -> None:
    """Five ragged prompts, batch-invariant: however they are scheduled, each has the logits of its incremental run."""
    v = variant(**SCHEDULES[name])  # pyright: ignore[reportArgumentType]
    runner = Runner(build(v, made()), max_len=48)
    for ids, outputs in zip(ragged(LENGTHS), run(runner, requests(ragged(LENGTHS))), strict=True):
        assert torch.equal(logits(outputs), alone(v, ids)), len(ids)
        assert [o.finish for o in outputs] == [None] * (TOKENS - 1) + [Finish.length]
    assert (runner.stats().preemptions > 0) is name.startswith("few pages")


@pytest.mark.parametrize(("kda", "mla"), [("every", "flash"), ("island", "island"), ("recurrent", "absorbed")])
def test_preemption_is_never_seen_whatever_the_core(kda: str, mla: str) -> None:
    """Prompts go through prefill again and answers through decode, so the interrupted equals the uninterrupted."""
    for preempt in Preempt:
        v = variant(kda, mla, prefill_piece=16, pages=16, block_size=4, preempt=preempt)
        runner = Runner(build(v, made()), max_len=48)
        for ids, outputs in zip(ragged((35, 20)), run(runner, requests(ragged((35, 20)))), strict=True):
            assert torch.equal(logits(outputs), alone(v, ids))
        assert runner.stats().preemptions


def test_an_answer_that_runs_again_as_a_prompt_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: with a chunked prefill over prompt and answer the bits are others."""
    v = variant("chunk", "flash", prefill_piece=16, pages=15, block_size=4, formats="bf16 stream")

    def forgets_state(self: Scheduler, live: scheduler.Live) -> bool:
        done = begin(self, live)
        if done and live.made:
            live.request = replace(
                live.request, ids=(*live.request.ids, *live.made), max_tokens=TOKENS - len(live.made)
            )
            live.made = []
        return done

    def tokens_of() -> list[Tensor]:
        runner = Runner(build(v, made()), max_len=48)
        return [logits(o) for o in run(runner, requests(ragged((35, 20))))]

    begin, right = Scheduler._begin, tokens_of()
    monkeypatch.setattr(Scheduler, "_begin", forgets_state)
    assert not all(torch.equal(a, b) for a, b in zip(tokens_of(), right, strict=True))


def test_without_batch_invariance_the_rows_beside_are_named_and_rounding_is_all() -> None:
    """One sequence at a time has the incremental bits even so; three together agree to rounding, and passes say why."""
    v = replace(variant(mla="island", prefill_piece=16, formats="f64", batch=1), batch_invariant=False)
    prompts = ragged(LENGTHS)
    for ids, outputs in zip(prompts, run(Runner(build(v, made()), max_len=48), requests(prompts)), strict=True):
        assert torch.equal(logits(outputs), alone(v, ids))
    together = replace(v, execution=replace(v.execution, batch=3))
    runner = Runner(build(together, made()), max_len=48)
    numbers, rows, got = [runner.add(r) for r in requests(prompts)], set(), {}
    while runner.busy:
        stepped = runner.step()
        rows |= {len(p.lengths) for p in stepped.passes if p.phase == "decode"}
        for o in stepped.outputs:
            got.setdefault(o.request, []).append(o)
    assert rows == {1, 2, 3}
    for n, ids in zip(numbers, prompts, strict=True):
        assert relative(logits(got[n]), alone(v, ids)) < 1e-12
    assert runner.model.recipe.as_dict()["batch_dependent"]


# --- prefixes ---

SHARED = prompt(40)
ALIKE = [SHARED, [*SHARED[:33], 5], [*SHARED[:32], 9, 9, 9], [*SHARED[:16], *prompt(9, seed=5)], SHARED[:32],
         [*prompt(16, seed=7), *SHARED[16:]], SHARED]  # fmt: skip


def prefixed(kept: int, **more: object) -> Runner:
    v = variant("chunk", "flash", prefill_piece=16, block_size=4, prefix_cache=kept, batch=2, **more)  # pyright: ignore[reportArgumentType]
    return Runner(build(v, made()), max_len=60)


@pytest.mark.parametrize("kept", [1, 3])
def test_shared_prefixes_change_no_bit(kept: int) -> None:
    """Prompts that begin alike, also by one token beyond a shared block: on equals off; something really was shared."""
    off, on = prefixed(0), prefixed(kept)
    for a, b in zip(run(off, requests(ALIKE)), run(on, requests(ALIKE)), strict=True):
        assert torch.equal(logits(a), logits(b))
    assert on.stats().prefix_hit_tokens > 0
    assert on.stats().pages_used == on.stats().pages_cached > 0
    assert off.stats().pages_used == off.stats().prefix_hit_tokens == 0


def kept_bytes(runner: Runner, prefix: Prefix) -> bytes:
    """All that a kept prefix holds."""
    state = runner.state
    rows = [x[prefix.slot] for n in SLOTTED for x in getattr(state, n).values()]
    rows += [x[list(prefix.pages)] for n in PAGED for x in getattr(state, n).values()]
    return b"".join(x.numpy().tobytes() for x in rows)


def test_p10_a_shared_prefix_is_never_written() -> None:
    """Two prompts go on from one prefix, the first by one token: what is kept is byte-identical afterwards."""
    runner = prefixed(3)
    run(runner, requests([SHARED]))
    before = {key: kept_bytes(runner, p) for key, p in runner.scheduler.prefixes.kept.items()}
    run(runner, requests([[*SHARED[:32], 5], [*SHARED[:32], 9, 9, 9]]))
    assert runner.stats().prefix_hit_tokens == 64
    assert all(kept_bytes(runner, runner.scheduler.prefixes.kept[key]) == held for key, held in before.items())
    assert len(before) == 2


@pytest.mark.parametrize("fault", ["written through", "state of another end"])
def test_p10_a_prefix_that_is_written_or_wrong_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparisons above can fail: a slot that is handed out instead of copied, a state one piece too old."""

    def find(self: PrefixCache, ids: Sequence[int]) -> Prefix | None:
        found, kept = real(self, ids), list(self.kept.values())
        return found and replace(found, slot=min(kept, key=lambda p: p.tokens).slot)

    if fault == "written through":
        monkeypatch.setattr(State, "copy_slot", lambda self, source, target: setattr(self, "length", [
            self.length[source] if i == target else n for i, n in enumerate(self.length)]))  # fmt: skip
    else:
        real = PrefixCache.find
        monkeypatch.setattr(prefix.PrefixCache, "find", find)
        tokens = State.copy_slot

        def keeps_length(self: State, source: int, target: int) -> None:
            tokens(self, source, target)
            self.length[target] = 32 if self.length[target] == 16 and target < 2 else self.length[target]

        monkeypatch.setattr(State, "copy_slot", keeps_length)
    on, off = prefixed(3), prefixed(0)
    ids = [*SHARED[:32], 5]
    run(on, requests([SHARED]))
    a, b = logits(run(on, requests([ids]))[0]), logits(run(off, requests([ids]))[0])
    assert not torch.equal(a, b)


@pytest.mark.parametrize(("lengths", "sees"), [((50, 70, 90), True), ((32, 32, 32), False)])
def test_p11_a_snapshot_is_of_its_own_request(lengths: tuple[int, ...], sees: bool) -> None:
    """Prompts of a ragged batch in pieces of 16: each kept state equals a solo run cut there, told by request.

    Snapshots taken from a grid over the flattened batch are wrong where lengths differ; where all are two pieces long
    the mistake hits every request's own snapshot.
    """
    v = variant("chunk", "flash", prefill_piece=16, block_size=4, prefix_cache=12, batch=3, prefill_batch=3)
    model, prompts = build(v, made()), ragged(lengths)
    runner = Runner(model, max_len=100)
    run(runner, requests(prompts))
    kept = runner.scheduler.prefixes
    flat = [(p, n) for p, ids in enumerate(prompts) for n in range(16, len(ids) + 1, 16)]
    for request, ids in enumerate(prompts):
        for tokens, key in kept._keys(ids):
            solo = model.new_state(slots=1, max_len=100)
            decode.prefill(model, solo, [0], [ids[:tokens]])
            held = kept.kept[key]
            for name in SLOTTED:
                for layer, x in getattr(solo, name).items():
                    assert torch.equal(getattr(runner.state, name)[layer][held.slot], x[0]), (request, tokens)
            first = sum(len(x) for x in prompts[:request])
            assert (flat[(first + tokens) // 16 - 1] != (request, tokens)) <= sees


# --- slots and pages, counted ---


@pytest.mark.parametrize("seed", range(4))
def test_nothing_leaks_whatever_happens(seed: int) -> None:
    """Requests join, are cancelled while they wait, run or are away, end early: after each step every unit is counted,
    at the end all are free, and whoever was not cancelled has its own bits."""
    draw = random.Random(seed)
    how = draw.choice([{}, {"preempt": Preempt.offload}, {"prefix_cache": 2}, {"fixed_rows": True}])
    v = variant(prefill_piece=16, pages=14, block_size=4, batch=3, token_budget=draw.choice([0, 20]), **how)  # pyright: ignore[reportArgumentType]
    runner = Runner(build(v, made()), max_len=48)
    got: dict[int, list[Output]] = {}
    asked: dict[int, Request] = {}
    cancelled = set()
    while runner.busy or len(asked) < 12:
        if len(asked) < 12 and draw.random() < 0.5:
            base = prompt(draw.choice(LENGTHS), seed=draw.randrange(3))
            request = Request(ids=tuple(base), max_tokens=draw.randrange(1, TOKENS + 1))
            asked[runner.add(request)] = request
        if runner.live and draw.random() < 0.15:
            victim = draw.choice(sorted(runner.live))
            assert runner.cancel(victim)
            assert not runner.cancel(victim)
            cancelled.add(victim)
        for o in runner.step().outputs:
            got.setdefault(o.request, []).append(o)
        runner.scheduler.audit()
    while runner.scheduler.prefixes.evict():
        runner.scheduler.audit()
    stats = runner.stats()
    assert (stats.waiting, stats.running, stats.pages_used, runner.scheduler.slots.free) == (0, 0, 0, 3)
    assert cancelled
    for number, request in asked.items():
        if number not in cancelled:
            assert torch.equal(logits(got[number]), alone(v, request.ids)[: request.max_tokens])


@pytest.mark.parametrize("leak", ["page", "slot", "snapshot"])
def test_a_leak_is_counted(leak: str) -> None:
    """The audit fails on a page, a slot or a snapshot that nobody holds."""
    runner = prefixed(2)
    run(runner, requests([prompt(5)]))
    s = runner.scheduler
    {"page": s.pages, "slot": s.slots, "snapshot": s.prefixes.slots}[leak].take(1)
    with pytest.raises(AssertionError, match=r"leaked|owners"):
        s.audit()


def test_the_same_calls_give_the_same_steps() -> None:
    """Two runners that are asked alike run the same passes, step by step, preemptions and all."""

    def passes() -> list[object]:
        runner = Runner(build(variant(prefill_piece=16, pages=16, block_size=4), made()), max_len=48)
        for r in requests(ragged(LENGTHS)):
            runner.add(r)
        out = []
        while runner.busy:
            out.append([(p.phase, p.rows, p.lengths) for p in runner.step().passes])
        return out

    assert passes() == passes()


def test_prompts_run_in_pieces_beside_sequences_that_decode() -> None:
    """A long prompt does not hold a running sequence up: its pieces and the other's tokens share steps and a budget."""
    runner = Runner(build(variant(prefill_piece=16, token_budget=19), made()), max_len=60)
    first = runner.add(Request(ids=tuple(prompt(5)), max_tokens=8))
    runner.step()
    second = runner.add(Request(ids=tuple(prompt(40)), max_tokens=2))
    for lengths in ((16,), (16,), (8,)):
        prefill, later = runner.step().passes
        assert (prefill.rows, prefill.lengths, later.rows) == ((second,), lengths, (first,))


def test_a_step_keeps_to_its_budget() -> None:
    """Tokens that decode and pieces together are never more than the budget, and no step but the last ones is idle."""
    runner = Runner(build(variant(prefill_piece=16, token_budget=19), made()), max_len=60)
    for r in requests(ragged((5, 5, 5, 40, 19, 35, 18, 19))):
        runner.add(r)
    tokens = []
    while runner.busy:
        tokens.append(sum(sum(p.lengths) for p in runner.step().passes))
    assert max(tokens) == 19
    assert min(tokens) >= 1


# --- what is asked and answered ---


def test_a_draw_depends_on_seed_and_index_alone() -> None:
    """A seeded request has the same tokens alone, beside others and after preemption; another seed has others."""

    def tokens(seed: int, beside: int, **more: object) -> list[int | None]:
        v = variant(prefill_piece=16, block_size=4, **more)  # pyright: ignore[reportArgumentType]
        runner = Runner(build(v, made()), max_len=48)
        asked = [Request(ids=tuple(p), max_tokens=TOKENS) for p in ragged((30, 8))[:beside]]
        asked.append(Request(ids=tuple(prompt(20)), max_tokens=TOKENS, temperature=1.5, seed=seed))
        return [o.token for o in run(runner, asked)[-1]]

    assert tokens(3, 0) == tokens(3, 2) == tokens(3, 2, pages=12)
    assert tokens(3, 0) != tokens(4, 0)
    request = Request(ids=(1,), max_tokens=9, temperature=1.0, seed=3)
    assert len({chosen(request, index, torch.zeros(67), 0, finite=True) for index in range(9)}) > 4


def test_sampling_follows_the_softmax() -> None:
    """4000 seeds at the first token: each of the likely tokens comes as often as its probability says."""
    x = torch.tensor([1.0, 0.0, -1.0, float("-inf"), 2.0])
    drawn = [
        chosen(Request(ids=(1,), max_tokens=1, temperature=2.0, seed=s), 0, x.clamp_min(-50), 4, finite=True)
        for s in range(4000)
    ]
    shares = torch.bincount(torch.tensor(drawn), minlength=5) / 4000
    assert (shares - torch.softmax(x / 2, -1)).abs().max() < 0.03
    broken = chosen(Request(ids=(1,), max_tokens=1, temperature=2.0), 0, x, 4, finite=False)
    assert broken == 4  # the greedy one, which means nothing


def test_prompt_logprobs_are_those_of_one_pass() -> None:
    """In pieces and beside others, each prompt token has the logprob of a single pass; nothing else moves a bit."""
    v = variant(prefill_piece=16, prefix_cache=2, block_size=4)
    ids = tuple(prompt(40))
    asked = [Request(ids=ids, max_tokens=TOKENS), Request(ids=ids, max_tokens=2, prompt_top=3),
             Request(ids=ids, max_tokens=0, prompt_top=0)]  # fmt: skip
    usual, scored, only = run(Runner(build(v, made()), max_len=48), asked)
    assert torch.equal(logits(scored), logits(usual)[:2])
    assert (only[0].token, only[0].finish, len(only)) == (None, Finish.length, 1)
    model = build(incremental(v), made())
    rows = torch.cat([
        model.forward(torch.tensor([ids[a : a + 16]]), state, slots=[0], lengths=[len(ids[a : a + 16])],
                      phase="prefill", every=True)[0]
        for state in [model.new_state(slots=1, max_len=40)] for a in range(0, 40, 16)
    ])  # fmt: skip
    right = torch.log_softmax(rows.double(), -1)
    assert [x.token for x in scored[0].prompt] == list(ids[1:])
    assert [x.logprob for x in scored[0].prompt] == [float(right[i, t]) for i, t in enumerate(ids[1:])]
    assert [len(x.top) for x in scored[0].prompt] == [3] * 39
    assert [x.logprob for x in only[0].prompt] == [x.logprob for x in scored[0].prompt]
    best = scored[1].logprobs(2)
    assert best.top[0] == (best.token, best.logprob)


def test_an_answer_ends_at_a_stop_token_or_is_forced() -> None:
    """The stop token is the last of its answer; forced tokens are taken whatever the logits say."""
    runner = Runner(build(variant(), made()), max_len=48)
    greedy = [o.token for o in run(runner, requests([prompt(9)]))[0]]
    stop = greedy[2]
    assert isinstance(stop, int)
    (ended,) = run(runner, requests([prompt(9)], stop=frozenset((stop,))))
    assert [o.token for o in ended] == greedy[: greedy.index(stop) + 1]
    assert ended[-1].finish is Finish.stop
    (led,) = run(runner, requests([prompt(9)], forced=(5, 6, 7, 8, 9, 10)))
    assert [o.token for o in led] == [5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"ids": ()}, "no prompt tokens"),
        ({"ids": (67,)}, "outside 0..66"),
        ({"max_tokens": 0}, "expected 1 or more"),
        ({"max_tokens": 99}, "at most 48"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"forced": (1,)}, "1 forced tokens"),
    ],
)
def test_a_request_that_cannot_run_is_refused(more: dict[str, object], why: str) -> None:
    """In one line, and nothing is queued."""
    runner = Runner(build(variant(), made()), max_len=48)
    with pytest.raises(UsageError, match=why):
        runner.add(Request(**{"ids": (1, 2), "max_tokens": 3, **more}))  # pyright: ignore[reportArgumentType]
    assert not runner.busy


def test_the_memory_plan_is_what_is_held() -> None:
    """Planned bytes are those of the state that a runner then makes."""
    model = build(variant(prefill_piece=16, block_size=4, prefix_cache=3), made())
    state = Runner(model, max_len=47).state
    held = [
        sum(x.numel() * x.element_size() for n in names for x in getattr(state, n).values())
        for names in (SLOTTED, PAGED)
    ]
    assert memory_plan(model, max_len=47) == [
        f"kda: 2 layers, 7 state slots (4 run, 3 kept), 3648 bytes each, {held[0] / 2**20:.1f} MiB",
        f"mla: 1 layers, 48 pages of 4 tokens, 288 bytes each, {held[1] / 2**20:.1f} MiB",
    ]
    assert held == [8 * 3648, 49 * 288]
    with pytest.raises(UsageError, match="got incremental"):
        Runner(build(incremental(variant()), made()), max_len=9)


def test_a_row_that_fills_up_leaves_every_byte_of_the_others() -> None:
    """Fixed rows: one sequence in a batch of four leaves the slots that nobody runs as they were."""
    runner = Runner(build(variant(fixed_rows=True), made()), max_len=20)
    runner.add(Request(ids=(5, 6, 7), max_tokens=4))
    runner.step()
    before = hashes(runner.state)
    assert [(len(p.lengths), p.rows) for p in runner.step().passes] == [(4, (0, -1, -1, -1))]
    assert [a != b for a, b in zip(before, hashes(runner.state), strict=True)] == [True, False, False, False, False]


def test_what_was_not_finite_dies_with_its_request() -> None:
    """A request full of NaN leaves slot and pages that the next one takes; that one, and one beside it, are clean."""

    def poison(name: str, x: Tensor) -> Tensor:
        if "embed" not in name:
            return x
        x = x.clone()
        x[12] = float("nan")
        return x

    v = variant(mla="dense", prefill_piece=16, block_size=4, batch=2, pages=18)
    runner = Runner(build(v, made(), patch=poison), max_len=36)
    bad = Request(ids=(12, 12, *prompt(20)), max_tokens=2)
    clean = [Request(ids=tuple(i + (i == 12) for i in prompt(n)), max_tokens=TOKENS) for n in (30, 3, 8)]
    beside, broken, *after = run(runner, [clean[0], bad, *clean[1:]])
    assert not any(o.finite for o in broken)
    for outputs, request in zip((beside, *after), clean, strict=True):
        assert torch.equal(logits(outputs), alone(v, request.ids))
