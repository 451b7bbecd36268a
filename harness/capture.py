"""Capture: K greedy runs of an engine become a golden, its bar decided by them, with how much it differs from itself.

Rules
- Only plain greedy is captured: settings that an engine reports are read back, settings that it does not report are
  recorded as stated by the request, and a token that is not the first of its own logprobs refuses the capture.
- The K runs repeat one way of asking; they alone decide the bar. Other ways that must not matter (rows together, a cold
  prefix cache) are asked once each, where the engine has them, and their distance from run 0 is recorded as jitter.
- What finished is in a journal, so that a capture that was cut off goes on where it was.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, Protocol, runtime_checkable

import numpy as np

from harness.engines.protocol import Engine, EngineInfo, Generation, Prompts
from harness.golden_data import ENDED, Golden
from harness.journal import Journal
from harness.pregate import check_answers
from harness.progress import tracked
from harness.sampling import greedy_problems, normalize_sampling
from variants.errors import EngineError, InputError


@runtime_checkable
class HasArms(Protocol):
    """An engine that can be asked in other ways which must not matter."""

    def arms(self) -> Mapping[str, Engine]: ...


@runtime_checkable
class HasProvenance(Protocol):
    """An engine that can say more of how it is set up than `EngineInfo` holds."""

    @property
    def provenance(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be captured. top_k: logprobs to keep of run 0, 0 for none. stop_at_eos: rows end after EOS.

    arms: whether to ask in the engine's other ways too.
    """

    name: str
    prompts: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...] | None
    runs: int
    max_tokens: int
    stop_at_eos: bool
    top_k: int = 20
    arms: bool = True


@dataclass(frozen=True, kw_only=True)
class Jitter:
    """How far one way of asking is from run 0: tokens that differ of total, rows that do, the first such place.

    gap_nats: run 0's own gap at the first place of each row that differs, the largest of them; None where unknown.
    """

    way: str
    differ: int
    total: int
    rows: int
    first: tuple[int, int] | None
    gap_nats: float | None

    def plain(self) -> dict[str, Any]:
        return asdict(self) | {"first": list(self.first) if self.first else None}

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> "Jitter":
        """What `plain` gave, after JSON."""
        return cls(**{**plain, "first": tuple(plain["first"]) if plain["first"] else None})

    def __str__(self) -> str:
        if not self.differ:
            return f"{self.way}: identical"
        at = "" if self.first is None else f", first at p{self.first[0]}[{self.first[1]}]"
        gap = "" if self.gap_nats is None else f", gaps there up to {self.gap_nats:.3g} nat"
        return f"{self.way}: {self.differ}/{self.total} tokens differ in {self.rows} rows{at}{gap}"


def capture(engine: Engine, plan: Plan, *, journal: Journal, made: Mapping[str, Any]) -> Golden:
    """The golden of K runs. made: provenance that the engine itself cannot know (environment, settings).

    Raises InputError for an engine that is not plain greedy or answered another question, EngineError where it fails
    (what finished is kept) or says a token out of logits that are not finite.
    """
    _check_greedy(engine.info)
    runs = [_whole(engine, plan, journal, f"run {k}") for k in range(plan.runs)]
    golden = _golden(engine.info, plan, runs)
    for k, run in enumerate(runs):
        _check_run(golden, engine.info, run, plan, f"run {k}")
    found = [jitter(f"repeat {k}", runs[0], runs[k]) for k in range(1, plan.runs)]
    for way, arm in engine.arms().items() if plan.arms and isinstance(engine, HasArms) else ():
        run = _whole(arm, plan, journal, way)
        _check_run(golden, arm.info, run, plan, way)
        found.append(jitter(way, runs[0], run))
    top = _top(engine, plan, runs[0]) if plan.top_k else (None, None, ())
    own = dict(engine.provenance) if isinstance(engine, HasProvenance) else {}
    provenance = {
        **_named(engine.info),
        **own,
        **made,
        "captured": datetime.now(UTC).isoformat(timespec="seconds"),
        "jitter": [j.plain() for j in found],
        "notes": [*dict.fromkeys(n for run in runs for n in run.notes), *top[2]],
    }
    return replace(golden, provenance=provenance, top_ids=top[0], top_logprobs=top[1])


def jitter(way: str, first: Generation, other: Generation) -> Jitter:
    """How another run differs from the first; a place after a row's first difference counts too."""
    there = (first.tokens != ENDED) | (other.tokens != ENDED)
    differ = (first.tokens != other.tokens) & there
    rows = np.flatnonzero(differ.any(-1))
    places = [(int(n), int(np.argmax(differ[n]))) for n in rows]
    gaps = [float(first.gaps[p]) for p in places if np.isfinite(first.gaps[p])]
    return Jitter(
        way=way,
        differ=int(differ.sum()),
        total=int(there.sum()),
        rows=len(rows),
        first=min(places, key=lambda p: (p[1], p[0])) if places else None,
        gap_nats=max(gaps) if gaps else None,
    )


def _check_greedy(info: EngineInfo) -> None:
    if reasons := greedy_problems(normalize_sampling(info.sampling)):
        raise InputError(f"engine {info.name}: not plain greedy ({'; '.join(reasons)}); set it to argmax alone")


def _check_run(golden: Golden, info: EngineInfo, run: Generation, plan: Plan, way: str) -> None:
    check_answers(golden, info, run, stop_at_eos=plan.stop_at_eos)
    broken = np.argwhere(~run.finite & (run.tokens != ENDED))
    if len(broken):
        n, t = broken[0]
        raise EngineError(f"{way}: non-finite logits at prompt {n}, step {t}; nothing can be a golden of these")


def _whole(engine: Engine, plan: Plan, journal: Journal, way: str) -> Generation:
    """One run, in parts of as many rows as the engine runs together."""
    parts: list[Generation] = []
    size = max(1, engine.info.batch)
    for start, rows in tracked(way, _parts(plan.prompts, size), -(-len(plan.prompts) // size)):
        key = f"{way} {start}"
        if (kept := journal.get(key)) is None:
            part = engine.generate(rows, plan.max_tokens, stop_at_eos=plan.stop_at_eos)
            journal.put(key, kept := _plain(part))
        parts.append(_of_plain(kept, rows))
    return _joined(parts)


def _parts(prompts: Prompts, size: int) -> Iterator[tuple[int, Prompts]]:
    for start in range(0, len(prompts), size):
        yield start, prompts[start : start + size]


_KEPT = ("tokens", "finite", "gaps", "top_ids", "top_logprobs")


def _plain(part: Generation) -> dict[str, Any]:
    """What a golden needs of a generation, JSON-plain; times are of no use in it."""
    arrays = {name: None if (a := getattr(part, name)) is None else np.asarray(a).tolist() for name in _KEPT}
    ids = None if part.prompt_ids is None else [list(map(int, row)) for row in part.prompt_ids]
    return {**arrays, "finish": part.finish, "prompt_ids": ids, "sampling": part.sampling, "notes": part.notes}


def _of_plain(kept: Mapping[str, Any], rows: Prompts) -> Generation:
    kinds = {"tokens": np.int32, "finite": bool, "gaps": np.float64, "top_ids": np.int32, "top_logprobs": np.float64}
    arrays = {name: None if kept[name] is None else np.array(kept[name], dtype=kind) for name, kind in kinds.items()}
    return Generation(
        **arrays,  # pyright: ignore[reportArgumentType]
        prefill_s=np.full(len(rows), np.nan),
        prefill_tokens=np.array([len(row) for row in rows]),
        decode_s=(),
        finish=tuple(kept["finish"]),
        prompt_ids=kept["prompt_ids"],
        sampling=dict(kept["sampling"]),
        notes=tuple(kept["notes"]),
    )


def _joined(parts: list[Generation]) -> Generation:
    def cat(name: str) -> np.ndarray | None:
        arrays = [getattr(p, name) for p in parts]
        return None if any(a is None for a in arrays) else np.concatenate(arrays)

    ids = [list(p.prompt_ids or ()) for p in parts]
    return replace(
        parts[0],
        **{name: cat(name) for name in (*_KEPT, "prefill_s", "prefill_tokens")},  # pyright: ignore[reportArgumentType]
        finish=tuple(f for p in parts for f in p.finish),
        prompt_ids=[row for rows in ids for row in rows] if all(ids) else None,
        sampling=next((p.sampling for p in parts if p.sampling), {}),
        notes=tuple(dict.fromkeys(n for p in parts for n in p.notes)),
    )


def _golden(info: EngineInfo, plan: Plan, runs: list[Generation]) -> Golden:
    reported = next((run.sampling for run in runs if run.sampling), {})
    known = bool(reported) or "stated_by" not in info.sampling
    stated = {"read_back": known, "eos": "stop" if plan.stop_at_eos else "ignored"}
    return Golden(
        name=plan.name,
        prompts=plan.prompts,
        tokens=np.stack([run.tokens for run in runs]),
        texts=plan.texts,
        sampling=normalize_sampling({**info.sampling, **reported, **stated}),
    )


def _named(info: EngineInfo) -> dict[str, Any]:
    known = {
        "engine": info.name,
        "engine_version": info.version,
        "device": info.device,
        "dtype": info.dtype,
        "batch": info.batch,
        "model_sha256": info.model_sha256,
        "tokenizer_sha256": info.tokenizer_sha256,
        "tokenizer_class": info.tokenizer_class,
    }
    return {key: value for key, value in known.items() if value is not None}


def _top(engine: Engine, plan: Plan, run: Generation) -> tuple[np.ndarray | None, np.ndarray | None, tuple[str, ...]]:
    """Ranked logprobs of run 0, as float32: those that came with its tokens, else scored through the same path, else
    none."""
    if run.top_ids is not None and run.top_logprobs is not None:
        k = min(plan.top_k, run.top_ids.shape[-1])
        return run.top_ids[..., :k], run.top_logprobs[..., :k].astype(np.float32), ()
    if not engine.info.can_score:
        return None, None, ("the engine gave no logprobs: margins and gaps are unknown",)
    rows = [[int(i) for i in row if i != ENDED] for row in run.tokens]
    scored = engine.score(plan.prompts, rows, top_k=plan.top_k)
    first = scored.top_ids[..., 0]
    there = run.tokens[:, : first.shape[1]] != ENDED
    if scored.forced != "decode" or (first != run.tokens[:, : first.shape[1]])[there].any():
        return None, None, (f"logprobs of {scored.forced} are not of the arithmetic that made the tokens: left out",)
    shape = (*run.tokens.shape, plan.top_k)
    ids, values = np.full(shape, ENDED, np.int32), np.full(shape, np.nan, np.float32)
    ids[:, : first.shape[1]], values[:, : first.shape[1]] = scored.top_ids, scored.top_logprobs
    return ids, values, ()
