"""The shortest run in which every phase of a recipe runs: a prompt for each row and one decoded token."""

from collections.abc import Sequence

from variants import decode
from variants.axes import Execution
from variants.model import Model
from variants.request import Request
from variants.runner import Runner


def short_run(model: Model, prompts: Sequence[tuple[int, ...]]) -> str:
    """Run it as the recipe says; the rows and tokens of each forward, of a paged run, else ""."""
    if model.recipe.execution.mode is not Execution.paged:
        decode.steps(model, prompts, 2, lambda _, logits: decode.greedy(logits))
        return ""
    runner, passes = Runner(model, max_len=len(prompts[0]) + 1), {}
    for ids in prompts:
        runner.add(Request(ids=ids, max_tokens=2))
    while runner.busy:
        passes |= dict.fromkeys(f"{p.phase} {len(p.lengths)} x {p.width}" for p in runner.step().passes)
    return ", ".join(passes)
