"""A battery through the paged runner: prompts join and leave as slots and pages allow, whatever is asked of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from harness.engines.protocol import Generation, Prompts
from variants import decode
from variants.model import Model
from variants.request import Output, Request
from variants.runner import Pass, Runner, memory_plan


@dataclass
class Watch:
    """What a battery's steps took. started: requests whose first output is there; what they run after it is decode."""

    first_seen: Callable[[int], bool]
    prefill_s: np.ndarray
    prefill_tokens: np.ndarray
    decode_s: list[float] = field(default_factory=list)
    decode_tokens: list[int] = field(default_factory=list)
    fresh: list[tuple[int, int]] = field(default_factory=list)
    started: set[int] = field(default_factory=set)

    def note(self, passes: Sequence[Pass], outputs: Sequence[Output]) -> None:
        """A pass's seconds are its prompts', by their tokens; a prompt that runs again after its first answer is not
        timed as a prefill, and an answer that runs again yields no token."""
        for p in passes:
            if p.phase == "prefill":
                for request, n in zip(p.rows, p.lengths, strict=True):
                    if request not in self.started:
                        self.prefill_s[request] += p.seconds * n / sum(p.lengths)
                        self.prefill_tokens[request] += n
                continue
            if self.first_seen(len(p.rows)):
                self.fresh.append((0, len(self.decode_s)))
            self.decode_s.append(p.seconds)
            self.decode_tokens.append(sum(o.index > 0 and o.request in p.rows for o in outputs))
        self.started.update(o.request for o in outputs)


def outputs(runner: Runner, requests: Sequence[Request], watch: Watch | None = None) -> Iterator[Output]:
    """Every output of a fresh runner's requests, which are numbered in their order; raises what a request is refused
    for. Nothing is left of them in slots and pages, or it is an AssertionError."""
    for request in requests:
        runner.add(request)
    while runner.busy:
        stepped = runner.step()
        if watch is not None:
            watch.note(stepped.passes, stepped.outputs)
        yield from stepped.outputs
    runner.scheduler.audit()


def runner_for(model: Model, requests: Sequence[Request]) -> Runner:
    return Runner(model, max_len=max(r.longest for r in requests))


def generated(
    model: Model,
    prompts: Prompts,
    max_tokens: int,
    *,
    eos: int | None,
    first_seen: Callable[[int], bool],
    check: Callable[[Output], None],
) -> Generation:
    """Greedy tokens of a battery, all prompts queued at once; `check` sees every output."""
    stop = frozenset() if eos is None else frozenset((eos,))
    requests = [Request(ids=tuple(p), max_tokens=max_tokens, stop=stop) for p in prompts]
    shape = (len(prompts), max_tokens)
    tokens, gaps, finite = np.full(shape, -1, np.int32), np.full(shape, np.nan), np.ones(shape, bool)
    watch = Watch(first_seen, np.zeros(len(prompts)), np.zeros(len(prompts), int))
    runner = runner_for(model, requests)
    for o in outputs(runner, requests, watch):
        check(o)
        place = (o.request, o.index)
        tokens[place], finite[place] = -1 if o.token is None else o.token, o.finite
        gaps[place] = float(decode.gaps(o.logits.unsqueeze(0))[0])
    return Generation(
        tokens=tokens,
        finite=finite,
        gaps=gaps,
        prefill_s=watch.prefill_s,
        prefill_tokens=watch.prefill_tokens,
        decode_s=(np.array(watch.decode_s),) if watch.decode_s else (),
        decode_tokens=(np.array(watch.decode_tokens),) if watch.decode_s else (),
        batch=model.recipe.execution.batch,
        first_seen=tuple(watch.fresh),
        notes=_notes(runner, watch),
    )


def _notes(runner: Runner, watch: Watch) -> tuple[str, ...]:
    """The memory plan, what the schedule did, and where bits may follow it."""
    stats, dependent = runner.stats(), runner.model.recipe.as_dict()["batch_dependent"]
    did = (
        f"paged: {len(watch.decode_s)} decode steps, {stats.preemptions} preemptions, {stats.prefix_hit_tokens} tokens"
    )
    assert isinstance(dependent, dict)
    where = (
        f"paged: bits may follow the rows that run together at {', '.join(dependent)}; `neartie explain` lists sites"
    )
    plan = [f"paged: {line}" for line in memory_plan(runner.model, max_len=runner.state.max_len)]
    return (*plan, f"{did} of shared prefixes", *([where] if dependent else []))
