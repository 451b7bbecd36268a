"""Whether a variant gives the same bits watched and unwatched.

What looks inside runs each operation by itself, where a probe can see it; what gives the tokens may run them joined
into one step (`execution.fused`) or replay them as a graph. A fault in that is in the tokens, in no other instrument.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from harness.between import Untouched, of_runner
from harness.divergence import Divergence
from harness.engines.local import LocalEngine
from harness.engines.paged_rows import outputs
from harness.forced_errors import Battery
from harness.golden_data import Golden
from harness.parts import part
from harness.probes import Tap
from harness.reach import long_enough, of_all_lengths, repeated, text_of
from harness.reused_slot import SITES, carried, same
from harness.runner_tasks import RunnerBrokeError, Task, tasks
from harness.verdict import Finding
from variants.axes import Execution, Graph
from variants.decode import Sequences, greedy
from variants.request import Request, told

INSTRUMENT = "as_run"
MOST = 16  # prompts of a step that joins operations; of others the shortest and the longest
FREE = 3  # tokens that a runner chooses for itself
LONG, FIRST = 120, 8  # tokens that are decoded one by one after so many, where a step joins operations
Forced = tuple[list[int], list[int]]  # a prompt, and the tokens after it


@dataclass(frozen=True, kw_only=True)
class AsRun:
    """tokens: logits compared. found: the first difference."""

    tokens: int
    found: Finding | None = None

    def record(self) -> dict[str, object]:
        return {"tokens": self.tokens}

    def findings(self) -> list[Finding]:
        return [] if self.found is None else [self.found]


@part("watched twin")
def as_run(engine: LocalEngine, battery: Battery) -> AsRun:
    """The shortest and the longest prompt and one past every tile, with their forced tokens, by both paths.

    Of a step that joins operations, `MOST` prompts of all lengths, and one that is decoded token by token for `LONG`.
    The watched path is also seen to leave alone what it carries between two forwards (`harness.between`).
    """
    rows, run = _chosen(engine, battery), engine.recipe.execution
    if run.mode is Execution.paged:
        whole = Task(execution=run, waves=(tuple((tuple(p), tuple(c)) for p, c in rows),))
        try:
            return _together(engine, [whole, *tasks(run, battery, engine.casts.checkpoint.config.max_length)])
        except RunnerBrokeError as broke:
            return AsRun(tokens=0, found=broke.finding(INSTRUMENT))
    paths, compared = (engine.model, engine.build(probe=_nothing())), 0
    untouched = Untouched(paths[1], lambda slot: ())
    for group in ([row] for row in rows) if run.batch == 1 else (rows[:2], *([row] for row in rows[2:])):
        prompts, forced = [p for p, _ in group], list(zip(*(c for _, c in group), strict=False))  # to the shorter's end
        ran, watched = (Sequences(model, prompts, len(forced) + 1) for model in paths)
        untouched.stands_for = partial(_of_rows, watched)
        logits = [ran.start(), watched.start()]
        for t in range(len(forced) + 1):
            compared += len(group)
            if not same(*logits):
                return AsRun(tokens=compared, found=_difference(ran, watched, logits, t))
            if found := untouched.found or _not_the_largest(logits[0], greedy(logits[0]).tolist()):
                return AsRun(tokens=compared, found=found)
            if t < len(forced):
                tokens = torch.tensor(forced[t], device=engine.model.device)
                logits = [ran.after(tokens), watched.after(tokens)]
    return AsRun(tokens=compared, found=_near_ties(greedy))


def _nothing() -> Tap:
    """A probe that keeps nothing: what is joined is taken apart for it."""
    return Tap(lambda site, layer: False)


def _of_rows(rows: Sequences, slot: int) -> tuple[int, ...]:
    return (*rows.prompts[slot], *rows.taken[slot])[: rows.state.length[slot]]


def _together(engine: LocalEngine, asked: Sequence[Task]) -> AsRun:
    """Each task through a runner by both paths: the same schedule, so the same rows beside each other."""
    compared = 0
    for task in asked:
        recipe = replace(engine.recipe, execution=task.execution)
        ran = engine.model if recipe == engine.recipe else engine.build(recipe=recipe)
        watched = engine.build(recipe=recipe, probe=_nothing())
        runners = [task.runner(model) for model in (ran, watched)]
        untouched = Untouched(watched, of_runner(runners[1]))
        for both in zip(*map(task.steps, runners), strict=True):
            for a, b in zip(*(stepped.outputs for stepped in both), strict=True):
                assert (a.request, a.index) == (b.request, b.index), "a schedule follows the requests alone"
                compared += 1
                if not same(a.logits, b.logits):
                    found = _unlike(len(task.rows[a.request][0]), a.index, graph=task.execution.graph)
                    return AsRun(tokens=compared, found=found)
            if untouched.found:
                return AsRun(tokens=compared, found=untouched.found)
    return AsRun(tokens=compared, found=_freely(engine, asked[0]) or _near_ties(lambda logits: told(logits)[:, 0]))


def _unlike(tokens: int, index: int, *, graph: Graph) -> Finding:
    captured = " (execution.graph: look at what is captured)" if graph is Graph.cuda else ""
    where = f"prompt of {tokens} tokens, token {index} of its answer"
    reason = f"{where}: logits of the variant as it runs are not those of its operations one by one{captured}"
    return Finding(instrument=INSTRUMENT, reason=reason)


def _freely(engine: LocalEngine, task: Task) -> Finding | None:
    """The same prompts not forced: every token is the largest of the logits that come with it."""
    requests = [Request(ids=prompt, max_tokens=min(FREE, len(forced))) for prompt, forced in task.rows]
    given = outputs(task.runner(engine.model), requests)
    return next((f for o in given if (f := _not_the_largest(o.logits[None], [o.token]))), None)


def _near_ties(choose: Callable[[torch.Tensor], torch.Tensor]) -> Finding | None:
    """What is chosen of logits that tie exactly, or are one last place apart, the larger one later."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        logits = torch.zeros(2, 8, dtype=dtype)
        logits[:, (2, 5)] = 20.0
        logits[1, 5] += 16 * torch.finfo(dtype).eps
        if found := _not_the_largest(logits, choose(logits).tolist()):
            return found
    return None


def _not_the_largest(logits: torch.Tensor, chosen: Sequence[int | None]) -> Finding | None:
    """Where a token of finite logits [B, V] is not the lowest id of the largest, by another library."""
    values = logits.double().cpu().numpy()
    for row, token in zip(values, chosen, strict=True):
        largest = int(row.argmax())  # the first of several
        if np.isfinite(row).all() and token != largest:
            reason = f"token {token} is chosen where the lowest id of the largest logit is {largest} (look at `greedy`)"
            return Finding(instrument=INSTRUMENT, reason=reason, site="lm_head")
    return None


def _alone(engine: LocalEngine) -> bool:
    """Whether each prompt runs by itself, so that no other row can move its bits."""
    return engine.recipe.execution.mode is not Execution.paged and engine.recipe.execution.batch == 1


def free_and_forced(engine: LocalEngine, golden: Golden, free: np.ndarray, forced: np.ndarray) -> list[Finding]:
    """Where a prompt alone chose another token freely than forced along the same prefix: the first one, or nothing.

    free: tokens [N, T] of the gate; forced: choices [N, T] after the golden's tokens. The same up to the first token
    that is not the golden's. Rows that run together may move each other's last bits, so they are not compared.
    """
    if not _alone(engine):
        return []
    same_prefix = np.logical_and.accumulate(free == golden.tokens[0], 1)
    same_prefix = np.concatenate([np.ones((len(free), 1), bool), same_prefix[:, :-1]], 1)
    apart = np.argwhere(same_prefix & (free != forced) & (free >= 0) & (forced >= 0))
    if not len(apart):
        return []
    n, t = (int(i) for i in apart[0])
    reason = (
        f"p{n}[{t}]: runs freely to token {free[n, t]}, forced along the same tokens to {forced[n, t]} "
        f"({len(apart)} places): what it carries is not the same"
    )
    return [Finding(instrument=INSTRUMENT, reason=reason)]


def chosen_as_watched(engine: LocalEngine, divergences: Sequence[Divergence]) -> list[Finding]:
    """Where a prompt alone chose, as it runs, a token that the same operations, watched, put under the golden's."""
    if not _alone(engine):
        return []
    other = [d for d in divergences if d.candidate.margin > 0 and not d.candidate.least]
    if not other:
        return []
    d = max(other, key=lambda d: d.candidate.margin)
    reason = (
        f"p{d.prompt}[{d.position}]: as it runs it chooses {d.token}, its operations alone prefer {d.golden_token} "
        f"by {d.candidate.margin:.3g} nat ({len(other)} places)"
    )
    return [Finding(instrument=INSTRUMENT, reason=reason)]


def _chosen(engine: LocalEngine, battery: Battery) -> list[Forced]:
    run, longest = engine.recipe.execution, engine.casts.checkpoint.config.max_length
    far = long_enough(engine.recipe, battery, longest)
    made = [] if far is None else list(zip(far.prompts, far.continuations, strict=True))
    joined = run.fused or run.graph is not Graph.off
    if joined:
        text = text_of(of_all_lengths(battery, len(battery.prompts)))
        text = repeated(text, min(FIRST + LONG, longest))
        made.append((text[:FIRST], text[FIRST:]))
    rows = (*of_all_lengths(battery, MOST if joined else 2), *made)
    return [(list(p), list(c)) for p, c in rows]


def _difference(ran: Sequences, watched: Sequences, logits: list[torch.Tensor], t: int) -> Finding:
    """Where it shows first: in what a layer carries on, else in the logits alone."""
    apart = float((logits[0].double() - logits[1].double()).abs().max())
    tokens = "+".join(str(len(p)) for p in ran.prompts)
    step = "prefill" if t == 0 else f"decode step {t}"
    what = f"{step} after {tokens} tokens: logits of the variant as it runs are not those of its operations one by one"
    joined = t > 0 and ran.model.recipe.execution.fused
    fused = " (execution.fused: look at what joins them)" if joined else " (one path, watched and not)"
    theirs = carried(watched.state, watched.slots)
    for (layer, store, row), x in carried(ran.state, ran.slots).items():
        if not same(x, theirs[layer, store, row]):
            first = (
                f"first carried value that differs: layer {layer} {SITES[store]}, so from layer {max(layer - 1, 0)} on"
            )
            reason = f"layer {layer} {SITES[store]}: {what}, {apart:.2g} apart; {first}{fused}"
            return Finding(instrument=INSTRUMENT, reason=reason, site=SITES[store], layer=layer)
    return Finding(
        instrument=INSTRUMENT, reason=f"{what}, {apart:.2g} apart, though what is carried is the same{fused}"
    )
