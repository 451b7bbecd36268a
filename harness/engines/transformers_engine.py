"""The transformers library's Kimi-Linear as an engine, in this process, one sequence at a time.

Tokens are chosen here, from the library's logits: its `generate` is never called. A prompt is one pass with a cache, in
the chunked form of the delta rule; every later token is a pass of one token over that cache, in the recurrent form.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.engines.logits import ScoreTable, greedy
from harness.engines.protocol import EngineInfo, Generation, Prompts, Scored
from harness.engines.transformers_load import DTYPES, LoadedModel, load_model, quiet
from harness.engines.transformers_taps import Recording, record
from variants.errors import EngineError, InputError, UsageError
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
        self._check_prompts(prompts)
        if max_tokens < 1:
            raise UsageError(f"max_tokens: got {max_tokens}, expected 1 or more")
        eos = self._eos() if stop_at_eos else None
        rows = [self._row(index, prompt, max_tokens, eos) for index, prompt in enumerate(prompts)]
        return Generation(
            tokens=np.stack([row.tokens for row in rows]),
            finite=np.stack([row.finite for row in rows]),
            gaps=np.stack([row.gaps for row in rows]),
            prefill_s=np.array([row.seconds[0] for row in rows]),
            prefill_tokens=np.array([len(prompt) for prompt in prompts]),
            decode_s=tuple(np.array(row.seconds[1:]) for row in rows),
            first_seen=tuple((index, step) for index, row in enumerate(rows) for step in row.first_seen),
        )

    @torch.inference_mode()
    def score(self, prompts: Prompts, continuations: Prompts, *, top_k: int = 20, full_logits: bool = False) -> Scored:
        """Teacher-forced through the decode path: each prompt is prefilled, then every token is forced, one a pass."""
        return self._scored(prompts, continuations, self._forced_logits, "decode", top_k=top_k, full_logits=full_logits)

    @torch.inference_mode()
    def score_single_pass(
        self, prompts: Prompts, continuations: Prompts, *, top_k: int = 20, full_logits: bool = False
    ) -> Scored:
        """One pass over prompt and tokens, without a cache: the chunked form of the delta rule everywhere."""
        return self._scored(
            prompts, continuations, self._single_pass_logits, "single_pass", top_k=top_k, full_logits=full_logits
        )

    def _row(self, index: int, prompt: Sequence[int], max_tokens: int, eos: int | None) -> "_Row":
        row, sequence, ids = _Row(max_tokens), self.sequence(), list(prompt)
        with _as_engine_error(f"prompt {index}"):
            for step in range(max_tokens):
                begun = time.perf_counter()
                choice = greedy(sequence.advance(ids))
                row.seconds.append(time.perf_counter() - begun)
                row.tokens[step], row.gaps[step], row.finite[step] = choice
                if sequence.new_shape:
                    row.first_seen.append(step - 1)
                if choice.token == eos:
                    break
                ids = [choice.token]
        return row

    @property
    def config(self) -> ModelConfig:
        return self._loaded.config

    def sequence(self) -> "CachedSequence":
        """A fresh sequence with its own cache."""
        return CachedSequence(self._loaded, self._shapes_run)

    def _forced_logits(self, prompt: Sequence[int], tokens: Sequence[int]) -> Iterator[np.ndarray]:
        sequence = self.sequence()
        yield sequence.advance(list(prompt))
        for token in tokens[:-1]:
            yield sequence.advance([token])

    def _single_pass_logits(self, prompt: Sequence[int], tokens: Sequence[int]) -> Iterator[np.ndarray]:
        ids = torch.tensor([[*prompt, *tokens[:-1]]], device=self._loaded.device)
        out = self._loaded.model(input_ids=ids, use_cache=False, logits_to_keep=len(tokens))
        for position in range(len(tokens)):
            yield _float64(out.logits[0, position])

    def _scored(
        self,
        prompts: Prompts,
        continuations: Prompts,
        logits_of: Callable[[Sequence[int], Sequence[int]], Iterator[np.ndarray]],
        forced: str,
        *,
        top_k: int,
        full_logits: bool,
    ) -> Scored:
        self._check_prompts(prompts)
        self._check_prompts(continuations, what="continuation")
        if len(prompts) != len(continuations):
            raise UsageError(f"score: got {len(continuations)} continuations for {len(prompts)} prompts")
        storage = (np.float64 if self._loaded.dtype == "f64" else np.float32) if full_logits else None
        table = ScoreTable(continuations, self._loaded.config.vocab_size, top_k=top_k, logits_dtype=storage)
        for index, (prompt, tokens) in enumerate(zip(prompts, continuations, strict=True)):
            with _as_engine_error(f"prompt {index}"):
                for step, row in enumerate(logits_of(prompt, tokens)):
                    table.put(index, step, row)
        return table.scored(forced)

    def _check_prompts(self, prompts: Prompts, *, what: str = "prompt") -> None:
        if not len(prompts):
            raise InputError(f"got no {what}s, expected one or more")
        vocab = self._loaded.config.vocab_size
        for index, ids in enumerate(prompts):
            if not len(ids):
                raise InputError(f"{what} {index} is empty; expected one token or more")
            if not all(0 <= token < vocab for token in ids):
                raise InputError(f"{what} {index} holds an id outside 0..{vocab - 1}: another tokenizer made it")

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


class _Row:
    """One greedy row while it grows; past its end tokens are -1 and gaps NaN."""

    def __init__(self, max_tokens: int) -> None:
        self.tokens = np.full(max_tokens, -1, dtype=np.int32)
        self.gaps = np.full(max_tokens, np.nan)
        self.finite = np.ones(max_tokens, dtype=bool)
        self.seconds: list[float] = []
        self.first_seen: list[int] = []


@contextmanager
def _as_engine_error(where: str) -> Iterator[None]:
    """Run the library quietly; what it raises while running becomes one line that names the prompt."""
    try:
        with quiet():
            yield
    except (InputError, UsageError, EngineError):
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise EngineError(f"transformers failed in {where}: {line}") from error


def _float64(logits: torch.Tensor) -> np.ndarray:
    return logits.to(torch.float64).cpu().numpy()
