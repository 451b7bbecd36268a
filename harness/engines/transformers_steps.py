"""The transformers library going over forced tokens step by step, its values seen at our sites."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.engines.transformers_engine import TransformersEngine
from harness.engines.transformers_taps import Recording
from harness.probes import Place, Tap
from variants.rounding import Step
from variants.sites import BY_TOKEN


class TransformersStepper:
    """One prompt through the library with its cache, as `harness.lockstep.Stepper`; values land in `tap.calls`.

    A value is brought to the shape that our forward has at that site; its bits are the library's.
    """

    def __init__(self, engine: TransformersEngine, prompt: Sequence[int], tap: Tap) -> None:
        self.engine, self.prompt, self.tap = engine, list(prompt), tap
        self.sequence = engine.sequence()
        self.length = 0

    def start(self) -> Tensor:
        return self._run(self.prompt, "prefill")

    def after(self, tokens: Tensor) -> Tensor:
        return self._run(tokens.tolist(), "decode")

    @torch.inference_mode()
    def _run(self, ids: list[int], phase: str) -> Tensor:
        self.tap.begin(Step(phase, (0,), (self.length,), (len(ids),)))
        with self.engine.record() as recording:
            logits = self.sequence.advance(ids)
        self.length += len(ids)
        for place in recording.places:
            if self.tap.wanted(*place):
                self.tap.calls[place] = [self._ours(recording, place)]
        return torch.from_numpy(logits).unsqueeze(0)

    def _ours(self, recording: Recording, place: Place) -> Tensor:
        (value,) = recording.passes(*place)
        site, heads = place[0], self.engine.config.num_heads
        if site in BY_TOKEN:
            return value.flatten(0, 1)
        if site == "mla_core":
            return value.unflatten(-1, (heads, -1))
        if site == "kv_b_proj":
            return value.reshape(1, -1, value.shape[-1])
        return value[:, -1:] if site == "final_norm" else value
