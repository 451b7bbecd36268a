"""A conversation as a prompt, by the Jinja template that came with the tokenizer, in a sandbox."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.serving.api_error import ApiError
from variants.checkpoint_config import read_json_object
from variants.errors import DeviceError, InputError

TEMPLATE, CONFIG = "chat_template.jinja", "tokenizer_config.json"


class ChatTemplate:
    """Renders messages; made by `load`."""

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        """names: the special tokens that a template may use. Raises InputError for one that is no Jinja."""
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise DeviceError("a chat template needs the jinja2 package: pip install 'neartie[serve]'") from error
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        self._error, self._names = TemplateError, dict(names)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise InputError(f"the chat template cannot be read: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt that an answer follows. Raises ApiError where the template refuses the conversation."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._names)
        except (self._error, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise ApiError(400, f"the chat template refuses these messages: {error}", param="messages") from error


def _refuse(message: str) -> None:
    raise ValueError(message)


def load(folder: str | Path) -> ChatTemplate | None:
    """The template of a tokenizer's folder, None where it has none."""
    folder = Path(folder)
    config = read_json_object(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    source = config.get("chat_template")
    if (folder / TEMPLATE).is_file():
        source = (folder / TEMPLATE).read_text(encoding="utf-8")
    if isinstance(source, list):  # several, by name
        source = next((t.get("template") for t in source if t.get("name") == "default"), None)
    names = {key: _content(config[key]) for key in ("bos_token", "eos_token", "pad_token") if config.get(key)}
    return ChatTemplate(source, names) if isinstance(source, str) and source else None


def _content(token: object) -> str:
    return str(token["content"]) if isinstance(token, Mapping) else str(token)
