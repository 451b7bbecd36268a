"""Token ids as text, for reports; needs the optional `tokenizers` package."""

from collections.abc import Callable
from pathlib import Path

from variants.errors import InputError

TokenText = Callable[[int], str | None]


def token_text(tokenizer_json: str | Path) -> TokenText | None:
    """A function from one token id to its text (None for an id without one), or None without the package.

    A token that is part of a character is shown by its vocabulary entry. Raises InputError when the file cannot be
    read as a tokenizer.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    path = Path(tokenizer_json)
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read tokenizer {path}: {error.strerror}") from error
    try:
        tokenizer = Tokenizer.from_str(content)
    except Exception as error:  # the package raises nothing narrower
        raise InputError(f"{path}: not a tokenizer.json ({error})") from error

    def text(token: int) -> str | None:
        if token < 0 or tokenizer.id_to_token(token) is None:
            return None
        decoded = tokenizer.decode([token], skip_special_tokens=False)
        return tokenizer.id_to_token(token) if "\ufffd" in decoded or not decoded else decoded

    return text
