"""The transformers library's Kimi-Linear as an engine, in this process, one sequence at a time.

Tokens are chosen here, from the library's logits: its `generate` is never called. A prompt is one pass with a cache, in
the chunked form of the delta rule; every later token is a pass of one token over that cache, in the recurrent form.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.engines.logits import ScoreTable
from harness.engines.protocol import EngineInfo, Generation, Prompts, Scored
from harness.engines.sequences import (
    Sequences,
    as_engine_error,
    check_pairs,
    check_rows,
    decode_rows,
    forced_scores,
)
from harness.engines.transformers_load import DTYPES, LoadedModel, load_model, quiet
from harness.engines.transformers_taps import Recording, record
from variants.errors import UsageError
from variants.model_config import ModelConfig

_WIDER = {"bf16": ("bf16", "f32", "f64"), "f16": ("f16", "f32", "f64"), "f32": ("f32", "f64"), "f64": ("f64",)}
_ISLANDS = "f64, but KDA cores, gates, norms, eager softmax and the router in f32"


class TransformersEngine:
    """One loaded model of the library; `TransformersEngine.load` makes it, `at_precision` a wider copy of it."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._shapes_run: set[tuple[int, int]] = set()

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: str = "f32",
        attention: str = "eager",
        experts: str = "grouped_mm",
        device: str = "cpu",
    ) -> "TransformersEngine":
        """The checkpoint directory `path` in `dtype` ("f32", "bf16" or "f16") on `device` ("cpu", "cuda", "cuda:N").

        experts: "grouped_mm" is the library's own default (float32 sum of a token's experts, rounded once); "eager"
        adds expert by expert and rounds after each. Raises what `transformers_load.load_model` raises.
        """
        return cls(load_model(path, dtype=dtype, attention=attention, experts=experts, device=device))

    @property
    def info(self) -> EngineInfo:
        loaded = self._loaded
        return EngineInfo(
            name="transformers",
            version=distribution_version("transformers"),
            device=loaded.device,
            dtype=_ISLANDS if loaded.dtype == "f64" else loaded.dtype,
            model_sha256=loaded.model_sha256,
            tokenizer_sha256=loaded.tokenizer_sha256,
            full_logits=True,
            precisions=_WIDER[loaded.dtype],
            taps=True,
            sampling={"temperature": 0.0, "ties": "lowest id", "logits": loaded.dtype},
        )

    @property
    def provenance(self) -> dict[str, Any]:
        """What was really dispatched and loaded, read off the live model."""
        loaded, options = self._loaded, self._loaded.model.config
        return {
            "engine": "transformers",
            "version": self.info.version,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "device": loaded.device,
            "attention": options._attn_implementation,
            "experts": options._experts_implementation,
            "kernels": dict(loaded.kernels),
            "parameters_loaded_as": loaded.as_loaded,
            "parameters_rounded": list(loaded.rounded),
            "parameter_dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in loaded.model.parameters()}),
        }

    def at_precision(self, dtype: str) -> "TransformersEngine":
        """This engine's parameters, exactly as they were loaded, held and run in the wider `dtype`.

        What loading rounded (`A_log` in bf16) stays rounded, so that only the arithmetic changes. At "f64" the library
        still computes the delta rule and its gate, every norm, the softmax of eager attention and the router in float32
        (its code casts), and experts run one by one, for the grouped product has no float64. Raises UsageError for a
        narrower dtype.
        """
        if dtype not in self.info.precisions:
            raise UsageError(
                f"precision: got {dtype!r}, expected one of {', '.join(self.info.precisions)} "
                f"(the parameters are held in {self._loaded.dtype}; load the checkpoint again for a narrower one)"
            )
        if dtype == self._loaded.dtype:
            return self
        model = copy.deepcopy(self._loaded.model).to(DTYPES[dtype])
        if dtype == "f64":
            model.set_experts_implementation("eager")
        return TransformersEngine(self._loaded.upcast(dtype, model))

    def record(self, sites: tuple[str, ...] | None = None) -> AbstractContextManager[Recording]:
        """Record values at `sites` (None: all that can be seen) of whatever runs while the context lasts."""
        return record(self._loaded.model, self._loaded.library, self._loaded.config, sites)

    @torch.inference_mode()
    def generate(self, prompts: Prompts, max_tokens: int, *, stop_at_eos: bool = False) -> Generation:
        """Greedy tokens, lowest id on ties; with `stop_at_eos` a row ends after the end-of-sequence token it emitted.

        A pass counts as first seen when none of as many new tokens over as many in all had run in this engine.
        """
        check_rows(prompts, self.config.vocab_size)
        return decode_rows(self._sequences, prompts, max_tokens, eos=self._eos() if stop_at_eos else None)

    @torch.inference_mode()
    def score(self, prompts: Prompts, continuations: Prompts, *, top_k: int = 20, full_logits: bool = False) -> Scored:
        """Teacher-forced through the decode path: each prompt is prefilled, then every token is forced, one a pass."""
        check_pairs(prompts, continuations, self.config.vocab_size)
        storage, vocab = self._storage(full_logits), self.config.vocab_size
        return forced_scores(self._sequences, prompts, continuations, vocab=vocab, top_k=top_k, logits_dtype=storage)

    @torch.inference_mode()
    def score_single_pass(
        self, prompts: Prompts, continuations: Prompts, *, top_k: int = 20, full_logits: bool = False
    ) -> Scored:
        """One pass over prompt and tokens, without a cache: the chunked form of the delta rule everywhere."""
        check_pairs(prompts, continuations, self.config.vocab_size)
        table = ScoreTable(continuations, self.config.vocab_size, top_k=top_k, logits_dtype=self._storage(full_logits))
        for index, (prompt, tokens) in enumerate(zip(prompts, continuations, strict=True)):
            with as_engine_error(self._sequences, f"prompt {index}"):
                for step, row in enumerate(self._single_pass_logits(prompt, tokens)):
                    table.put(index, step, row)
        return table.scored("single_pass")

    @property
    def config(self) -> ModelConfig:
        return self._loaded.config

    def sequence(self) -> "CachedSequence":
        """A fresh sequence with its own cache."""
        return CachedSequence(self._loaded, self._shapes_run)

    @property
    def _sequences(self) -> Sequences:
        return Sequences(name="transformers", make=self.sequence, around=quiet)

    def _storage(self, full_logits: bool) -> type[np.floating] | None:
        return (np.float64 if self._loaded.dtype == "f64" else np.float32) if full_logits else None

    def _single_pass_logits(self, prompt: Sequence[int], tokens: Sequence[int]) -> Iterator[np.ndarray]:
        ids = torch.tensor([[*prompt, *tokens[:-1]]], device=self._loaded.device)
        out = self._loaded.model(input_ids=ids, use_cache=False, logits_to_keep=len(tokens))
        for position in range(len(tokens)):
            yield _float64(out.logits[0, position])

    def _eos(self) -> int:
        eos = self._loaded.config.eos_token_id
        if eos is None:
            raise UsageError("stop_at_eos: the model's config names no eos_token_id")
        return eos


class CachedSequence:
    """One sequence with its cache; `advance` runs some ids and returns the logits after the last of them."""

    def __init__(self, loaded: LoadedModel, shapes_run: set[tuple[int, int]]) -> None:
        self._loaded = loaded
        self._cache = loaded.library.DynamicCache(config=loaded.model.config)
        self._shapes_run = shapes_run
        self._length = 0
        self.new_shape = False

    def advance(self, ids: list[int]) -> np.ndarray:
        """float64 [V]; leaves `new_shape` True where no pass of (new tokens, tokens in all) had run before."""
        self._length += len(ids)
        tokens = torch.tensor([ids], device=self._loaded.device)
        out = self._loaded.model(input_ids=tokens, cache=self._cache, use_cache=True, logits_to_keep=1)
        row = _float64(out.logits[0, -1])
        shape = (len(ids), self._length)
        self.new_shape = shape not in self._shapes_run
        self._shapes_run.add(shape)
        return row


def _float64(logits: torch.Tensor) -> np.ndarray:
    return logits.to(torch.float64).cpu().numpy()
