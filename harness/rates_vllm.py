"""Rates of vLLM's own engine in this process, on dummy weights of a geometry: its graphs, and the same engine without.

Every figure is the wall clock of one `step` of the engine, scheduler and sampling included. It is loaded once, with
graphs of decode steps; told to use none, it runs the same step eagerly.

Its dummy weights are as small as their correction biases (1e-3), so that these alone choose experts: 64 tokens would
read 10 of 256, which no trained model does. The biases are set to zero; 64 tokens then read 220, as with our weights.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from harness.engines.vllm_engine import OPTIONS, SWITCHES, imported, started
from harness.rates import PROMPT, Asked, Rates, stepped, time_decodes, time_prefills
from variants.errors import EngineError

LEAST_TOKENS = 2048  # of a step


def options(asked: Asked, *, memory: float, backend: str | None) -> dict[str, Any]:
    """What `LLM` is given: dummy weights, full graphs of decode steps for the batches that are asked for."""
    tokens = max(LEAST_TOKENS, *asked.prefills, *(PROMPT * b for b in asked.batches))
    sizes = sorted({1, *asked.batches})
    return {
        **OPTIONS,
        **({} if backend is None else {"attention_backend": backend}),
        "dtype": "bfloat16",
        "load_format": "dummy",
        "enforce_eager": False,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes},
        "max_model_len": asked.longest,
        "max_num_batched_tokens": tokens,
        "max_num_seqs": max(sizes),
        "gpu_memory_utilization": memory,
    }


def measured(described: Path, asked: Asked, rates: Rates, *, memory: float, backend: str | None) -> None:
    """Load once and time both paths. described: the geometry's config.json. Raises DeviceError if it cannot start."""
    library, chosen = imported(), options(asked, memory=memory, backend=backend)
    vocab = int(json.loads(described.read_text(encoding="utf-8"))["vocab_size"])
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(described, Path(folder) / "config.json")
        engine = _Engine(library, started(library, Path(folder), chosen).llm_engine, vocab)
        zeroed = without_biases(engine.runner.get_model())
        rates.about |= {"options": chosen, "switches": dict(SWITCHES), "version": str(library.__version__)}
        rates.about |= {"correction_biases_zeroed": zeroed}
        rates.attempt("graph", lambda: engine.timed("graph", asked, rates))
        rates.attempt("eager", lambda: engine.without_graphs("eager", asked, rates))


@torch.inference_mode()
def without_biases(model: torch.nn.Module) -> int:
    """Zero every router's correction bias where it lies, for captured graphs read it there; returns how many.

    Raises EngineError where there is none.
    """
    biases = [p for name, p in model.named_parameters() if name.endswith("e_score_correction_bias")]
    if not biases:
        raise EngineError("vllm: no router of this model has a correction bias")
    for bias in biases:
        bias.zero_()
    return len(biases)


class _Engine:
    """vLLM's engine, step by step."""

    def __init__(self, library: Any, engine: Any, vocab: int) -> None:
        self.library, self.engine, self.vocab, self.made = library, engine, vocab, 0

    @property
    def runner(self) -> Any:
        return self.engine.model_executor.driver_worker.worker.model_runner

    def timed(self, path: str, asked: Asked, rates: Rates) -> None:
        time_decodes(path, asked, self.vocab, self.run, rates)
        if path == "eager":  # a prompt runs without a graph in either
            time_prefills(path, asked, self.vocab, self.run, rates)

    def without_graphs(self, path: str, asked: Asked, rates: Rates) -> None:
        """The same engine, whose dispatcher is told that it has no graphs."""
        dispatcher = self.runner.cudagraph_dispatcher
        had, dispatcher.keys_initialized = dispatcher.keys_initialized, False
        try:
            self.timed(path, asked, rates)
        finally:
            dispatcher.keys_initialized = had

    def run(self, prompts: list[list[int]], tokens: int) -> list[float]:
        """Milliseconds of each step until all have so many tokens."""
        sampling = self.library.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        for ids in prompts:
            self.made += 1
            self.engine.add_request(str(self.made), {"prompt_token_ids": ids}, sampling)
        answered = 0

        def step() -> bool:
            nonlocal answered
            answered += sum(out.finished for out in self.engine.step())
            return self.engine.has_unfinished_requests()

        taken = stepped(step)
        if answered != len(prompts):
            raise EngineError(f"vllm answered {answered} of {len(prompts)} prompts")
        return taken
