"""How far a variant's logits are from those of the float64 model, where that fits its device a layer at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from harness.engines.local import LocalEngine, forced_logits
from harness.oracle import oracle_recipe
from harness.streamed import streamed_logits
from variants import decode
from variants.errors import EngineError
from variants.recipe import Semantics
from variants.weights import Casts


@dataclass(frozen=True)
class LogitError:
    """One variant over the tokens of one sequence, the first of which comes out of prefill.

    relative: |logits - float64's| over |float64's|, Euclidean norms over all logits of a token. largest: of |logit -
    float64's|. kl_nats: of the variant's distribution from float64's. same_token: whether both choose the same. A list
    has one figure a token.
    """

    relative: list[float]
    largest: list[float]
    kl_nats: list[float]
    same_token: list[bool]

    def cells(self) -> list[str]:
        """Means over tokens, and the largest of each."""
        n = len(self.relative)
        spread = [f"{sum(x) / n:.3g} ({max(x):.3g})" for x in (self.relative, self.largest, self.kl_nats)]
        return [*spread, f"{sum(self.same_token)}/{n}"]

    def record(self) -> dict[str, object]:
        return asdict(self)


HEADER = ("against float64", "relative", "max |dlogit|", "KL nats", "same token")


def logit_errors(
    engine: LocalEngine, others: Mapping[str, LocalEngine], prompt: Sequence[int], tokens: int
) -> dict[str, LogitError]:
    """An engine's logits over its own greedy tokens after a prompt, and others' forced along them, against float64.

    The engine decodes as it does in a run, fused where it is. Each is held against float64 under the semantics that it
    declares. Raises EngineError where a logit is not finite.
    """
    own = _greedy(engine, prompt, tokens)
    chosen = decode.greedy(own).tolist()
    rows = {engine.name: (engine, own)}
    for name, other in others.items():
        rows[name] = (other, torch.cat(forced_logits(other.model, [prompt], [chosen])))
    exact: dict[str, Tensor] = {}
    found: dict[str, LogitError] = {}
    for name, (ran, logits) in rows.items():
        key = str(ran.recipe.semantics.as_dict())
        if key not in exact:
            exact[key] = float64_logits(engine.casts, prompt, chosen, ran.recipe.semantics)
        if not bool(torch.isfinite(logits).all()):
            raise EngineError(f"{name}: a logit is not finite, so it has no distance to float64")
        found[name] = compared(logits.double(), exact[key])
    return found


def _greedy(engine: LocalEngine, prompt: Sequence[int], tokens: int) -> Tensor:
    """Logits [tokens, V] of a free run."""
    runs = decode.steps(engine.model, [prompt], tokens, lambda _, logits: decode.greedy(logits))
    return torch.cat([run.logits for run in runs])


def float64_logits(casts: Casts, prompt: Sequence[int], tokens: Sequence[int], semantics: Semantics) -> Tensor:
    """Logits [T, V] of the oracle before each of some forced tokens, one layer's float64 weights held at a time."""
    recipe = oracle_recipe(casts.checkpoint.config, semantics)
    alone = Casts(casts.checkpoint, placement=casts.placement)
    pieces = sorted(streamed_logits(alone, recipe, [prompt], [tokens]), key=lambda piece: piece[1])
    return torch.cat([logits for _, _, logits in pieces])


def compared(logits: Tensor, exact: Tensor) -> LogitError:
    """Rows [T, V] of float64 against float64."""
    apart = logits - exact
    theirs, ours = exact.log_softmax(-1), logits.log_softmax(-1)
    return LogitError(
        relative=(apart.norm(dim=-1) / exact.norm(dim=-1)).tolist(),
        largest=apart.abs().amax(-1).tolist(),
        kl_nats=(theirs.exp() * (theirs - ours)).sum(-1).tolist(),
        same_token=(decode.greedy(logits) == decode.greedy(exact)).tolist(),
    )
