"""tokenizer.json made of a tiktoken file of ranks, for Kimi, which ships only that.

A generic conversion splits text by another pattern and gives other ids, most for Han characters, so the pattern here is
Kimi's own (its `tokenization_kimi.py`). Nothing is ever put before or after a text: BOS is the caller's to add.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from variants.checkpoint_config import read_json_object
from variants.errors import InputError

RANKS = "tiktoken.model"
KIMI_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_RESERVED = 256  # ids after the ranks that Kimi keeps for special tokens


def kimi_tokenizer(folder: str | Path) -> dict[str, object]:
    """The content of tokenizer.json for a folder with `tiktoken.model` and `tokenizer_config.json`.

    Raises InputError for ranks that are not 0..N-1 or that leave a token no pair of shorter ones can make.
    """
    folder = Path(folder)
    ranks = read_ranks(folder / RANKS)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(token, text) for token, text in sorted(_special(folder, len(ranks)).items())],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": KIMI_PATTERN}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(ranks, folder / RANKS),
    }


def write_kimi_tokenizer(folder: str | Path, out: str | Path) -> None:
    """Write tokenizer.json of `folder` to `out`."""
    text = json.dumps(kimi_tokenizer(folder), ensure_ascii=False)
    Path(out).write_text(text + "\n", encoding="utf-8")


def read_ranks(file: Path) -> dict[bytes, int]:
    """Bytes of a token -> its rank, which is its id."""
    ranks: dict[bytes, int] = {}
    try:
        for line in file.read_bytes().splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise InputError(f"{file}: line {len(ranks) + 1} is not a base64 token and its rank ({error})") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise InputError(f"{file}: ranks are not 0 to {len(ranks) - 1}, each once; fetch the file again")
    return ranks


def _bpe(ranks: Mapping[bytes, int], file: Path) -> dict[str, object]:
    ordered = sorted(ranks, key=ranks.__getitem__)
    letters = byte_letters()
    merges: list[list[str]] = []
    for token in ordered:
        if len(token) > 1:
            pair = _last_pair(token, ranks)
            if pair is None:
                raise InputError(f"{file}: token {token!r} (rank {ranks[token]}) is no pair of tokens of lower rank")
            merges.append(["".join(letters[b] for b in part) for part in pair])
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        # A piece that is a token is that token, whatever merges would make of it: so does tiktoken.
        "ignore_merges": True,
        "vocab": {"".join(letters[b] for b in token): ranks[token] for token in ordered},
        "merges": merges,
    }


def _last_pair(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two parts that are left when the token is merged by ranks below its own; None where more are left."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [(ranks.get(a + b, ranks[token]), i) for i, (a, b) in enumerate(pairwise(parts))]
        rank, i = min(pairs)
        if rank >= ranks[token]:
            return None
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts[0], parts[1]


def byte_letters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


def _special(folder: Path, first: int) -> dict[int, str]:
    texts = {token: f"<|reserved_token_{token}|>" for token in range(first, first + _RESERVED)}
    config = folder / "tokenizer_config.json"
    named = read_json_object(config).get("added_tokens_decoder", {}) if config.is_file() else {}
    return texts | {int(token): str(entry["content"]) for token, entry in named.items()}


def _added(token: int, text: str) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": text, **flags, "special": True}
