"""A variant against llama.cpp's own server, whole answers in turn: the server says itself what a token took."""

import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

from harness.engines.llama_answers import LlamaAnswer, read, request
from harness.engines.llama_child import LlamaSettings
from harness.engines.llama_server import LlamaServerEngine
from harness.paired import WARM_UP, Pairs, VariantSide

BLOCKS = 6  # answers of each side in a run


class LlamaSide:
    """A checkpoint in float32 behind llama.cpp's server, one slot, as many threads as torch has; no logprobs asked."""

    def __init__(self, folder: str | Path, *, length: int) -> None:
        settings = LlamaSettings(gguf="", length=length, threads=torch.get_num_threads())
        self.engine = LlamaServerEngine.of_checkpoint(folder, settings)

    def __enter__(self) -> "LlamaSide":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.stop()

    def answer(self, prompt: Sequence[int], tokens: int) -> LlamaAnswer:
        return read(self.engine._post(request(prompt, tokens, top_k=0)), prompt, "bench")


@torch.inference_mode()
def timed_in_blocks(ours: VariantSide, theirs: LlamaSide, prompt: Sequence[int], *, steps: int) -> Pairs:
    """`BLOCKS` greedy answers of each side in turn; wall seconds a token on the mean of an answer, [BLOCKS, 2].

    Ours by the clock round each step, Python and the choice of the token included, after `WARM_UP` steps; theirs by
    the server's own clock. The side that goes first changes from block to block.
    """
    taken, agreed = np.empty((BLOCKS, 2)), 0
    theirs.answer(prompt, WARM_UP)
    for block, order in zip(range(BLOCKS), cycle(((0, 1), (1, 0))), strict=False):
        chosen: list[tuple[int, ...]] = [(), ()]
        for side in order:
            if side:
                answer = theirs.answer(prompt, steps + WARM_UP)
                chosen[1], taken[block, 1] = answer.tokens, answer.step_s
            else:
                chosen[0], taken[block, 0] = _answer(ours, prompt, steps)
        agreed += sum(a == b for a, b in zip(*chosen, strict=True))
    return Pairs(wall_s=taken, cpu_s=None, agreed=agreed, compared=BLOCKS * (steps + WARM_UP))


def _answer(ours: VariantSide, prompt: Sequence[int], steps: int) -> tuple[tuple[int, ...], float]:
    tokens = [ours.start(prompt)]
    for _ in range(WARM_UP - 1):
        tokens.append(ours.step(tokens[-1]))
    began = time.perf_counter()
    for _ in range(steps):
        tokens.append(ours.step(tokens[-1]))
    return tuple(tokens), (time.perf_counter() - began) / steps
