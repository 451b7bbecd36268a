"""Clients of a server, one a prompt, all at once: a process of its own, so that none takes the server's time.

Reads {"url", "prompts", "tokens"} as JSON from stdin; prints the seconds from the first request to the last answer.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from threading import Barrier
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 240


def answered(asked: dict[str, Any]) -> float:
    """Seconds of all answers. Raises ValueError for one that is short or refused."""
    where, tokens = urlsplit(asked["url"]), int(asked["tokens"])
    prompts = asked["prompts"]
    together = Barrier(len(prompts) + 1)

    def one(ids: list[int]) -> None:
        connection = HTTPConnection(where.hostname or "", where.port, timeout=TIMEOUT_S)
        connection.connect()
        body = json.dumps({"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True})
        together.wait()
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        said = json.loads(reply.read())
        if reply.status != 200 or said["usage"]["completion_tokens"] != tokens:
            raise ValueError(f"status {reply.status}: {said.get('error', said.get('usage'))}")

    with ThreadPoolExecutor(len(prompts)) as pool:
        waiting = [pool.submit(one, ids) for ids in prompts]
        together.wait(TIMEOUT_S)
        began = time.perf_counter()
        for future in waiting:
            future.result()
        return time.perf_counter() - began


if __name__ == "__main__":
    print(answered(json.load(sys.stdin)))
