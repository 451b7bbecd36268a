"""A service over one of our variants, and what a record keeps of what it served."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from harness.engines.local import LocalEngine
from harness.numerics import policy
from harness.serving.chat_template import load
from harness.serving.desk import Desk
from harness.serving.engine import ServingEngine
from harness.serving.service import Service
from harness.serving.vocabulary import Vocabulary
from harness.serving.wire import Limits
from variants.axes import Execution
from variants.checkpoint_config import read_json_object
from variants.errors import UsageError

GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True, kw_only=True)
class Offer:
    """How a model is served. name: "" for its folder's. max_len: tokens of prompt and answer, 0 for the model's own.

    queue: answers that wait or run at a time, more are told to come back. key: the API key, None for none.
    """

    name: str = ""
    max_len: int = 0
    queue: int = 256
    limits: Limits = field(default_factory=Limits)
    key: str | None = None


def check_variant(engine: LocalEngine) -> None:
    """Raises UsageError for a variant that does not run paged."""
    mode = engine.recipe.execution.mode
    if mode is not Execution.paged:
        raise UsageError(
            f"serve needs a paged variant, got execution.mode={mode.name}; try variant=paged_batch or paged_native"
        )


def max_len(engine: LocalEngine, asked: int) -> int:
    """Tokens of the longest request. Raises UsageError beyond the model's own."""
    own = engine.casts.checkpoint.config.max_length
    if asked > own:
        raise UsageError(f"max_len={asked}: the model was made for {own} tokens at most")
    return asked or own


def make_service(engine: LocalEngine, offer: Offer) -> Service:
    """The service; its memory is taken now, its desk is started by the server."""
    check_variant(engine)
    checkpoint, recipe = engine.casts.checkpoint, engine.recipe
    folder = Path(checkpoint.path)
    length = max_len(engine, offer.max_len)
    run = recipe.execution
    runs = ServingEngine(
        engine.model,
        max_len=length,
        around=lambda: policy(engine.device, tf32=recipe.tf32, reduced_sums=recipe.reduced_sums),
    )
    return Service(
        name=offer.name or folder.resolve().name,
        desk=Desk(runs, most=offer.queue),
        vocabulary=Vocabulary(folder, checkpoint.config.vocab_size),
        longest=min(length, runs.runner.state.pages * run.block_size),
        stop=stop_ids(folder, checkpoint.config.eos_token_id),
        shares_prefixes=run.prefix_cache > 0,
        template=load(folder),
        limits=offer.limits,
        key=offer.key,
    )


def stop_ids(folder: Path, eos: int | None) -> frozenset[int]:
    """Ids that end an answer: the config's, and those of generation_config.json."""
    path = folder / GENERATION_CONFIG
    more = read_json_object(path).get("eos_token_id") if path.is_file() else None
    named = more if isinstance(more, list) else [more]
    return frozenset(i for i in (eos, *named) if isinstance(i, int))


def served(service: Service) -> dict[str, Any]:
    """Counts and times of all that was served, for a record."""
    desk, stats = service.desk, service.desk.engine.stats
    return {
        "ended": dict(desk.finished),
        "tokens": dict(desk.tokens),
        "steps": desk.engine.steps,
        "preemptions": stats.preemptions,
        "prefix_hit_tokens": stats.prefix_hit_tokens,
        "first_token_s": percentiles(desk.first_s),
        "answer_s": percentiles(desk.whole_s),
        "left": {"sequences": desk.live, "slots": stats.running, "pages": stats.pages_used - stats.pages_cached},
    }


def percentiles(seconds: Iterable[float]) -> dict[str, float] | None:
    """p50 and p99, None of nothing."""
    values = list(seconds)
    return {f"p{q}": float(np.percentile(values, q)) for q in (50, 99)} if values else None
