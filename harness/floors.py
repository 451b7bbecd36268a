"""What a fused decode step and a prefill take on a GPU beside their floors; nothing is told while the bits differ."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from harness.device_timing import (
    Ceilings,
    Timed,
    bytes_a_token,
    ceilings,
    decode_ms,
    events_ms,
    table,
)
from harness.engines.local import LocalEngine
from variants import decode
from variants.axes import Graph
from variants.errors import EngineError
from variants.fused import FusedStep
from variants.fused_step import fused_step
from variants.model import Model
from variants.state import State

PROMPT = 32  # tokens before the first decoded one
PREFILL_REPEATS = 5
REPLAYS = 10


@dataclass(frozen=True)
class Floors:
    """The figures of one run.

    decode: by context, a step in ms; prefill: by tokens, in ms; launches: rows of `device_timing.table`.
    """

    compared: int
    decode: dict[int, Timed]
    prefill: dict[int, Timed]
    launches: list[dict[str, Any]]
    ceilings: Ceilings
    bytes_a_token: dict[int, int]
    weights_bytes: int
    peak_bytes: int

    def rate(self, context: int) -> float:
        return 1e3 / self.decode[context].median

    def floor_ms(self, context: int) -> float:
        """The least a step can take where its bytes are read as fast as this run's large read."""
        return self.bytes_a_token[context] / self.ceilings.read_gb_s / 1e6

    def record(self) -> dict[str, Any]:
        return {
            "against": "floors",
            "compared_tokens": self.compared,
            "decode_ms": {str(n): asdict(t) for n, t in self.decode.items()},
            "floor_ms": {str(n): self.floor_ms(n) for n in self.decode},
            "prefill_ms": {str(n): asdict(t) for n, t in self.prefill.items()},
            "launches": self.launches,
            "ceilings": asdict(self.ceilings),
            "weights_bytes": self.weights_bytes,
            "peak_bytes": self.peak_bytes,
        }


def measured(engine: LocalEngine, *, steps: int, contexts: Sequence[int], prefills: Sequence[int], seed: int) -> Floors:
    """Compare the fused step with its launches one by one over `steps` tokens, then time it.

    Raises EngineError, and times nothing, where a single bit of the logits differs.
    """
    device, config = engine.casts.device, engine.casts.checkpoint.config
    torch.cuda.reset_peak_memory_stats(device)
    weights = torch.cuda.memory_allocated(device)
    random = torch.Generator().manual_seed(seed)
    prompt = torch.randint(3, config.vocab_size, (PROMPT,), generator=random).tolist()
    model = engine.model
    state = _same(engine, prompt, steps, longest=max(contexts) + 2 * steps)
    step = fused_step(model, state, 0, model._steps)
    assert isinstance(step, FusedStep)
    with torch.inference_mode():
        for latent in state.latent.values():  # what a longer context holds; zeros would be timed as nothing else is
            latent.normal_(generator=torch.Generator(device).manual_seed(seed))
    peak = torch.cuda.max_memory_allocated(device)
    decoded = {n: _decoded(step, n, steps) for n in contexts}
    found = ceilings(device)
    step.begin(step.buffers.token.clone(), contexts[0])
    rows = table(step, config, contexts[0], found.read_gb_s)
    filled = {n: _prefilled(model, n, random) for n in prefills}
    return Floors(steps, decoded, filled, rows, found, {n: bytes_a_token(config, n) for n in contexts}, weights, peak)


def _decoded(step: FusedStep, context: int, steps: int) -> Timed:
    return decode_ms(step, context, steps, REPLAYS)


def _same(engine: LocalEngine, prompt: list[int], steps: int, *, longest: int) -> State:
    """Both paths over the same tokens, bit for bit; returns the fused one's state."""
    execution = replace(engine.variant.execution, fused=False, graph=Graph.off)
    plain = LocalEngine(engine.casts, replace(engine.variant, execution=execution), name="plain", device=engine.device)
    states = [m.new_state(slots=1, max_len=longest) for m in (plain.model, engine.model)]
    logits = [decode.prefill(m, s, [0], [prompt]) for m, s in zip((plain.model, engine.model), states, strict=True)]
    for t in range(steps):
        if not torch.equal(*logits) or not bool(torch.isfinite(logits[0]).all()):
            raise EngineError(f"token {t}: the fused step's logits are not those of its launches one by one; not timed")
        tokens = decode.greedy(logits[0])
        logits = [
            decode.decode_one_token(m, s, [0], tokens) for m, s in zip((plain.model, engine.model), states, strict=True)
        ]
    return states[1]


def _prefilled(model: Model, tokens: int, random: torch.Generator) -> Timed:
    """One prompt of so many tokens into an empty slot, host included."""
    state = model.new_state(slots=1, max_len=tokens)
    ids = torch.randint(3, model.config.vocab_size, (1, tokens), generator=random).to(model.device)

    def once() -> None:
        state.length[0] = 0
        model.forward(ids, state, slots=[0], lengths=[tokens], phase="prefill")

    return events_ms(once, PREFILL_REPEATS, warm=2)
