"""Training a small Kimi-Linear from scratch with the transformers library, as the shipped checkpoint was made.

Float32 weights under bf16 autocast, AdamW, a linear warm-up and then a cosine to a tenth. The router's correction bias
gets no gradient: after each step every expert's moves by BIAS_STEP towards an even load. Rows are cut from one stream
of tokens, and each begins with BOS, as every prompt does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.engines.transformers_load import modeling, quiet
from variants.checkpoint_write import config_fields
from variants.errors import EngineError, InputError
from variants.model_config import ModelConfig

BIAS_STEP = 1e-3
SUFFIXES = (".txt", ".md", ".rst", ".py")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """steps of `batch` rows of `length` tokens; rate: the highest, reached after `warmup` steps."""

    steps: int = 2454
    batch: int = 64
    length: int = 512
    rate: float = 3e-3
    warmup: int = 100
    decay: float = 0.1
    clip: float = 1.0

    def rate_at(self, step: int) -> float:
        """Of a step counted from 0."""
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


@dataclass(frozen=True)
class Progress:
    """One step: mean loss in nats a token, and its rate."""

    step: int
    loss: float
    rate: float


def new_model(config: ModelConfig, *, seed: int, device: str) -> Any:
    """A fresh model of the library with this geometry, in float32, drawn by its own rules from `seed`."""
    library = modeling(device)
    made = library.KimiLinearConfig(**config_fields(config))
    with quiet(), torch.random.fork_rng():
        torch.manual_seed(seed)
        return library.KimiLinearForCausalLM(made).to(device).train()


def read_tokens(source: Path, tokenizer: Path) -> Tensor:
    """int64 [N]: the ids of a text file, or of every text file below a folder in the order of their paths.

    Raises InputError where there is no text or no tokenizer.
    """
    try:
        from tokenizers import Tokenizer

        reader = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # the package raises nothing narrower
        raise InputError(f"{tokenizer}: cannot be read as a tokenizer.json ({error})") from error
    files = [source] if source.is_file() else sorted(f for f in source.rglob("*") if f.suffix in SUFFIXES)
    texts = [f.read_text(encoding="utf-8", errors="replace") for f in files]
    ids = [i for encoded in reader.encode_batch(texts, add_special_tokens=False) for i in encoded.ids]
    if not ids:
        raise InputError(f"{source}: holds no text; name a file, or a folder of {', '.join(SUFFIXES)}")
    return torch.tensor(ids)


def batches(tokens: Tensor, schedule: Schedule, *, bos: int, seed: int) -> Iterator[Tensor]:
    """int64 [batch, length]: BOS, then `length` - 1 tokens from a random place; raises InputError for too few."""
    width = schedule.length - 1
    if len(tokens) < width:
        raise InputError(f"got {len(tokens)} tokens of text, expected at least length - 1 = {width}; add text")
    random = torch.Generator().manual_seed(seed)
    for _ in range(schedule.steps):
        starts = torch.randint(len(tokens) - width + 1, (schedule.batch,), generator=random)
        rows = torch.stack([tokens[s : s + width] for s in starts.tolist()])
        yield torch.cat([torch.full((schedule.batch, 1), bos), rows], 1)


def train(model: Any, rows: Iterator[Tensor], schedule: Schedule) -> Iterator[Progress]:
    """Train `model` in place, yielding after each step. Raises EngineError for a loss that is not finite."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": schedule.decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=schedule.rate, betas=(0.9, 0.95))
    device = next(model.parameters()).device
    for step, ids in enumerate(rows):
        rate = schedule.rate_at(step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        with _loads(model) as loads:
            loss = _loss(model, ids.to(device))
        if not torch.isfinite(loss):
            raise EngineError(f"step {step}: the loss is {loss.item()}; lower rate={schedule.rate} or raise warmup")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), schedule.clip)
        optimizer.step()
        _balance(loads)
        yield Progress(step, loss.item(), rate)


@torch.no_grad()
def validation_loss(model: Any, rows: Sequence[Tensor]) -> float:
    """Mean loss in nats a token over batches [B, T], as trained: under bf16 autocast."""
    device = next(model.parameters()).device
    return sum(float(_loss(model, ids.to(device))) for ids in rows) / len(rows)


def _loss(model: Any, ids: Tensor) -> Tensor:
    with torch.autocast(ids.device.type, torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


@contextmanager
def _loads(model: Any) -> Iterator[list[tuple[Any, Tensor]]]:
    """(router, tokens of each expert) of every pass inside."""
    found: list[tuple[Any, Tensor]] = []

    def keep(router: Any, _: object, out: tuple[Tensor, Tensor, Tensor]) -> None:
        found.append((router, torch.bincount(out[-1].flatten(), minlength=router.num_experts)))

    routers = [m for m in model.modules() if hasattr(m, "e_score_correction_bias")]
    hooks = [router.register_forward_hook(keep) for router in routers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def _balance(loads: Sequence[tuple[Any, Tensor]]) -> None:
    for router, counts in loads:
        counts = counts.float()
        router.e_score_correction_bias += BIAS_STEP * torch.sign(counts.mean() - counts)
