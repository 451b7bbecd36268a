"""Prompts for a capture: those of a golden, or a file of texts or ids, one a line."""

import json
from dataclasses import dataclass
from pathlib import Path

from harness.engines.prompt_text import PromptText
from harness.golden import load_golden
from variants.errors import InputError, UsageError


@dataclass(frozen=True, kw_only=True)
class PromptList:
    """Prompts as ids, and as texts where they were texts. note: how the ids came about."""

    prompts: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...] | None
    note: str


def read_prompts(source: str, *, tokenizer: str | Path | None = None, bos_id: int | None = None) -> PromptList:
    """The prompts of a golden (its name, NAME.json or folder), of FILE.txt (a text a line) or of FILE.jsonl.

    A line of JSONL holds "prompt_ids" (taken as they are) or "prompt" (a text). Texts become ids by `tokenizer`,
    without special tokens, and `bos_id` goes before them (None: nothing does). Raises InputError for a file that cannot
    be read or holds no prompt, UsageError where a text needs a tokenizer.
    """
    path = Path(source)
    if path.suffix not in (".txt", ".jsonl"):
        golden = load_golden(source)
        return PromptList(prompts=golden.prompts, texts=golden.texts, note=f"ids of golden {golden.name}")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read prompts {path}: {error}") from error
    entries = [_entry(line, path, n) for n, line in enumerate(lines, 1) if line.strip()]
    if not entries:
        raise InputError(f"{path}: holds no prompt; expected one a line")
    texts = [e for e in entries if isinstance(e, str)]
    if texts and tokenizer is None:
        raise UsageError(f"{path} holds texts: name their tokenizer with tokenizer=FILE, or give prompt_ids")
    ids_of = PromptText(tokenizer) if texts and tokenizer is not None else None
    first = () if bos_id is None else (bos_id,)
    prompts = tuple((*first, *ids_of.ids(e)) if isinstance(e, str) and ids_of else tuple(e) for e in entries)
    bos = "no BOS" if bos_id is None else f"BOS {bos_id} put before each"
    note = f"texts of {path.name}, {bos}" if texts else f"ids of {path.name}"
    return PromptList(prompts=prompts, texts=tuple(texts) if len(texts) == len(entries) else None, note=note)  # type: ignore[arg-type]


def _entry(line: str, path: Path, number: int) -> str | tuple[int, ...]:
    if path.suffix == ".txt":
        return line
    try:
        found = json.loads(line)
    except ValueError as error:
        raise InputError(f"{path}, line {number}: not JSON ({error})") from error
    if isinstance(found, dict):
        ids, text = found.get("prompt_ids"), found.get("prompt")
        if isinstance(ids, list) and ids and all(isinstance(i, int) and i >= 0 for i in ids):
            return tuple(ids)
        if isinstance(text, str) and text:
            return text
    raise InputError(f'{path}, line {number}: expected "prompt_ids" (a list of ids) or "prompt" (a text)')
