"""Token ids to text and back, for servers that take or give text: only where nothing is lost on the way."""

import json
from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path

from variants.errors import DeviceError, EngineError, InputError


class PromptText:
    """A tokenizer.json (or the folder that holds one), read by the `tokenizers` package."""

    def __init__(self, path: str | Path) -> None:
        """Raises DeviceError without the package, InputError for what is no tokenizer."""
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise DeviceError("engine.tokenizer needs the tokenizers package: pip install tokenizers") from error
        path = Path(path)
        self.path = path / "tokenizer.json" if path.is_dir() else path
        try:
            content = self.path.read_bytes()
            self._tokenizer = Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the package raises nothing narrower
            raise InputError(f"{self.path}: cannot be read as a tokenizer.json ({error})") from error
        self.sha256 = sha256(content).hexdigest()

    @property
    def tokenizer_class(self) -> str | None:
        """As the tokenizer_config.json beside it names it."""
        return tokenizer_class(self.path.parent)

    def text(self, ids: Sequence[int], what: str) -> str:
        """The text of `ids`, special tokens written out; raises InputError where it does not lead back to them."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        again = self.ids(text)
        if again != list(ids):
            raise InputError(
                f"{what} does not survive being text: {len(ids)} ids become {len(again)} others; use engine.feed=ids"
            )
        return text

    def ids(self, text: str) -> list[int]:
        """No special token is added: a BOS is there where the text has it."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def id_of(self, said: str, where: str) -> int:
        """The one id whose text a server gave; raises EngineError where several have it, or none."""
        found = self._by_text.get(said, [])
        if len(found) == 1:
            return found[0]
        why = f"{len(found)} ids have that text: ambiguous strings" if found else "no id has that text"
        raise EngineError(
            f"{where}: token {said!r}: {why}; ask the server for token ids (engine.dialect=vllm or llama)"
        )

    @cached_property
    def _by_text(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for token in range(self._tokenizer.get_vocab_size(with_added_tokens=True)):
            found.setdefault(self._tokenizer.decode([token], skip_special_tokens=False), []).append(token)
        return found


def tokenizer_class(folder: Path) -> str | None:
    """`tokenizer_class` of a folder's tokenizer_config.json; None where it does not say."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error})") from error
    return found.get("tokenizer_class") if isinstance(found, dict) else None
