"""The vocabulary of a GGUF file: token texts, or ids written out so that no server can merge or hold back a token."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

from variants.checkpoint import Checkpoint
from variants.checkpoint_config import read_json_object
from variants.errors import InputError, UsageError


class Vocabulary(Enum):
    """ids: token 17 is the text `[17]`. text: the checkpoint's own tokenizer.json.

    A server that answers in text holds a token back while its bytes are no whole character and then sends several as
    one; ids have no such tokens, and none of them is an end of sequence unless it is declared.
    """

    ids = "ids"
    text = "text"


_NORMAL, _CONTROL, _UNUSED = 1, 3, 5
# What the server splits text by before merges, by the pattern that tokenizer.json has.
_GPT2 = {"type": "ByteLevel", "use_regex": True}


def add_vocabulary(writer: Any, checkpoint: Checkpoint, vocabulary: Vocabulary, *, eos_reachable: bool) -> None:
    """Write the tokenizer's metadata.

    Raises UsageError for texts without an end, InputError for a tokenizer that llama.cpp would not read alike.
    """
    if vocabulary is Vocabulary.text and not eos_reachable:
        raise UsageError(
            "gguf: vocabulary=text always has an end of sequence (the server finds one by its text); "
            "add eos=reachable, or use vocabulary=ids"
        )
    if eos_reachable and checkpoint.config.eos_token_id is None:
        raise InputError(f"{checkpoint.path}: config.json names no eos_token_id; add it, or use eos=unreachable")
    writer.add_add_bos_token(False)
    if vocabulary is Vocabulary.ids:
        _add_ids(writer, checkpoint.config.vocab_size)
    else:
        _add_texts(writer, checkpoint)
    for name in ("bos", "pad", *(("eos",) if eos_reachable else ())):
        token = getattr(checkpoint.config, f"{name}_token_id")
        if token is not None:
            getattr(writer, f"add_{name}_token_id")(token)


def _add_ids(writer: Any, size: int) -> None:
    # Of llama.cpp's tokenizers this is the one that assumes no end of sequence where none is declared.
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list([f"[{token}]" for token in range(size)])
    writer.add_token_types([_NORMAL] * size)


def _add_texts(writer: Any, checkpoint: Checkpoint) -> None:
    file = Path(checkpoint.path) / "tokenizer.json"
    tokenizer = read_json_object(file)
    model = tokenizer.get("model", {})
    if model.get("type") != "BPE" or not _is_gpt2(tokenizer.get("pre_tokenizer")):
        raise InputError(f"{file}: not a byte-level BPE split as GPT-2's is; use vocabulary=ids, which needs no text")
    texts: dict[int, str] = {token: text for text, token in model["vocab"].items()}
    special = {entry["id"]: entry["content"] for entry in tokenizer.get("added_tokens", ())}
    texts |= special
    size = checkpoint.config.vocab_size
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([texts.get(token, f"[unused{token}]") for token in range(size)])
    writer.add_token_types([_kind(token, texts, special) for token in range(size)])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])


def _kind(token: int, texts: dict[int, str], special: dict[int, str]) -> int:
    return _CONTROL if token in special else _NORMAL if token in texts else _UNUSED


def _is_gpt2(pre: Any) -> bool:
    return isinstance(pre, dict) and all(pre.get(key, True) == value for key, value in _GPT2.items())
