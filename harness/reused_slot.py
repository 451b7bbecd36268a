"""Whether a slot that another prompt has used is as good as a fresh one, for a variant as it runs.

Every prompt of a battery runs in fresh slots, so what `State.reset`, a page or a table keeps of an earlier prompt shows
in no other instrument. Here a short prompt runs after a long one in the same slot and a long one after a short one;
where rows run together, both at once. A slot that is taken must be empty, and what it holds before every later forward,
and the logits, must be what they are in fresh slots.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.engines.local import LocalEngine
from harness.forced_errors import Battery
from harness.parts import part
from harness.reach import PAST
from harness.verdict import Finding
from variants.axes import Execution
from variants.batch import NOBODY
from variants.decode import Sequences
from variants.model import Model
from variants.recipe import Recipe
from variants.request import Request
from variants.runner import Runner
from variants.state import SLOTTED, State

INSTRUMENT = "reused_slot"
ANSWER = 3  # tokens: a prefill and two decode steps
SITES = {"conv": "conv_state", "recurrent": "kda_state", "latent": "kv_cache", "keys": "mla_k", "values": "mla_v"}

Prompt = tuple[int, ...]
Group = tuple[Prompt, ...]
Run = Callable[[Group], list[Tensor]]
Values = dict[tuple[int, str, int], Tensor]  # by layer, store and row, in the order of layers


@dataclass(frozen=True, kw_only=True)
class Reused:
    """tokens: of the long and of the short prompt. found: the first difference. left_out: why nothing can be said."""

    tokens: tuple[int, int]
    found: Finding | None = None
    left_out: str | None = None

    def record(self) -> dict[str, object]:
        return {"tokens": list(self.tokens), "left_out": self.left_out}

    def findings(self) -> list[Finding]:
        return [] if self.found is None else [self.found]


@part("reused slot")
def reused_slot(engine: LocalEngine, battery: Battery) -> Reused:
    """Run one group of prompts after the other under the engine's own recipe, and each in fresh slots."""
    run, model = engine.recipe.execution, engine.build()
    long, short = two_lengths(battery, engine.recipe, engine.casts.checkpoint.config.max_length)
    groups: tuple[Group, Group] = ((long,), (short,))
    if run.batch > 1 and run.mode is not Execution.paged:  # a runner resets one slot at a time
        groups = ((long, short), (short, long))
    watch, tokens = _Watch(model), (len(long), len(short))

    def slots() -> Run:
        return _run(model, rows=len(groups[0]), max_len=len(long) + ANSWER)

    used = [slots(), slots()]
    try:
        fresh = [watch.told(run, group) for run, group in zip(used, groups, strict=True)]
        for run, group, expected in zip(used, groups[::-1], fresh[::-1], strict=True):
            found = watch.differs(run, group, expected)
            if found and watch.differs(slots(), group, expected):
                return Reused(tokens=tokens, left_out="two runs in fresh slots differ already")
            if found:
                return Reused(tokens=tokens, found=found)
    except _NotEmptyError as full:
        return Reused(tokens=tokens, found=full.finding)
    return Reused(tokens=tokens)


def two_lengths(battery: Battery, recipe: Recipe, max_length: int) -> tuple[Prompt, Prompt]:
    """The longest prompt and the shortest, cut to half of it at most; over pages the long one enters a second."""
    run = recipe.execution
    long, short = (tuple(f(battery.prompts, key=len)) for f in (max, min))
    if run.mode is Execution.paged:
        most = min(max_length, run.pages * run.block_size or max_length) - ANSWER
        wanted = min(max(run.block_size + PAST, len(long)), most)
        long = (long * -(-wanted // len(long)))[:wanted]
    return long, short[: max(1, len(long) // 2)]


def _run(model: Model, *, rows: int, max_len: int) -> Run:
    """Slots as the recipe has them, for groups of prompts that run one after another: the logits of every answer."""
    if model.recipe.execution.mode is Execution.paged:
        runner = Runner(model, max_len=max_len)

        def through_pages(group: Group) -> list[Tensor]:
            for ids in group:
                runner.add(Request(ids=ids, max_tokens=ANSWER, forced=_answer(ids)))
            logits: list[Tensor] = []
            while runner.busy:
                logits += [o.logits for o in runner.step().outputs]
            return logits

        return through_pages
    state = model.new_state(slots=rows, max_len=max_len)

    def in_rows(group: Group) -> list[Tensor]:
        sequences = Sequences(model, group, ANSWER)
        sequences.state = state
        forced = torch.tensor([_answer(ids) for ids in group], device=model.device)
        return [*sequences.start(), *(row for t in range(ANSWER - 1) for row in sequences.after(forced[:, t]))]

    return in_rows


def _answer(ids: Prompt) -> Prompt:
    return (ids * ANSWER)[:ANSWER]


class _DiffersError(Exception):
    """Ends a run before the first forward that would not be as in fresh slots."""

    def __init__(self, reason: str, place: tuple[str | None, int | None] = (None, None)) -> None:
        super().__init__(reason)
        self.finding = Finding(instrument=INSTRUMENT, reason=reason, site=place[0], layer=place[1])


class _NotEmptyError(_DiffersError):
    """A slot was taken for a new prompt and holds something."""


@dataclass(frozen=True)
class _Told:
    """A group in fresh slots: the tokens in them and what they held before each forward, and every answer's logits."""

    before: list[tuple[list[int], Values]]
    logits: list[Tensor]


class _Watch:
    """Sees what the slots of a pass hold before each forward of a model."""

    def __init__(self, model: Model) -> None:
        self.see: Callable[[list[int], Values], None] | None = None
        forward, forward_both = model.forward, model.forward_both

        def one(tokens: Tensor, state: State, *, slots: Sequence[int], **how: object) -> Tensor:
            self._look(state, slots)
            return forward(tokens, state, slots=slots, **how)  # pyright: ignore[reportArgumentType]

        def both(tokens: Tensor, state: State, *, slots: Sequence[int], **how: object) -> tuple[Tensor, Tensor | None]:
            self._look(state, slots)
            return forward_both(tokens, state, slots=slots, **how)  # pyright: ignore[reportArgumentType]

        model.forward, model.forward_both = one, both

    def _look(self, state: State, slots: Sequence[int]) -> None:
        live = [s for s in slots if s != NOBODY]
        lengths, values = [state.length[s] for s in live], carried(state, live)
        for (layer, store, row), x in values.items():
            if lengths[row] == 0 and bool((x != 0).any()):
                raise _NotEmptyError(*_at(layer, store, "a slot that is taken for a new prompt is not empty"))
        assert self.see is not None
        self.see(lengths, values)

    def told(self, run: Run, group: Group) -> _Told:
        """What a group leaves in fresh slots."""
        before: list[tuple[list[int], Values]] = []
        self.see = lambda lengths, values: before.append((lengths, {key: x.clone() for key, x in values.items()}))
        return _Told(before, run(group))

    def differs(self, run: Run, group: Group, fresh: _Told) -> Finding | None:
        """The first thing that is not as it was in fresh slots. Raises _NotEmptyError for a slot that is not empty."""
        left = iter(fresh.before)
        self.see = lambda lengths, values: _hold(lengths, values, *next(left))
        try:
            logits = run(group)
            if not all(same(a, b) for a, b in zip(logits, fresh.logits, strict=True)):
                raise _DiffersError("logits in a used slot are not those in a fresh one, though what is carried is")
        except _NotEmptyError:
            raise
        except _DiffersError as departed:
            return departed.finding
        return None


def carried(state: State, slots: Sequence[int]) -> Values:
    """What slots hold, as it lies there or gathered from all of their pages."""
    found: Values = {}
    for store in SITES:
        for layer, x in getattr(state, store).items():
            for row, slot in enumerate(slots):
                found[layer, store, row] = x[slot] if store in SLOTTED else x[state.tables[slot]]
    return dict(sorted(found.items(), key=lambda item: item[0][0]))  # stable: a layer's stores as SITES has them


def _hold(lengths: list[int], values: Values, fresh_lengths: list[int], fresh: Values) -> None:
    """Raises _DiffersError for the first layer's first store whose values are not the same."""
    if lengths != fresh_lengths:
        raise _DiffersError(f"used slots stand at {lengths} tokens where fresh ones stand at {fresh_lengths}")
    for (layer, store, row), x in values.items():
        if not same(x, fresh[layer, store, row]):
            what = f"after {lengths[row]} tokens a used slot does not hold what a fresh one does"
            raise _DiffersError(*_at(layer, store, what))


def _at(layer: int, store: str, what: str) -> tuple[str, tuple[str, int]]:
    told = f"layer {layer} {SITES[store]}: {what} (the state's `{store}`; look at what clears slots and pages)"
    return told, (SITES[store], layer)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether all values are the same, NaN and NaN too."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
