"""The transformers library going over forced tokens step by step, its values seen at our sites."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.engines.transformers_engine import TransformersEngine
from harness.engines.transformers_taps import Recording
from harness.forced_errors import Battery
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


class LibraryRows:
    """Several prompts through the library, one after the other in each step; values are stacked as rows of one batch.

    Shorter prompts are filled up at the right with zeros, as ragged rows of our own forward are. Only places of one
    value a token are kept.
    """

    def __init__(self, engine: TransformersEngine, battery: Battery, tap: Tap) -> None:
        self.tap = tap
        self.rows = [TransformersStepper(engine, p, Tap(tap.wanted)) for p in battery.prompts]

    def start(self) -> Tensor:
        return self._gathered([row.start() for row in self.rows])

    def after(self, tokens: Tensor) -> Tensor:
        return self._gathered([row.after(t.unsqueeze(0)) for row, t in zip(self.rows, tokens, strict=True)])

    def _gathered(self, logits: list[Tensor]) -> Tensor:
        steps = [row.tap.step for row in self.rows]
        first = steps[0]
        assert first is not None
        starts, lengths = tuple(s.starts[0] for s in steps if s), tuple(s.lengths[0] for s in steps if s)
        self.tap.begin(Step(first.phase, tuple(range(len(steps))), starts, lengths))
        for place in self.rows[0].tap.calls:
            parts = [row.tap.values[place] for row in self.rows]
            if all(x.dim() > 2 and x.shape[1] == n for x, n in zip(parts, lengths, strict=True)):
                wide = [F.pad(x, (0, 0) * (x.dim() - 2) + (0, max(lengths) - x.shape[1])) for x in parts]
                self.tap.calls[place] = [torch.cat(wide)]
        return torch.cat(logits)
