"""The bodies of `/v1/completions` requests, by dialect: what asks for argmax and nothing else, and for ids.

Every setting that a server may fill from a file of its own (`generation_config.json`) is sent, since one that is left
out is one that nobody knows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.config import Dialect

PLAIN: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0}
EXTRA: dict[Dialect, dict[str, Any]] = {
    Dialect.openai: {},
    Dialect.vllm: {
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
        "add_special_tokens": False,
        "skip_special_tokens": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    },
    Dialect.llama: {
        "top_k": 1,
        "min_p": 0.0,
        "repeat_penalty": 1.0,
        "dry_multiplier": 0.0,
        "mirostat": 0,
        "cache_prompt": False,
        "return_tokens": True,
    },
    # Its `logprobs` is true or false, and names the ids of what was said only where no ranked list is asked for. Its
    # repetition penalty is off by 0.0, where it is 1.0 for everybody else, and off when it is left out.
    Dialect.mlx: {"top_k": 0, "min_p": 0.0, "logprobs": True},
}


@dataclass(frozen=True, kw_only=True)
class Form:
    """What all requests of an engine share. served: the model's name there; cache: a salt or False for a cold one."""

    served: str | None
    dialect: Dialect
    top_k: int
    cold: str | None = None

    def generate(self, prompt: Sequence[int] | str, max_tokens: int, *, stop_at_eos: bool) -> dict[str, Any]:
        """Greedy tokens after one prompt."""
        body = self._body(prompt) | {"max_tokens": max_tokens}
        if self.dialect is not Dialect.openai:
            body["ignore_eos"] = not stop_at_eos
        return body

    def score(self, ids: Sequence[int], top_k: int) -> dict[str, Any]:
        """Logprobs of the ids of a prompt, one more token generated where a server insists on it."""
        body = self._body(list(ids)) | {"max_tokens": 1, "logprobs": top_k}
        return body | ({"prompt_logprobs": top_k, "ignore_eos": True} if self._vllm else {"echo": True})

    def _body(self, prompt: Sequence[int] | str) -> dict[str, Any]:
        body: dict[str, Any] = {"prompt": prompt if isinstance(prompt, str) else list(prompt), **PLAIN}
        body |= EXTRA[self.dialect]
        body |= {"model": self.served} if self.served else {}
        body |= {"logprobs": self.top_k} if self.top_k else {}
        if self.cold is not None and self._vllm:
            body["cache_salt"] = self.cold
        if self.cold is None and self.dialect is Dialect.llama:
            body["cache_prompt"] = True
        return body

    @property
    def _vllm(self) -> bool:
        return self.dialect is Dialect.vllm

    @property
    def sampling(self) -> dict[str, object]:
        """The settings that a request states, for a record."""
        stated = {**PLAIN, **{k: v for k, v in EXTRA[self.dialect].items() if k in STATED}}
        return {**stated, "stated_by": "the request"}


STATED = ("top_k", "min_p", "repetition_penalty", "repeat_penalty", "dry_multiplier", "mirostat", "min_tokens")


def models(body: Mapping[str, Any]) -> dict[str, int | None]:
    """Names of a `/v1/models` answer and the greatest length of each, where the server says one."""
    found: dict[str, int | None] = {}
    entries = body.get("data")
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, Mapping) and entry.get("id"):
            meta = entry.get("meta") if isinstance(entry.get("meta"), Mapping) else {}
            length = entry.get("max_model_len") or (meta or {}).get("n_ctx")
            found[str(entry["id"])] = length if isinstance(length, int) else None
    return found
