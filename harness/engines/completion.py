"""What a `/v1/completions` server answered, read into one shape whatever dialect it speaks.

Ids come as `token_ids` (vLLM), as `logprobs.content[].id` (llama.cpp), as integers or "token_id:N" in
`logprobs.tokens` (mlx-lm; vLLM on request), or as texts alone, which a tokenizer turns to ids where it can. Ranked
logprobs come as one map a token (keys: text, "token_id:N" or an id) or as one list of objects.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness.pregate import gap_of_top_list
from variants.errors import EngineError

TOKEN_ID = "token_id:"
Ranked = tuple[tuple[int, float], ...]
IdOf = Callable[[str, str], int]  # (text, where) -> id; raises EngineError where it is not one


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One finished request, JSON-plain but for its tuples.

    tokens: ids. ranked: (id, logprob) in decreasing order, ties to the lower id, one tuple a token; () where it is not
    known. gaps: first minus second in nats, None where that is not sure. finish: the server's word. prompt_ids and
    prompt_count: what it says it ran. seconds: when each token came, () where it was not watched. notes: at most one
    of a kind.
    """

    tokens: tuple[int, ...]
    ranked: tuple[Ranked, ...] = ()
    gaps: tuple[float | None, ...] = ()
    finish: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    prompt_count: int | None = None
    seconds: tuple[float, ...] = ()
    settings: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> "Answer":
        """What `plain` gave, after JSON."""
        ranked = tuple(tuple((int(i), float(v)) for i, v in row) for row in plain["ranked"])
        ids = plain["prompt_ids"]
        kept = {name: tuple(plain[name]) for name in ("tokens", "gaps", "seconds", "notes")}
        return cls(**{**plain, **kept, "ranked": ranked, "prompt_ids": None if ids is None else tuple(ids)})


def read_answer(body: Mapping[str, Any], *, top_k: int, id_of: IdOf | None, where: str) -> Answer:
    """The one choice of a completion. Raises EngineError for an answer without tokens that can be told apart."""
    choice = only_choice(body, where)
    logprobs = choice.get("logprobs") or {}
    if not isinstance(logprobs, Mapping):
        raise EngineError(f"{where}: logprobs are {type(logprobs).__name__}, expected an object")
    tokens = token_ids(choice, logprobs, id_of, where)
    ranked, gaps, notes = _ranked(tokens, logprobs, top_k, id_of)
    usage = body.get("usage") if isinstance(body.get("usage"), Mapping) else {}
    ids = choice.get("prompt_token_ids")
    settings = body.get("generation_settings")
    count = (usage or {}).get("prompt_tokens")
    return Answer(
        tokens=tokens,
        ranked=ranked,
        gaps=gaps,
        finish=str(choice["finish_reason"]) if choice.get("finish_reason") else None,
        prompt_ids=None if ids is None else _ids(ids, f"{where}: prompt_token_ids"),
        prompt_count=count if isinstance(count, int) else None,
        settings=dict(settings) if isinstance(settings, Mapping) else None,
        notes=notes,
    )


def only_choice(body: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    choices = body.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
        raise EngineError(f"{where}: the server's answer holds no single choice; it speaks another protocol")
    return choices[0]


def token_ids(
    choice: Mapping[str, Any], logprobs: Mapping[str, Any], id_of: IdOf | None, where: str
) -> tuple[int, ...]:
    """The ids of what was said, by whatever way the server tells them."""
    if choice.get("token_ids") is not None:
        return _ids(choice["token_ids"], f"{where}: token_ids")
    said = _content(logprobs, "id", "token") or logprobs.get("tokens")
    if not said:
        if not choice.get("text"):
            return ()
        raise EngineError(
            f"{where}: the server returns text alone, no token ids and no logprobs; tokens cannot be compared: "
            "engine.dialect=vllm or llama asks for ids, engine.top_k=5 for logprobs"
        )
    return tuple(_one_id(entry, id_of, f"{where}, token {t}") for t, entry in enumerate(said))


def merged(chunks: Sequence[Mapping[str, Any]], where: str) -> tuple[dict[str, Any], list[int]]:
    """The events of a stream as one body, and how many tokens each brought."""
    body: dict[str, Any] = {"usage": None}
    whole: dict[str, Any] = {"text": "", "logprobs": None, "finish_reason": None}
    counts: list[int] = []
    for chunk in chunks:
        if "error" in chunk:
            raise EngineError(f"{where}: the server broke off with an error: {str(chunk['error'])[:200]}")
        body["usage"] = chunk.get("usage") or body["usage"]
        if not chunk.get("choices"):  # the last event may hold the usage alone
            counts.append(0)
            continue
        counts.append(_append(whole, only_choice(chunk, where)))
    return {**body, "choices": [whole]}, counts


def _append(whole: dict[str, Any], part: Mapping[str, Any]) -> int:
    """Add one event's choice to the whole; returns how many tokens it brought."""
    whole["text"] += part.get("text") or ""
    whole["finish_reason"] = part.get("finish_reason") or whole["finish_reason"]
    whole.setdefault("prompt_token_ids", part.get("prompt_token_ids"))
    ids, logprobs = part.get("token_ids"), part.get("logprobs")
    if ids is not None:
        whole["token_ids"] = [*(whole.get("token_ids") or []), *ids]
    if logprobs:
        kept = whole["logprobs"] = whole["logprobs"] or {}
        for name, values in logprobs.items():
            if isinstance(values, list):
                kept[name] = [*kept.get(name, []), *values]
    said = ids if ids is not None else (logprobs or {}).get("content") or (logprobs or {}).get("tokens") or []
    return len(said)


def _ranked(
    tokens: tuple[int, ...], logprobs: Mapping[str, Any], top_k: int, id_of: IdOf | None
) -> tuple[tuple[Ranked, ...], tuple[float | None, ...], tuple[str, ...]]:
    """Ranked lists and gaps, one a token; entries that a server did not return make gaps unknown, never zero."""
    rows = _content(logprobs, "top_logprobs") or logprobs.get("top_logprobs") or []
    own = _content(logprobs, "logprob") or logprobs.get("token_logprobs") or []
    if not top_k or not (rows or own):
        return (), (), (f"{top_k} logprobs asked for with each token, none returned",) if top_k else ()
    if len(rows) != len(tokens):
        return (), (), (f"logprobs returned for {len(rows)} of {len(tokens)} tokens: not used, gaps are unknown",)
    ranked: list[Ranked] = []
    gaps: list[float | None] = []
    said: dict[str, None] = {}
    by_id = isinstance(next(iter(logprobs.get("tokens") or []), None), int)
    for token, row in zip(tokens, rows, strict=True):
        entries, texts = entries_of(row, id_of, by_id)
        gap = gap_of_top_list([*entries, *texts], top_k, chosen=token)
        short = gap.note if gap.note and not gap.note.startswith("chosen") else None
        said |= {f"logprobs: {short}": None} if short else {}
        gaps.append(gap.nats)
        ranked.append(() if texts else rank(entries))
    return tuple(ranked), tuple(gaps), tuple(said)


def entries_of(row: object, id_of: IdOf | None, by_id: bool) -> tuple[list[tuple[int, float]], list[tuple[str, float]]]:
    """(id, logprob) pairs of one token's list, and those whose text is not one id."""
    pairs: Iterable[tuple[object, object]] = ()
    if isinstance(row, Mapping):
        pairs = row.items()
    elif isinstance(row, list):
        pairs = [(e.get("id", e.get("token")), e.get("logprob")) for e in row if isinstance(e, Mapping)]
    known: list[tuple[int, float]] = []
    texts: list[tuple[str, float]] = []
    for key, value in pairs:
        if not isinstance(value, int | float):
            continue
        try:
            known.append((int(str(key)) if by_id else _one_id(key, id_of, "logprobs"), float(value)))
        except (EngineError, ValueError):
            texts.append((str(key), float(value)))
    return known, texts


def rank(entries: Iterable[tuple[int, float]]) -> Ranked:
    """In decreasing order of logprob, ties to the lower id, a NaN first so that it is seen."""
    return tuple(sorted(entries, key=lambda e: (-math.inf if math.isnan(e[1]) else -e[1], e[0])))


def _one_id(entry: object, id_of: IdOf | None, where: str) -> int:
    if isinstance(entry, int) and not isinstance(entry, bool):
        return entry
    text = str(entry)
    if text.startswith(TOKEN_ID) and text[len(TOKEN_ID) :].isdigit():
        return int(text[len(TOKEN_ID) :])
    if id_of is None:
        raise EngineError(
            f"{where}: the server returns texts, not ids; name its tokenizer with engine.tokenizer=FILE, or ask for "
            "ids with engine.dialect=vllm or llama"
        )
    return id_of(text, where)


def _content(logprobs: Mapping[str, Any], *names: str) -> list[Any]:
    """The first of `names` that each entry of `logprobs.content` has; [] where there is no such list."""
    content = logprobs.get("content")
    if not isinstance(content, list):
        return []
    return [next((e[n] for n in names if isinstance(e, Mapping) and n in e), None) for e in content]


def _ids(values: object, where: str) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(isinstance(v, int) and v >= 0 for v in values):
        raise EngineError(f"{where}: got {str(values)[:60]}, expected a list of token ids")
    return tuple(values)
