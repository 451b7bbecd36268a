"""A small OpenAI-compatible server in a thread, for tests: it recites a golden, and misbehaves as it is told."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from harness.golden import Golden

Misdeed = Callable[["Handler", dict[str, Any]], bool]  # True where it has answered, or dropped the request


class Reciter(ThreadingHTTPServer):
    """Answers each prompt of a golden with its run 0 and top logprobs, in vLLM's shape."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, golden: Golden, misdeed: Misdeed | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.golden, self.misdeed = golden, misdeed
        self.asked: list[dict[str, Any]] = []
        self.headers_seen: list[dict[str, str]] = []
        self.stop = threading.Event()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has gone is no news."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Reciter

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "tiny", "max_model_len": 512}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.asked.append(body)
            self.server.headers_seen.append({k.lower(): v for k, v in self.headers.items()})
        if self.server.misdeed is not None and self.server.misdeed(self, body):
            return
        whole = completion(self.server.golden, body)
        if body.get("stream"):
            self.events(chunks(whole))
        else:
            self.answer(whole)

    def answer(self, content: object, status: int = 200) -> None:
        self.raw(content if isinstance(content, bytes) else json.dumps(content).encode(), status)

    def raw(self, content: bytes, status: int = 200, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def events(self, contents: list[dict[str, Any]]) -> None:
        lines = b"".join(b"data: " + json.dumps(c).encode() + b"\n\n" for c in contents)
        self.raw(lines + b"data: [DONE]\n\n", kind="text/event-stream")

    def hang(self) -> bool:
        """Hold the request until the test is over."""
        self.server.stop.wait(20)
        return True


def completion(golden: Golden, body: dict[str, Any]) -> dict[str, Any]:
    """The recorded tokens of the prompt that `body` asks about."""
    assert golden.top_ids is not None
    assert golden.top_logprobs is not None
    prompt = tuple(body["prompt"])
    n, forced = next((i, prompt[len(p) :]) for i, p in enumerate(golden.prompts) if prompt[: len(p)] == p)
    k, count = body.get("logprobs") or body.get("prompt_logprobs") or 0, body["max_tokens"]
    lists = [
        dict(zip(golden.top_ids[n, t].tolist()[:k], golden.top_logprobs[n, t].tolist()[:k], strict=True))
        for t in range(golden.tokens.shape[2])
    ]
    tokens = golden.tokens[0, n, len(forced) : len(forced) + count].tolist()
    choice: dict[str, Any] = {"index": 0, "text": "said", "finish_reason": "length"}
    choice |= {"token_ids": tokens, "prompt_token_ids": list(prompt)}
    choice["logprobs"] = {
        "tokens": [f"token_id:{t}" for t in tokens],
        "token_logprobs": [lists[len(forced) + t].get(token) for t, token in enumerate(tokens)],
        "top_logprobs": [{f"token_id:{i}": v for i, v in row.items()} for row in lists[len(forced) :][: len(tokens)]],
    }
    if body.get("prompt_logprobs"):
        rows = [{str(i): {"logprob": v} for i, v in lists[t].items()} for t in range(len(forced))]
        start = len(prompt) - len(forced)
        choice["prompt_logprobs"] = [None, *[{"1": {"logprob": -1.0}}] * (start - 1), *rows]
    return {"choices": [choice], "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}}


def chunks(whole: dict[str, Any]) -> list[dict[str, Any]]:
    """The same as one event a token."""
    (choice,) = whole["choices"]
    said = choice["logprobs"]
    parts = []
    for t, token in enumerate(choice["token_ids"]):
        last = t + 1 == len(choice["token_ids"])
        part = {"text": "", "token_ids": [token], "finish_reason": choice["finish_reason"] if last else None}
        part["logprobs"] = {name: values[t : t + 1] for name, values in said.items()}
        parts.append({"choices": [part | ({"prompt_token_ids": choice["prompt_token_ids"]} if t == 0 else {})]})
    return [*parts, {"choices": [], "usage": whole["usage"]}]


@contextmanager
def serving(golden: Golden, misdeed: Misdeed | None = None) -> Iterator[Reciter]:
    """The server while the context lasts."""
    server = Reciter(golden, misdeed)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop.set()
        server.shutdown()
        server.server_close()
        thread.join(5)
        time.sleep(0)
