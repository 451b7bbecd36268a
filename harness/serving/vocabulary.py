"""Text to token ids and each id to its bytes, for a byte-level tokenizer (Kimi's, GPT-2's, Llama 3's, Qwen's)."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.serving.api_error import ApiError
from harness.tokenizer_json import RANKS, byte_letters, kimi_tokenizer
from variants.errors import DeviceError, InputError


class Vocabulary:
    """The tokenizer of a checkpoint's folder; one without any is served by token ids alone.

    special: ids that are no text. size: ids that the model has; one that the tokenizer lacks has no bytes.
    """

    def __init__(self, folder: str | Path, size: int) -> None:
        """Raises DeviceError without the tokenizers package, InputError for a tokenizer that is not byte-level."""
        self.size = size
        content = _content(Path(folder))
        self.there = content is not None
        self.special = frozenset(t["id"] for t in (content or {}).get("added_tokens") or [] if t.get("special"))
        self._bytes = [b""] * size
        self._tokenizer = None
        if content is not None:
            self._tokenizer = _read(content, Path(folder))
            self._fill(content)
        self.longest_bytes = max(map(len, self._bytes))

    def _fill(self, content: Mapping[str, Any]) -> None:
        byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}
        for letters, token in content["model"]["vocab"].items():
            if token < self.size and all(c in byte_of for c in letters):
                self._bytes[token] = bytes(byte_of[c] for c in letters)
        for added in content.get("added_tokens") or []:
            if added["id"] < self.size:
                self._bytes[added["id"]] = added["content"].encode()

    def encode(self, text: str, *, add_special: bool = True, longest: int) -> list[int]:
        """Token ids of a text. add_special: also what the tokenizer itself puts around every text (Kimi's: nothing).

        longest: tokens that could be run at all; a text that cannot be so few is refused before it is read. Raises
        ApiError.
        """
        if self._tokenizer is None:
            raise ApiError(400, "this model has no tokenizer; send token ids", param="prompt")
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise ApiError(400, f"text that is no Unicode ({error.reason})", param="prompt") from error
        if size > longest * self.longest_bytes:
            raise ApiError(
                400,
                f"this model's maximum context length is {longest} tokens; {size} bytes of text are more",
                param="prompt",
                code="context_length_exceeded",
            )
        return self._tokenizer.encode(text, add_special_tokens=add_special).ids

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for, b"" where the tokenizer has no such token."""
        return self._bytes[token]

    def name(self, token: int) -> str:
        """A token as a text that no other token has: its own, or its bytes where they are part of a character."""
        said = self._bytes[token]
        if not said:
            return f"token_id:{token}"
        try:
            return said.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in said)

    def text(self, ids: Sequence[int]) -> str:
        return b"".join(self._bytes[i] for i in ids).decode("utf-8", "replace")


def _content(folder: Path) -> dict[str, Any] | None:
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"{path}: not JSON ({error}); fetch it again") from error
        return found
    return dict(kimi_tokenizer(folder)) if (folder / RANKS).is_file() else None


def _read(content: Mapping[str, Any], folder: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise DeviceError("serve needs the tokenizers package: pip install 'neartie[serve]'") from error
    decoder = content.get("decoder") or {}
    kinds = {decoder.get("type"), *(d.get("type") for d in decoder.get("decoders") or [])}
    if "ByteLevel" not in kinds or not isinstance((content.get("model") or {}).get("vocab"), dict):
        raise InputError(f"{folder}: tokenizer of kind {kinds}, expected a byte-level one; serve ids without it")
    try:
        return Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # the package raises nothing narrower
        raise InputError(f"{folder}: cannot be read as a tokenizer ({error})") from error
