"""llama.cpp's server as an engine, by its native `/completion`: token ids in and out, logprobs of any depth.

The server is one that we start (from the `xllamacpp` wheel, on a GGUF file that we write of the checkpoint or that is
given) and stop, or one at a given address. Teacher-forced scores go through its decode path: each forced token extends
the sequence that a slot holds by one, and the answer says that one token was run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from harness.engines.http_server import JsonServer
from harness.engines.llama_answers import GREEDY, LlamaAnswer, generation_of, put, read, request
from harness.engines.llama_child import LlamaSettings, xllamacpp, xllamacpp_version
from harness.engines.protocol import EngineInfo, Generation, Prompts, Scored
from harness.engines.server_process import Scratch, ServerProcess
from harness.gguf_write import WeightFormat, write_gguf
from harness.progress import progress
from variants.checkpoint import Checkpoint, load_checkpoint
from variants.errors import EngineError, InputError, UsageError

CHILD = "harness.engines.llama_child"
TOP_K = 20  # logprobs asked for with each token
LEAST = 2  # of a score: the best two say whether they tie
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class LlamaOrigin:
    """Where a server's file comes from, as far as it is known. weights: format of the matrices, None for unknown."""

    settings: LlamaSettings | None = None
    weights: WeightFormat | None = None
    model_sha256: str | None = None
    tokenizer_sha256: str | None = None
    version: str = "unknown"
    checkpoint: Checkpoint | None = None
    owned: tuple[Any, ...] = field(default=(), repr=False)  # what must live as long as the server does

    @classmethod
    def of(cls, checkpoint: Checkpoint, settings: LlamaSettings, weights: WeightFormat, *owned: object) -> LlamaOrigin:
        """The origin of a file that was written of `checkpoint`."""
        return cls(
            settings=settings,
            weights=weights,
            model_sha256=checkpoint.sha256,
            tokenizer_sha256=checkpoint.tokenizer_sha256,
            version=xllamacpp_version(),
            checkpoint=checkpoint,
            owned=owned,
        )


class LlamaServerEngine:
    """Asks one server."""

    def __init__(
        self, server: JsonServer, origin: LlamaOrigin, *, slots: int = 1, process: ServerProcess | None = None
    ) -> None:
        self._server, self._origin, self._slots, self.process = server, origin, slots, process

    @classmethod
    def of_checkpoint(
        cls,
        folder: str | Path,
        settings: LlamaSettings | None = None,
        *,
        weights: WeightFormat = WeightFormat.f32,
        expect_sha256: str | None = None,
        timeout_s: float = 120.0,
    ) -> LlamaServerEngine:
        """Start a server on a checkpoint, written to a temporary GGUF file with ids for a vocabulary.

        settings: their `gguf` is not read. No end of sequence is declared, so rows go on past one. Raises what
        `load_checkpoint`, `write_gguf` and the server raise.
        """
        xllamacpp()
        checkpoint = load_checkpoint(folder, expect_sha256=expect_sha256)
        return cls._started(checkpoint, settings or LlamaSettings(gguf=""), weights, timeout_s)

    @classmethod
    def _started(
        cls, checkpoint: Checkpoint, settings: LlamaSettings, weights: WeightFormat, timeout_s: float
    ) -> LlamaServerEngine:
        place = Scratch()
        file = place.path / "model.gguf"
        write_gguf(checkpoint, file, weights=weights)
        made = replace(settings, gguf=str(file), length=min(settings.length, checkpoint.config.max_length))
        return cls._on(LlamaOrigin.of(checkpoint, made, weights, place), made, timeout_s)

    @classmethod
    def of_file(cls, settings: LlamaSettings, *, timeout_s: float = 120.0) -> LlamaServerEngine:
        """Start a server on the GGUF file that `settings` name."""
        xllamacpp()
        if not Path(settings.gguf).is_file():
            raise InputError(f"engine.gguf={settings.gguf}: no such file; `neartie convert to=gguf` writes one")
        return cls._on(LlamaOrigin(settings=settings, version=xllamacpp_version()), settings, timeout_s)

    @classmethod
    def _on(cls, origin: LlamaOrigin, settings: LlamaSettings, timeout_s: float) -> LlamaServerEngine:
        process = ServerProcess(CHILD, settings.plain())
        return cls(
            JsonServer(process.url, timeout_s=timeout_s, retries=0), origin, slots=settings.slots, process=process
        )

    @property
    def info(self) -> EngineInfo:
        origin, settings = self._origin, self._origin.settings
        stated = {k: v for k, v in GREEDY.items() if k not in ("samplers", "return_tokens", "grammar", "logit_bias")}
        made = origin.checkpoint is not None
        return EngineInfo(
            name="llama_server",
            version=origin.version,
            device="cpu" if settings else "unknown",
            dtype=self._dtype,
            model_sha256=origin.model_sha256,
            tokenizer_sha256=origin.tokenizer_sha256,
            full_logits=True,
            precisions=("f32",) if made else (),
            echoes_ids=made,
            top_logprobs=None,
            batch=self._slots,
            max_length=settings.length if settings else self._model.get("n_ctx_train"),
            sampling=stated,
            limits=("step times are the server's mean of a row", "values inside cannot be read"),
        )

    @property
    def _dtype(self) -> str:
        settings, weights = self._origin.settings, self._origin.weights
        if settings is None:
            return "unknown"
        parts = (weights.name if weights else "the file's", f"{settings.kv} cache", "flash" if settings.flash else "")
        return ", ".join(p for p in parts if p)

    def at_precision(self, dtype: str) -> LlamaServerEngine:
        """The same checkpoint with float32 matrices, a float32 cache and no flash attention; only "f32" is there."""
        origin = self._origin
        if dtype not in self.info.precisions or origin.checkpoint is None or origin.settings is None:
            raise UsageError(f"precision: got {dtype!r}, expected f32 and a checkpoint (this server's file was given)")
        exact = replace(origin.settings, kv="f32", flash=False)
        if exact == origin.settings and origin.weights is WeightFormat.f32:
            return self
        return self._started(origin.checkpoint, exact, WeightFormat.f32, timeout_s=120.0)

    def arms(self) -> dict[str, LlamaServerEngine]:
        """Other ways to run the same, which must not matter: four prompts at a time, by a server of its own."""
        origin = self._origin
        if origin.checkpoint is None or origin.settings is None or origin.weights is None or self._slots > 1:
            return {}
        many = replace(origin.settings, slots=4)
        return {"4 at a time": self._started(origin.checkpoint, many, origin.weights, timeout_s=120.0)}

    def stop(self) -> None:
        """Stop the server if it is ours; it also stops when the engine is no longer used."""
        if self.process is not None:
            self.process.stop()

    def generate(self, prompts: Prompts, max_tokens: int, *, stop_at_eos: bool = False) -> Generation:
        """Greedy tokens; as many prompts at a time as the server has slots, each from an empty cache.

        Whether a row ends at EOS is the file's matter: one that ends early is refused by what reads the result.
        """
        if max_tokens < 1:
            raise UsageError(f"max_tokens: got {max_tokens}, expected 1 or more")

        def one(n: int, slot: int) -> LlamaAnswer:
            body = request(prompts[n], max_tokens, top_k=TOP_K, slot=slot)
            return read(self._post(body), prompts[n], f"prompt {n}")

        answers = self._each(one, len(prompts))
        return generation_of(answers, prompts, max_tokens, top_k=TOP_K, batch=self._slots)

    def score(self, prompts: Prompts, continuations: Prompts, *, top_k: int = 20, full_logits: bool = False) -> Scored:
        """Teacher-forced through the decode path, one request a token.

        full_logits: logprobs of the whole vocabulary, which are logits but for a constant of each row. Raises
        EngineError where the server ran more than the one token (another client is using its slots).
        """
        if len(prompts) != len(continuations):
            raise UsageError(f"score: got {len(continuations)} continuations for {len(prompts)} prompts")
        asked = self._vocabulary if full_logits else max(top_k, TOP_K, LEAST)
        table = _Table(continuations, top_k, asked if full_logits else None)

        def one(n: int, slot: int) -> None:
            ids, forced = list(prompts[n]), continuations[n]
            for t in range(len(forced)):
                body = request(ids, 1, top_k=asked, cached=t > 0, slot=slot)
                answer = read(self._post(body), ids, f"prompt {n}, token {t}")
                if t and answer.prefilled != 1:
                    raise EngineError(
                        f"prompt {n}, token {t}: the server ran {answer.prefilled} tokens instead of 1, so this is not "
                        "its decode path; let no one else use it meanwhile"
                    )
                table.put(n, t, answer.ranked[0])
                ids.append(int(forced[t]))

        self._each(one, len(prompts))
        return table.scored()

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._server.post("/completion", body)
        except EngineError as error:
            if self.process is not None and not self.process.alive:
                raise EngineError(f"the server has ended in the middle of a run ({error})") from error
            raise

    @cached_property
    def _model(self) -> dict[str, Any]:
        """What the server says of its model."""
        data = self._server.get("/v1/models").get("data") or [{}]
        return dict(data[0].get("meta") or {})

    @property
    def _vocabulary(self) -> int:
        return int(self._model["n_vocab"])

    def _each(self, work: Callable[[int, int], T], count: int) -> list[T]:
        """Results of work(n, slot), a thread a slot; slot s has every `slots`-th of the prompts."""
        found: list[T | None] = [None] * count

        def run(slot: int) -> None:
            for n in range(slot, count, self._slots):
                found[n] = work(n, slot)
                done()

        with progress("prompts", count) as done:
            if self._slots == 1:
                run(0)
            else:
                with ThreadPoolExecutor(self._slots) as pool:
                    for future in [pool.submit(run, slot) for slot in range(self._slots)]:
                        future.result()
        return [x for x in found if x is not None] if count and found[0] is not None else []


class _Table:
    """The arrays of `Scored`, filled from ranked lists."""

    def __init__(self, continuations: Prompts, top_k: int, vocab: int | None) -> None:
        shape = (len(continuations), max(map(len, continuations)))
        self._continuations: Sequence[Sequence[int]] = continuations
        self._own, self._finite = np.full(shape, np.nan), np.ones(shape, bool)
        self._ids, self._values = np.full((*shape, top_k), -1, np.int32), np.full((*shape, top_k), np.nan)
        self._logits = None if vocab is None else np.full((*shape, vocab), np.nan)

    def put(self, n: int, t: int, ranked: Sequence[tuple[int, float]]) -> None:
        self._own[n, t] = dict(ranked).get(int(self._continuations[n][t]), np.nan)
        self._finite[n, t] = not any(np.isnan(v) for _, v in ranked)
        put(self._ids[n, t], self._values[n, t], ranked)
        if self._logits is not None:
            ids, values = zip(*ranked, strict=True)
            self._logits[n, t, list(ids)] = values

    def scored(self) -> Scored:
        return Scored(
            token_logprobs=self._own,
            top_ids=self._ids,
            top_logprobs=self._values,
            finite=self._finite,
            forced="decode",
            logits=self._logits,
        )
