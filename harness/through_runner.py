"""What a paged runner does to a sequence (pieces, neighbours, shared prefixes, preemption) held against the definition.

The watched twin and the forced tokens come from the same runner, and local replay and envelope do without it: a token
fed twice, a stale snapshot or a wrong page is in all or none of them. In float64 neighbours move no more than the order
of sums, so every value of every pass must be the definition's at the tokens that the request stands for.
"""

from dataclasses import dataclass, replace

from harness.definition import forward
from harness.forced_errors import Battery
from harness.inspect import exact_recipe, model_under
from harness.parts import part
from harness.probes import Passes, Place
from harness.reach import of_all_lengths
from harness.runner_tasks import RunnerBrokeError, Task, tasks
from harness.shared_code import TOLERANCE, earliest, pass_differences, stored_parameter, too_large
from harness.verdict import Finding
from variants.axes import Execution
from variants.batch import NOBODY
from variants.recipe import Recipe, Semantics
from variants.weights import Casts

INSTRUMENT = "through_runner"
PROMPTS, TOKENS = 3, 4  # of the battery, beside what the settings of prefixes and pages ask for


@dataclass(frozen=True, kw_only=True)
class ThroughRunner:
    """compared: values. hits: tokens that came with a shared prefix. preemptions: how often a sequence gave way.
    departs: the first place beyond TOLERANCE, with the size. broke: how the runner ended in an error; left_out: why
    nothing was compared."""

    compared: int = 0
    hits: int = 0
    preemptions: int = 0
    departs: tuple[Place, float] | None = None
    broke: RunnerBrokeError | None = None
    left_out: str | None = None

    def record(self) -> dict[str, object]:
        return {k: v for k, v in vars(self).items() if k not in ("departs", "broke")}

    def findings(self) -> list[Finding]:
        if self.departs is None:
            return [] if self.broke is None else [self.broke.finding(INSTRUMENT)]
        (site, layer), size = self.departs
        reason = (
            f"layer {layer} {site}: in float64 the runner's sequences depart from the model's definition by {size:.2g} "
            "relative (look at what feeds, shares, gives up and brings back: runner, scheduler, prefix, state)"
        )
        return [Finding(instrument=INSTRUMENT, reason=reason, site=site, layer=layer)]


def through_runner(casts: Casts, declared: Recipe, battery: Battery) -> ThroughRunner:
    """A few prompts together, then what prefixes and pages ask for (`runner_tasks`), every value of every pass."""
    if declared.execution.mode is not Execution.paged:
        return ThroughRunner(left_out="no runner: the variant is not paged")
    if (why := too_large(casts)) is not None:
        return ThroughRunner(left_out=why)
    try:
        return _compared(casts, declared, battery)
    except RunnerBrokeError as broke:
        return ThroughRunner(broke=broke)


@part("through the runner")
def _compared(casts: Casts, declared: Recipe, battery: Battery) -> ThroughRunner:
    config, exact = casts.checkpoint.config, exact_recipe(casts.checkpoint.config, declared, Semantics())
    first: dict[Place, float] = {}
    compared, hits, preemptions = 0, 0, 0
    for task in (_together(declared, battery), *tasks(declared.execution, battery, config.max_length)):
        told = [forward(config, stored_parameter(casts), [*prompt, *forced[:-1]]) for prompt, forced in task.rows]
        tap = Passes(lambda site, layer, told=told: (site, layer) in told[0])
        runner = task.runner(model_under(casts, replace(exact, execution=task.execution), tap))
        for stepped in task.steps(runner):
            for (step, calls), ran in zip(tap.passes, stepped.passes, strict=True):
                rows = [None if n == NOBODY else told[n] for n in ran.rows]
                for place, size in pass_differences(step, calls, rows):
                    compared += 1
                    if size > TOLERANCE:
                        first[place] = max(size, first.get(place, 0.0))
            tap.passes.clear()
        stats = runner.stats()
        hits, preemptions = hits + stats.prefix_hit_tokens, preemptions + stats.preemptions
    return ThroughRunner(compared=compared, hits=hits, preemptions=preemptions, departs=earliest(first, config))


def _together(declared: Recipe, battery: Battery) -> Task:
    """Prompts of the battery's lengths, with as many pages as they need."""
    return Task(
        execution=replace(declared.execution, pages=0),
        waves=(tuple((tuple(p), tuple(c[:TOKENS])) for p, c in of_all_lengths(battery, PROMPTS)),),
    )
