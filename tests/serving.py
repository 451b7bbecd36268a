"""A server over the shipped checkpoint, for tests, and plain ways to ask it."""

import json
from dataclasses import replace
from functools import cache
from typing import Any

import httpx2

from harness.compose import named_variant
from harness.config import DeviceChoice
from harness.engines.assets import checkpoint_folder
from harness.engines.local import LocalEngine, shared_casts
from harness.serving.build import Offer, make_service
from harness.serving.server import Beside

MAX_LEN = 256
CHECKPOINT = str(checkpoint_folder("kimi-linear-12m"))


@cache
def local(**execution: int) -> LocalEngine:
    """`paged_batch` with what is named of its execution changed."""
    variant = named_variant("paged_batch")
    variant = replace(variant, execution=replace(variant.execution, **execution))  # pyright: ignore[reportArgumentType]
    casts = shared_casts(CHECKPOINT, None, "cpu")
    return LocalEngine(casts, variant, name="paged_batch", device=DeviceChoice(threads=1))


def serving(engine: LocalEngine | None = None, **offer: Any) -> Beside:
    """A server for a `with` block."""
    return Beside(make_service(engine or local(), Offer(**{"max_len": MAX_LEN, **offer})))


class Client:
    """Asks one server; `ask` gives the status and the JSON of a completion."""

    def __init__(self, url: str, **headers: str) -> None:
        self.http = httpx2.Client(base_url=url, timeout=60, trust_env=False, headers=headers)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def ask(self, prompt: Any = "The quick brown", *, path: str = "/v1/completions", **more: Any) -> tuple[int, Any]:
        body = {"prompt": prompt, "temperature": 0, **more}
        answer = self.http.post(path, json=body)
        return answer.status_code, answer.json()

    def said(self, prompt: Any = "The quick brown", **more: Any) -> dict[str, Any]:
        """The one choice of an answer that must be there."""
        status, body = self.ask(prompt, **more)
        assert status == 200, body
        (choice,) = body["choices"]
        return choice

    def events(self, prompt: Any = "The quick brown", **more: Any) -> list[dict[str, Any]]:
        """The events of a stream, which must end with [DONE]."""
        body = {"prompt": prompt, "temperature": 0, "stream": True, **more}
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


def raw(client: Client, body: bytes, **headers: str) -> tuple[int, Any]:
    """What bytes that no client library would send are answered."""
    sent = {"content-type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
    answer = client.http.post("/v1/completions", content=body, headers=sent)
    return answer.status_code, answer.json()
