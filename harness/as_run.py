"""Whether a variant gives the same bits watched and unwatched.

What looks inside runs each operation by itself, where a probe can see it; what gives the tokens may run them joined
into one step (`execution.fused`). A fault in the joining is in the tokens and in no other instrument.
"""

from dataclasses import dataclass

import numpy as np
import torch

from harness.engines.local import LocalEngine
from harness.forced_errors import Battery
from harness.golden_data import Golden
from harness.probes import Tap
from harness.reach import long_enough
from harness.reused_slot import SITES, carried, same
from harness.verdict import Finding
from variants.axes import Execution
from variants.decode import Sequences

INSTRUMENT = "as_run"
Forced = tuple[list[int], list[int]]  # a prompt, and the tokens after it


@dataclass(frozen=True, kw_only=True)
class AsRun:
    """tokens: logits compared. found: the first difference. left_out: why nothing was compared."""

    tokens: int
    found: Finding | None = None
    left_out: str | None = None

    def record(self) -> dict[str, object]:
        return {"tokens": self.tokens, "left_out": self.left_out}

    def findings(self) -> list[Finding]:
        return [] if self.found is None else [self.found]


def as_run(engine: LocalEngine, battery: Battery) -> AsRun:
    """The shortest and the longest prompt and one past every tile, with their forced tokens, by both paths."""
    if engine.recipe.execution.mode is Execution.paged:
        return AsRun(tokens=0, left_out="a runner chooses who runs together")
    compared = 0
    for prompt, continuation in _chosen(engine, battery):
        paths = (engine.model, engine.build(probe=Tap(lambda site, layer: False)))
        ran, watched = (Sequences(model, [prompt], len(continuation) + 1) for model in paths)
        logits = [ran.start(), watched.start()]
        for t in range(len(continuation) + 1):
            compared += 1
            if not same(*logits):
                return AsRun(tokens=compared, found=_difference(ran, watched, logits, len(prompt), t))
            if t < len(continuation):
                token = torch.tensor([continuation[t]], device=engine.model.device)
                logits = [ran.after(token), watched.after(token)]
    return AsRun(tokens=compared)


def free_and_forced(engine: LocalEngine, golden: Golden, free: np.ndarray, forced: np.ndarray) -> list[Finding]:
    """Where a prompt alone chose another token freely than forced along the same prefix: the first one, or nothing.

    free: tokens [N, T] of the gate; forced: choices [N, T] after the golden's tokens. The same up to the first token
    that is not the golden's. Rows that run together may move each other's last bits, so they are not compared.
    """
    if engine.recipe.execution.mode is Execution.paged or engine.recipe.execution.batch > 1:
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


def _chosen(engine: LocalEngine, battery: Battery) -> list[Forced]:
    far = long_enough(engine.recipe, battery, engine.casts.checkpoint.config.max_length)
    rows = sorted(zip(battery.prompts, battery.continuations, strict=True), key=lambda row: len(row[0]))
    made = [] if far is None else list(zip(far.prompts, far.continuations, strict=True))
    ends = rows[:1] if len(rows) == 1 else [rows[0], rows[-1]]
    return [(list(p), list(c)) for p, c in (*ends, *made)]


def _difference(ran: Sequences, watched: Sequences, logits: list[torch.Tensor], tokens: int, t: int) -> Finding:
    """Where it shows first: in what a layer carries on, else in the logits alone."""
    apart = float((logits[0].double() - logits[1].double()).abs().max())
    step = "prefill" if t == 0 else f"decode step {t}"
    told = f"{step} after {tokens} tokens: logits of the variant as it runs are not those of its operations one by one"
    joined = t > 0 and ran.model.recipe.execution.fused
    fused = " (execution.fused: look at what joins them)" if joined else " (one path, twice: it does not repeat itself)"
    theirs = carried(watched.state, [0])
    for (layer, store, row), x in carried(ran.state, [0]).items():
        if not same(x, theirs[layer, store, row]):
            first = (
                f"first carried value that differs: layer {layer} {SITES[store]}, so from layer {max(layer - 1, 0)} on"
            )
            reason = f"layer {layer} {SITES[store]}: {told}, {apart:.2g} apart; {first}{fused}"
            return Finding(instrument=INSTRUMENT, reason=reason, site=SITES[store], layer=layer)
    return Finding(
        instrument=INSTRUMENT, reason=f"{told}, {apart:.2g} apart, though what is carried is the same{fused}"
    )
