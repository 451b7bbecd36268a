"""The transformers library as something whose values instruments can read, prompt by prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from harness.engines.transformers_engine import TransformersEngine
from harness.engines.transformers_steps import TransformersStepper
from harness.forced_values import Tokens, Values, last_token
from harness.probes import Tap
from variants.recipe import Place


@dataclass(frozen=True)
class TransformersCandidate:
    """Implements `harness.forced_values.Candidate` over a loaded library model."""

    engine: TransformersEngine

    def values(self, prompts: Sequence[Tokens], forced: Sequence[Tokens], wanted: Sequence[Place]) -> Iterator[Values]:
        """For each forced token, the value at every wanted place that its logits were computed from."""
        places = frozenset(wanted)
        taps = [Tap(lambda site, layer: (site, layer) in places) for _ in prompts]
        rows = [TransformersStepper(self.engine, p, tap) for p, tap in zip(prompts, taps, strict=True)]
        for row in rows:
            row.start()
        for t in range(len(forced[0])):
            yield {place: torch.cat([self._last(tap, place) for tap in taps]) for place in wanted}
            if t + 1 < len(forced[0]):
                for row, tokens in zip(rows, forced, strict=True):
                    row.after(torch.tensor([tokens[t]]))

    @staticmethod
    def _last(tap: Tap, place: Place) -> torch.Tensor:
        assert tap.step is not None
        return last_token(tap.values[place], tap.step, place[0]).double()
