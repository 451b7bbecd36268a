"""Values at chosen places of forced tokens, one step at a time: of our own models, or of anything that steps alike."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from harness.lockstep import walk
from variants.errors import UsageError
from variants.model import Model
from variants.model_config import ModelConfig
from variants.recipe import Place, Rule
from variants.rounding import NoProbe, Probe, RoundAt, Step
from variants.sites import CHUNK_SITES, INTEGER

Tokens = Sequence[int]
Values = Mapping[Place, Tensor]

# Carried, over the whole cache, inside a chunk, of some tokens only, or no numbers: by chance of shapes one of these
# could be taken for a value a token.
NOT_BY_TOKEN = frozenset(
    (*CHUNK_SITES, *INTEGER, "conv_state", "kda_state", "kv_b_in", "kv_b_proj", "mla_k", "mla_v", "mla_scores",
     "mla_probs", "expert_gate_up", "expert_silu", "expert_act", "expert_down_in", "expert_down")
)  # fmt: skip


class Candidate(Protocol):
    """Something whose values can be read while it is forced along given tokens."""

    def values(self, prompts: Sequence[Tokens], forced: Sequence[Tokens], wanted: Sequence[Place]) -> Iterator[Values]:
        """For each forced token: the value [rows, width] at every wanted place that its logits were computed from.

        All rows of `forced` have one length.
        """
        ...


def layer_places(config: ModelConfig) -> tuple[Place, ...]:
    """The output of each layer, then the logits."""
    return (*(("mlp_residual", n) for n in range(config.num_layers)), ("lm_head", config.num_layers))


class LastTokens:
    """Keeps, by slot, what each row's last real token had at the wanted places; the run's bits stay as they were."""

    def __init__(self, wanted: Sequence[Place], inner: Probe | None = None) -> None:
        """Raises UsageError for a site that has not one value for each token."""
        refused = [site for site, _ in wanted if site in NOT_BY_TOKEN]
        if refused:
            raise UsageError(f"site {refused[0]} has not one value for each token; choose another site of its layer")
        self.wanted, self.inner = frozenset(wanted), inner or NoProbe()
        self.kept: dict[Place, dict[int, Tensor]] = {place: {} for place in wanted}
        self.step = Step("prefill", (), (), ())

    def begin(self, step: Step) -> None:
        self.inner.begin(step)
        self.step = step

    def bind(self, site: str, layer: int, rule: Rule, rounding: RoundAt | None) -> RoundAt | None:
        inner = self.inner.bind(site, layer, rule, rounding)
        if (site, layer) not in self.wanted:
            return inner

        def keep(x: Tensor) -> Tensor:
            y = x if inner is None else inner(x)
            last = last_token(y, self.step, site)
            self.kept[(site, layer)].update(zip(self.step.slots, last.unbind(0), strict=True))
            return y

        return keep

    def values(self, rows: int) -> Values:
        """[rows, width] at each place, in float64, slots in order."""
        return {place: torch.stack([kept[i] for i in range(rows)]).double() for place, kept in self.kept.items()}


def last_token(x: Tensor, step: Step, site: str) -> Tensor:
    """[B, T, ...] or [B * T, ...] -> [B, width] of each row's last real token; the head has that one token alone.

    Raises UsageError for a value of another shape.
    """
    rows, longest = len(step.lengths), max(step.lengths)
    if (x.shape[0] != rows and x.shape[0] % rows == 0) or (x.ndim == 2 and longest == 1):
        x = x.unflatten(0, (rows, -1))
    if x.shape[0] != rows or x.ndim < 3 or x.shape[1] not in (1, longest):
        raise UsageError(
            f"site {site}: its values {list(x.shape)} are not one a token of {rows} rows; choose a site that is"
        )
    index = [min(n, x.shape[1]) - 1 for n in step.lengths]
    return x[torch.arange(rows, device=x.device), torch.tensor(index, device=x.device)].flatten(1)


@dataclass(frozen=True)
class ModelCandidate:
    """A model of ours: `build` makes it around a probe, `batch` rows run together (None: all)."""

    build: Callable[[LastTokens], Model]
    batch: int | None = None

    def values(self, prompts: Sequence[Tokens], forced: Sequence[Tokens], wanted: Sequence[Place]) -> Iterator[Values]:
        size = self.batch or len(prompts)
        parts = [self._part(prompts[i : i + size], forced[i : i + size], wanted) for i in range(0, len(prompts), size)]
        for step in zip(*parts, strict=True):
            yield {place: torch.cat([values[place] for values in step]) for place in wanted}

    def _part(self, prompts: Sequence[Tokens], forced: Sequence[Tokens], wanted: Sequence[Place]) -> Iterator[Values]:
        seen = LastTokens(wanted)
        model = self.build(seen)
        for _ in walk([model], prompts, forced):
            yield seen.values(len(prompts))
