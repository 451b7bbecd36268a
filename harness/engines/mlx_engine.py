"""MLX's Kimi-Linear (`mlx-lm`) as an engine, in this process, on the CPU, one sequence at a time.

Tokens are chosen here, from the library's logits. A prompt is one pass with a cache, every later token a pass of one
token over it; attention runs over expanded keys and values in the first and over the latent in the others.
"""

from __future__ import annotations

import json
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Any

import numpy as np

from harness.engines.protocol import EngineInfo, Generation, Prompts, Scored
from harness.engines.sequences import Sequences, check_pairs, check_rows, decode_rows, forced_scores
from variants.checkpoint import load_checkpoint
from variants.checkpoint_file import find_weights
from variants.errors import DeviceError, UsageError
from variants.model_config import ModelConfig

INSTALL = "install it with: pip install 'neartie[mlx]'"
# Fields that the library's ModelArgs asks for; no layer of this model uses the rotation or this width.
UNUSED = {"rope_theta": 10000.0, "head_dim": 1}


def library() -> tuple[Any, Any]:
    """`mlx.core`, computing on the CPU, and `mlx_lm.models.kimi_linear`; DeviceError where they are not installed."""
    try:
        import mlx.core as core  # pyright: ignore[reportMissingImports]
        from mlx_lm.models import kimi_linear  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("mlx", "mlx_lm"):
            raise
        raise DeviceError(f"{error.name} is not installed; {INSTALL}") from error
    core.set_default_device(core.cpu)
    return core, kimi_linear


class MlxEngine:
    """One loaded model of the library, its weights and arithmetic in float32."""

    def __init__(self, model: Any, config: ModelConfig, *, model_sha256: str, tokenizer_sha256: str | None) -> None:
        self._core, _ = library()
        self._model, self.config = model, config
        self._sha256, self._tokenizer = model_sha256, tokenizer_sha256
        self._shapes_run: set[tuple[int, int]] = set()

    @classmethod
    def load(cls, folder: str | Path, *, expect_sha256: str | None = None) -> MlxEngine:
        """A checkpoint directory, checked as for any run, then loaded by the library; names and values are its own."""
        core, kimi_linear = library()
        folder = Path(folder)
        checkpoint = load_checkpoint(folder, expect_sha256=expect_sha256)
        fields = UNUSED | json.loads((folder / "config.json").read_text(encoding="utf-8"))
        model = kimi_linear.Model(kimi_linear.ModelArgs.from_dict(fields))
        stored: dict[str, Any] = {}
        for file in find_weights(folder):
            stored |= core.load(str(file.path))
        wide = {name: value.astype(core.float32) for name, value in stored.items()}
        model.load_weights(list(model.sanitize(wide).items()), strict=True)
        model.eval()
        core.eval(model.parameters())
        return cls(
            model,
            checkpoint.config,
            model_sha256=checkpoint.sha256,
            tokenizer_sha256=checkpoint.tokenizer_sha256,
        )

    @staticmethod
    def version() -> str:
        return f"{distribution_version('mlx-lm')} on mlx {distribution_version('mlx')}"

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            name="mlx",
            version=self.version(),
            device="cpu",
            dtype="f32",
            model_sha256=self._sha256,
            tokenizer_sha256=self._tokenizer,
            full_logits=True,
            precisions=("f32",),
            max_length=self.config.max_length,
            sampling={"temperature": 0.0, "ties": "lowest id", "logits": "f32"},
            limits=("values inside cannot be read",),
        )

    def at_precision(self, dtype: str) -> MlxEngine:
        """Itself: the library runs in float32 alone on a CPU. Raises UsageError for another dtype."""
        if dtype != "f32":
            raise UsageError(f"precision: got {dtype!r}, expected f32: MLX on a CPU has no other here")
        return self

    def sequence(self) -> _Sequence:
        return _Sequence(self._core, self._model, self._shapes_run)

    def generate(self, prompts: Prompts, max_tokens: int, *, stop_at_eos: bool = False) -> Generation:
        """Greedy tokens, lowest id on ties; with `stop_at_eos` a row ends after the end-of-sequence token."""
        check_rows(prompts, self.config.vocab_size)
        if stop_at_eos and self.config.eos_token_id is None:
            raise UsageError("stop_at_eos: the model's config names no eos_token_id")
        return decode_rows(self._sequences, prompts, max_tokens, eos=self.config.eos_token_id if stop_at_eos else None)

    def score(self, prompts: Prompts, continuations: Prompts, *, top_k: int = 20, full_logits: bool = False) -> Scored:
        """Teacher-forced through the decode path: each prompt is prefilled, then every token is forced, one a pass."""
        check_pairs(prompts, continuations, self.config.vocab_size)
        storage = np.float32 if full_logits else None
        return forced_scores(
            self._sequences, prompts, continuations, vocab=self.config.vocab_size, top_k=top_k, logits_dtype=storage
        )

    @property
    def _sequences(self) -> Sequences:
        return Sequences(name="mlx", make=self.sequence)


class _Sequence:
    """One sequence with its cache."""

    def __init__(self, core: Any, model: Any, shapes_run: set[tuple[int, int]]) -> None:
        self._core, self._model, self._cache = core, model, model.make_cache()
        self._shapes_run, self._length = shapes_run, 0
        self.new_shape = False

    def advance(self, ids: list[int]) -> np.ndarray:
        """float64 [V], the logits after the last of `ids`."""
        self._length += len(ids)
        row = self._model(self._core.array([ids]), cache=self._cache)[0, -1]
        shape = (len(ids), self._length)
        self.new_shape = shape not in self._shapes_run
        self._shapes_run.add(shape)
        return np.array(row, dtype=np.float64)
