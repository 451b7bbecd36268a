"""How many of a golden's tokens a recipe chooses, forced along them or decoding freely, with its forwards counted."""

from collections.abc import Iterator

import torch
from torch import Tensor

from harness.golden_data import ENDED, Golden
from harness.localize import Runner
from harness.lockstep import walk
from harness.numerics import policy
from variants import decode
from variants.model import Model
from variants.recipe import Recipe


def matched(runner: Runner, recipe: Recipe, golden: Golden, *, free: bool) -> int:
    """Tokens in agreement with the golden's run 0; rows run together as the recipe's execution says."""
    size, model = recipe.execution.batch, runner.model(recipe)
    count = _free if free else _forced
    with policy(runner.device, tf32=recipe.tf32, reduced_sums=recipe.reduced_sums):
        return sum(count(model, *part) for part in _parts(golden, size))


def _parts(golden: Golden, size: int) -> Iterator[tuple[list[list[int]], Tensor]]:
    """Prompts and their tokens [B, T], the rows that have any."""
    rows = [n for n in range(len(golden.prompts)) if golden.tokens[0, n, 0] != ENDED]
    for start in range(0, len(rows), size):
        group = rows[start : start + size]
        yield [list(golden.prompts[n]) for n in group], torch.tensor(golden.tokens[0, group])


def _forced(model: Model, prompts: list[list[int]], tokens: Tensor) -> int:
    continuations = [[t for t in row if t != ENDED] for row in tokens.tolist()]
    found = 0
    for position in walk([model], prompts, continuations):
        hit = decode.greedy(position.logits[0]).cpu() == tokens[:, position.t]
        found += int(hit[list(position.rows)].sum())
    return found


def _free(model: Model, prompts: list[list[int]], tokens: Tensor) -> int:
    chosen: list[Tensor] = []

    def choose(t: int, logits: Tensor) -> Tensor:
        chosen.append(decode.greedy(logits))
        return chosen[-1]

    decode.steps(model, prompts, tokens.shape[1], choose)
    return int((torch.stack(chosen, 1).cpu() == tokens).sum())
