"""A variant of our own forward as an engine: one checkpoint in memory, any number of variants over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from harness.config import DeviceChoice
from harness.engines import paged_rows
from harness.engines.compiling import Compiling
from harness.engines.loaded import casts_of, shared_casts
from harness.engines.logits import ScoreTable
from harness.engines.prompt_text import tokenizer_class
from harness.engines.protocol import EngineInfo, Generation, Prompts, Scored
from harness.engines.sequences import check_pairs, check_rows
from harness.measure import PREFILL
from harness.numerics import check_device, policy
from harness.observe import Observed, observe
from harness.progress import tracked
from variants import decode
from variants.axes import Execution, Graph, Variant
from variants.errors import DeviceError, EngineError, InputError, UsageError
from variants.kernels import check_environment
from variants.model import Model
from variants.recipe import Recipe, resolve
from variants.request import Output, Request
from variants.rounding import Probe
from variants.weights import Casts, Patch, Weights

if TYPE_CHECKING:
    from harness.config import Config

__all__ = ["LocalEngine", "casts_of", "forced_logits", "shared_casts"]


class LocalEngine:
    """Runs one variant; `casts` holds the checkpoint and what was cast of it, shared between engines of a process."""

    def __init__(self, casts: Casts, variant: Variant, *, name: str, device: DeviceChoice | None = None) -> None:
        """Raises UsageError for a variant that cannot run on this model or device."""
        self.casts, self.variant, self.name = casts, variant, name
        self.device = device or DeviceChoice()
        self.recipe = resolve(variant, casts.checkpoint.config)
        if self.recipe.tf32 and casts.device == "cpu":
            raise UsageError("variant: tf32=true has no effect on the cpu; remove it or run on cuda")
        run = self.recipe.execution
        if (run.fused or run.graph is Graph.cuda) and len(casts.placement.devices) > 1:
            setting = "fused=true" if run.fused else "graph=cuda"
            raise UsageError(f"execution.{setting}: such a step is on one device; set device.pipeline=1")
        if run.graph is Graph.cuda and casts.device == "cpu":
            raise DeviceError(
                "execution.graph=cuda needs a CUDA device, got cpu: set device=cuda, or choose another variant"
            )
        check_environment(self.recipe.implementations, casts.device)
        self.compiling = Compiling(tuple(sorted(self.recipe.implementations - {"torch", "native"})))
        self._warm: set[tuple[int, ...]] = set()
        self._shapes: set[tuple[str, int]] = set()
        self._model: Model | None = None

    @classmethod
    def from_config(cls, config: Config) -> LocalEngine:
        check_device(config.device)
        return cls(casts_of(config), config.variant, name=config.label, device=config.device)

    @property
    def info(self) -> EngineInfo:
        checkpoint = self.casts.checkpoint
        return EngineInfo(
            name="local",
            version=torch.__version__,
            device=self.casts.device,
            dtype=self.variant.stream.name,
            model_sha256=checkpoint.sha256,
            tokenizer_sha256=checkpoint.tokenizer_sha256,
            can_score=True,
            full_logits=True,
            precisions=("bf16", "f16", "f32", "f64"),
            taps=True,
            top_logprobs=None,
            batch=self.variant.execution.batch,
            tokenizer_class=tokenizer_class(checkpoint.path),
            sampling={"temperature": 0.0},
        )

    def arms(self) -> dict[str, LocalEngine]:
        """Four rows together: another shape of every product, which must not matter to a batch-invariant engine.

        None of a variant that is of one row alone, or of several already.
        """
        if self.variant.execution.batch != 1 or self.variant.execution.fused:
            return {}
        together = replace(self.variant, execution=replace(self.variant.execution, batch=4))
        return {"4 rows together": LocalEngine(self.casts, together, name=self.name, device=self.device)}

    def build(self, *, recipe: Recipe | None = None, probe: Probe | None = None, patch: Patch | None = None) -> Model:
        """A model over this checkpoint: by default this variant's, else under another recipe, watched or patched."""
        recipe = recipe or self.recipe
        weights = Weights(self.casts, recipe.semantics, patch=patch)
        return Model(self.casts.checkpoint.config, recipe, weights, probe=probe)

    @property
    def model(self) -> Model:
        if self._model is None:
            self._model = self.build()
        return self._model

    def observed(self, prompt: Sequence[int]) -> Observed:
        """What really ran at each site, read off one short run of this variant."""
        with policy(self.device, tf32=self.recipe.tf32, reduced_sums=self.recipe.reduced_sums), self.compiling.watch():
            return observe(self.recipe, self.casts, prompt)

    def generate(self, prompts: Prompts, max_tokens: int, *, stop_at_eos: bool = False) -> Generation:
        """Greedy tokens, lowest id on ties; rows of `execution.batch` prompts run together."""
        check_rows(prompts, self.casts.checkpoint.config.vocab_size)
        eos = self._eos(stop_at_eos)
        with policy(self.device, tf32=self.recipe.tf32, reduced_sums=self.recipe.reduced_sums), self.compiling.watch():
            if self._paged:
                return self._generate_paged(prompts, max_tokens, eos)
            rows = _Rows(self, prompts, max_tokens, eos)
            self._warm_up(prompts)
            starts = range(0, len(prompts), self.recipe.execution.batch)
            for start in tracked(f"{self.name}: tokens", starts, len(starts)):
                rows.run(start, self.recipe.execution.batch)
        return rows.generation()

    def _generate_paged(self, prompts: Prompts, max_tokens: int, eos: int | None) -> Generation:
        """Through the paged runner; kernels run the schedule's first steps once before it is timed."""
        shape = tuple(len(p) for p in prompts)
        if self.compiling.impls and shape not in self._warm:
            paged_rows.generated(
                self.model, prompts, 2, eos=None, first_seen=lambda _: False, check=_refuse_flat_output
            )
            self._warm.add(shape)
        return paged_rows.generated(
            self.model, prompts, max_tokens, eos=eos, first_seen=self.first_seen, check=_refuse_flat_output
        )

    def _warm_up(self, prompts: Prompts) -> None:
        """Run the prefill and a step of every shape that kernels have not seen, so that no timed step compiles."""
        if not self.compiling.impls:
            return
        batch = self.recipe.execution.batch
        for start in range(0, len(prompts), batch):
            rows = prompts[start : start + batch]
            shape = tuple(len(p) for p in rows)
            if shape not in self._warm:
                decode.steps(self.model, rows, 2, lambda _, logits: decode.greedy(logits))
                self._warm.add(shape)

    def score(self, prompts: Prompts, continuations: Prompts, *, top_k: int = 20, full_logits: bool = False) -> Scored:
        """Teacher-forced through the decode path: prompt prefilled, each token forced."""
        check_pairs(prompts, continuations, self.casts.checkpoint.config.vocab_size)
        table = self._table(continuations, top_k, full_logits)
        with policy(self.device, tf32=self.recipe.tf32, reduced_sums=self.recipe.reduced_sums):
            if self._paged:
                pairs = zip(prompts, continuations, strict=True)
                requests = [Request(ids=tuple(p), max_tokens=len(c), forced=tuple(c)) for p, c in pairs]
                for o in paged_rows.outputs(paged_rows.runner_for(self.model, requests), requests):
                    table.put(o.request, o.index, _numpy(o.logits))
                return table.scored("decode")
            starts = range(0, len(prompts), self.recipe.execution.batch)
            for start in tracked(f"{self.name}: forced", starts, len(starts)):
                span = slice(start, start + self.recipe.execution.batch)
                for t, logits in enumerate(forced_logits(self.model, prompts[span], continuations[span])):
                    _put(table, start, t, logits, continuations)
        return table.scored("decode")

    def score_single_pass(
        self, prompts: Prompts, continuations: Prompts, *, top_k: int = 20, full_logits: bool = False
    ) -> Scored:
        """Teacher-forced in one pass over prompt and tokens: the prefill's arithmetic at every position."""
        check_pairs(prompts, continuations, self.casts.checkpoint.config.vocab_size)
        table = self._table(continuations, top_k, full_logits)
        with policy(self.device, tf32=self.recipe.tf32, reduced_sums=self.recipe.reduced_sums):
            for i, (p, c) in enumerate(zip(prompts, continuations, strict=True)):
                for t, row in enumerate(decode.single_pass(self.model, [p], [c])[0]):
                    table.put(i, t, _numpy(row))
        return table.scored("single_pass")

    @property
    def _paged(self) -> bool:
        return self.recipe.execution.mode is Execution.paged

    def _table(self, continuations: Prompts, top_k: int, full: bool) -> ScoreTable:
        vocab = self.casts.checkpoint.config.vocab_size
        return ScoreTable(continuations, vocab, top_k=top_k, logits_dtype=np.float64 if full else None)

    def _eos(self, stop: bool) -> int | None:
        eos = self.casts.checkpoint.config.eos_token_id
        if stop and eos is None:
            raise InputError("the golden stops at EOS, but the checkpoint's config names no eos_token_id; add it there")
        return eos if stop else None

    def first_seen(self, batch: int) -> bool:
        """Whether a decode step of this many rows has not run before; asking makes it seen."""
        key = (self.casts.device, batch)
        fresh = key not in self._shapes
        self._shapes.add(key)
        return fresh


class _Rows:
    """The arrays of a `Generation`, filled batch by batch."""

    def __init__(self, engine: LocalEngine, prompts: Prompts, max_tokens: int, eos: int | None) -> None:
        if max_tokens < 1:
            raise UsageError(f"max_tokens: got {max_tokens}, expected 1 or more")
        self.engine, self.prompts, self.max_tokens, self.eos = engine, prompts, max_tokens, eos
        shape = (len(prompts), max_tokens)
        self.tokens, self.gaps = np.full(shape, -1, np.int32), np.full(shape, np.nan)
        self.finite = np.ones(shape, bool)
        self.prefill_s, self.prefill_cpu_s = np.zeros(len(prompts)), np.zeros(len(prompts))
        self.decode_s: list[np.ndarray] = []
        self.decode_cpu_s: list[np.ndarray] = []
        self.first_seen: list[tuple[int, int]] = []

    def run(self, start: int, batch: int) -> None:
        rows = slice(start, start + batch)
        prompts = self.prompts[rows]
        done = torch.zeros(len(prompts), dtype=torch.bool)
        compiled = self.engine.compiling.count

        def choose(t: int, logits: Tensor) -> Tensor | None:
            nonlocal compiled
            if self.engine.compiling.count > compiled:  # the call before, the prefill for t = 0, had to compile
                compiled = self.engine.compiling.count
                self.first_seen.append((len(self.decode_s), t + PREFILL))
            if t == 0:
                _refuse_flat(logits)
            tokens = decode.greedy(logits)
            ids = torch.where(done, -1, tokens.cpu())
            self.tokens[rows, t] = ids.numpy()
            self.finite[rows, t] = decode.is_finite(logits).cpu().numpy() | done.numpy()
            self.gaps[rows, t] = np.where(done.numpy(), np.nan, decode.gaps(logits).cpu().numpy())
            if self.eos is not None:
                done.logical_or_(ids == self.eos)
            return None if bool(done.all()) else tokens

        runs = decode.steps(self.engine.model, prompts, self.max_tokens, choose)
        self.prefill_s[rows], self.prefill_cpu_s[rows] = runs[0].seconds, runs[0].cpu_s
        first = (len(self.decode_s), 0)
        if len(runs) > 1 and self.engine.first_seen(len(prompts)) and first not in self.first_seen:
            self.first_seen.append((len(self.decode_s), 0))
        self.decode_s.append(np.array([r.seconds for r in runs[1:]]))
        self.decode_cpu_s.append(np.array([r.cpu_s for r in runs[1:]]))

    def generation(self) -> Generation:
        return Generation(
            tokens=self.tokens,
            finite=self.finite,
            gaps=self.gaps,
            prefill_s=self.prefill_s,
            prefill_tokens=np.array([len(p) for p in self.prompts]),
            decode_s=tuple(self.decode_s),
            prefill_cpu_s=self.prefill_cpu_s,
            decode_cpu_s=tuple(self.decode_cpu_s),
            batch=self.engine.recipe.execution.batch,
            first_seen=tuple(self.first_seen),
        )


def forced_logits(model: Model, prompts: Prompts, continuations: Prompts) -> list[Tensor]:
    """Logits [B, V] of every step when rows that run together are forced; rows may end at different places."""
    forced, _ = decode.padded(continuations, model.device)
    runs = decode.steps(model, prompts, forced.shape[1], lambda t, _: forced[:, t])
    return [r.logits for r in runs]


def _put(table: ScoreTable, start: int, t: int, logits: Tensor, continuations: Prompts) -> None:
    for row, values in enumerate(_numpy(logits)):
        if t < len(continuations[start + row]):
            table.put(start + row, t, values)


def _refuse_flat(logits: Tensor) -> None:
    """A head that was never loaded gives every token the same logit, and the lowest id would pass for a choice."""
    flat = (logits == logits[:, :1]).all(-1)
    if bool(flat.any()):
        raise EngineError("all logits equal at step 0: expected a choice; check that lm_head.weight was loaded")


def _refuse_flat_output(o: Output) -> None:
    if o.index == 0:
        _refuse_flat(o.logits.unsqueeze(0))


def _numpy(x: Tensor) -> np.ndarray:
    return x.double().cpu().numpy()
