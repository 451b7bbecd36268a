"""The vLLM library (0.26) in this process: its offline `LLM`, token ids in and out, greedy, with ranked logprobs.

The settings are those that make two runs equal: one choice of kernel, no prefix cache, no asynchronous scheduling, and
the engine in this process. They are set before the library is imported, where they are not set already. It runs eagerly
unless `engine.compile` or `engine.graph` say otherwise, each alone or both, as its server does.
"""

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.config import Config
from harness.engines.answers import generation_of, prompt_scores
from harness.engines.assets import checkpoint_folder
from harness.engines.completion import Answer, Ranked, rank
from harness.engines.prompt_text import tokenizer_class
from harness.engines.protocol import EngineInfo, Generation, Prompts, Scored
from harness.engines.transformers_load import file_sha256, weight_files, weights_sha256
from variants.checkpoint import load_config
from variants.errors import DeviceError, EngineError, InputError, UsageError

MAX_LENGTH = 1024
DYNAMO = "TORCHDYNAMO_DISABLE"
SWITCHES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    DYNAMO: "1",
    "VLLM_TRITON_FORCE_FIRST_CONFIG": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
}
COMPILED: list[bool] = []  # how this process imported the library: with torch's compiler, or without
OPTIONS: dict[str, Any] = {
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_model_len": MAX_LENGTH,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 64,
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "seed": 0,
}


@dataclass(frozen=True, kw_only=True)
class VllmModel:
    """What was loaded: the library, its `LLM`, and where the weights came from. options: as `LLM` was given them."""

    library: ModuleType
    llm: Any
    options: Mapping[str, Any]
    model_sha256: str
    tokenizer_sha256: str | None
    tokenizer_class: str | None
    eos: int | None


class VllmEngine:
    """One loaded model; `batch` prompts are given to it together (0: all), and it schedules them as it likes."""

    def __init__(self, loaded: VllmModel, *, batch: int = 1, top_k: int = 20) -> None:
        self._loaded, self._batch, self._top_k = loaded, batch, top_k

    @classmethod
    def from_config(cls, config: Config) -> "VllmEngine":
        """Raises DeviceError where the library or its GPU is missing, InputError for another checkpoint."""
        choice = config.engine
        loaded = _loaded(
            str(checkpoint_folder(config.model.path)),
            config.model.sha256,
            (("dtype", choice.dtype.value), ("gpu_memory_utilization", choice.memory), *_backend(choice.backend)),
            compiled=choice.compile,
            graph=choice.graph,
        )
        return cls(loaded, batch=choice.batch, top_k=choice.top_k)

    @property
    def info(self) -> EngineInfo:
        loaded = self._loaded
        return EngineInfo(
            name="vllm",
            version=str(loaded.library.__version__),
            device="cuda",
            dtype=str(loaded.options["dtype"]),
            model_sha256=loaded.model_sha256,
            tokenizer_sha256=loaded.tokenizer_sha256,
            tokenizer_class=loaded.tokenizer_class,
            echoes_ids=True,
            top_logprobs=self._top_k,
            batch=self._batch or int(loaded.options["max_num_seqs"]),
            max_length=MAX_LENGTH,
            sampling={"temperature": 0.0, "top_k": 0, "repetition_penalty": 1.0, "generation_config": "ignored"},
            limits=("score is one pass over prompt and tokens, not the decode path", "steps are not timed apart"),
        )

    @property
    def provenance(self) -> dict[str, Any]:
        """How it was set up; what `LLM` was given, and the switches of the environment."""
        return {
            "engine": "vllm",
            "engine_version": self.info.version,
            "batch": "one request at a time" if self._batch == 1 else f"{self._batch or 'all'} requests together",
            "options": dict(self._loaded.options),
            "switches": {name: os.environ.get(name) for name in SWITCHES},
        }

    def generate(self, prompts: Prompts, max_tokens: int, *, stop_at_eos: bool = False) -> Generation:
        """Greedy tokens; raises EngineError where the library fails, UsageError where EOS is not known."""
        if stop_at_eos and self._loaded.eos is None:
            raise UsageError("stop_at_eos: the checkpoint's config names no eos_token_id")
        params = {"max_tokens": max_tokens, "ignore_eos": not stop_at_eos, "logprobs": self._top_k or None}
        if stop_at_eos:
            params["stop_token_ids"] = [self._loaded.eos]
        answers: list[Answer] = []
        size = self._batch or len(prompts)
        for start in range(0, len(prompts), size):
            outputs = self._run([list(p) for p in prompts[start : start + size]], params)
            answers += [_answer(out, self._top_k) for out in outputs]
        return generation_of(answers, prompts, max_tokens, top_k=self._top_k)

    def score(self, prompts: Prompts, continuations: Prompts, *, top_k: int = 20) -> Scored:
        """Teacher-forced in one pass over prompt and tokens (`prompt_logprobs`)."""
        if len(prompts) != len(continuations):
            raise UsageError(f"score: got {len(continuations)} continuations for {len(prompts)} prompts")
        rows = []
        for prompt, forced in zip(prompts, continuations, strict=True):
            params = {"max_tokens": 1, "ignore_eos": True, "prompt_logprobs": top_k}
            (output,) = self._run([[*prompt, *forced]], params)
            given = output.prompt_logprobs or []
            if len(given) != len(prompt) + len(forced):
                raise EngineError(f"vllm: logprobs for {len(given)} of {len(prompt) + len(forced)} prompt ids")
            rows.append([{int(i): float(e.logprob) for i, e in row.items()} for row in given[len(prompt) :]])
        return prompt_scores(rows, continuations, top_k)

    def arms(self) -> dict[str, "VllmEngine"]:
        """All prompts together, which must not matter where a batch is invariant."""
        if self._batch != 1:
            return {}
        return {"all together": VllmEngine(self._loaded, batch=0, top_k=self._top_k)}

    def _run(self, ids: Sequence[list[int]], params: Mapping[str, Any]) -> list[Any]:
        sampling = self._loaded.library.SamplingParams(temperature=0.0, detokenize=False, **params)
        try:
            outputs = self._loaded.llm.generate([{"prompt_token_ids": row} for row in ids], sampling, use_tqdm=False)
        except (RuntimeError, ValueError) as error:
            raise EngineError(f"vllm failed: {(str(error).strip() or type(error).__name__).splitlines()[0]}") from error
        if len(outputs) != len(ids):
            raise EngineError(f"vllm answered {len(outputs)} of {len(ids)} prompts")
        return list(outputs)


def imported(*, compiled: bool = False) -> ModuleType:
    """The library, its switches set first; compiled: with torch's compiler on.

    Raises DeviceError where it is not installed, and UsageError where this process has imported it the other way: what
    it decorates for the compiler stays as it was at the import.
    """
    if "vllm" not in sys.modules and importlib.util.find_spec("vllm") is None:
        raise DeviceError(
            "vllm is not installed; install it on a GPU machine with: pip install 'neartie[vllm]', or ask a vLLM "
            "server: engine=openai engine.dialect=vllm engine.url=http://HOST:PORT"
        )
    if COMPILED and COMPILED[0] is not compiled:
        raise UsageError(
            f"engine.compile={str(compiled).lower()}: this process has imported vLLM for engine.compile="
            f"{str(COMPILED[0]).lower()}, which it keeps; run each in a process of its own, without -m"
        )
    COMPILED[:] = [compiled]
    for name, value in SWITCHES.items():
        os.environ.setdefault(name, value)
    if compiled:
        os.environ[DYNAMO] = "0"
        importlib.import_module("torch._dynamo").config.disable = False
    return importlib.import_module("vllm")


def _backend(name: str | None) -> tuple[tuple[str, object], ...]:
    return () if name is None else (("attention_backend", name),)


def launching(*, compiled: bool, graph: bool) -> dict[str, Any]:
    """How a step is launched: eagerly, its layers compiled (`mode` 3), its decode steps as graphs, or both."""
    if not (compiled or graph):
        return {}
    mode, graphs = (3 if compiled else 0), ("FULL_DECODE_ONLY" if graph else "NONE")
    return {"enforce_eager": False, "compilation_config": {"mode": mode, "cudagraph_mode": graphs}}


@lru_cache(maxsize=1)
def _loaded(
    folder: str, expect_sha256: str | None, chosen: tuple[tuple[str, object], ...], *, compiled: bool, graph: bool
) -> VllmModel:
    """Loaded once for all jobs of a process that ask for the same."""
    digest = weights_sha256(weight_files(Path(folder)))
    if expect_sha256 is not None and digest != expect_sha256:
        raise InputError(f"{folder}: weights have sha256 {digest}, expected {expect_sha256}; correct one")
    options = OPTIONS | dict(chosen) | launching(compiled=compiled, graph=graph)
    tokenizer, library = Path(folder) / "tokenizer.json", imported(compiled=compiled)
    return VllmModel(
        library=library,
        llm=started(library, Path(folder), options),
        options=options,
        model_sha256=digest,
        tokenizer_sha256=file_sha256(tokenizer) if tokenizer.is_file() else None,
        tokenizer_class=tokenizer_class(Path(folder)),
        eos=load_config(folder).eos_token_id,
    )


def started(library: ModuleType, folder: Path, options: Mapping[str, Any]) -> Any:
    """Its `LLM` of a folder. Raises DeviceError where it does not start."""
    try:
        return library.LLM(model=str(folder), **options)
    except (RuntimeError, ValueError, TypeError) as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DeviceError(f"vllm could not start: {line}") from error


def _answer(output: Any, top_k: int) -> Answer:
    (said,) = output.outputs
    ranked: tuple[Ranked, ...] = ()
    if top_k and said.logprobs is not None:
        ranked = tuple(rank((int(i), float(e.logprob)) for i, e in row.items()) for row in said.logprobs)
    return replace(
        Answer(tokens=tuple(int(i) for i in said.token_ids)),
        ranked=ranked,
        gaps=tuple(row[0][1] - row[1][1] if len(row) > 1 else None for row in ranked),
        finish=said.finish_reason,
        prompt_ids=None if output.prompt_token_ids is None else tuple(output.prompt_token_ids),
    )
