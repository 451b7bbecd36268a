"""Many clients of many kinds at one server for some time: which answers were right, how long they took, what is left.

Run by itself: python tests/serving_load.py SECONDS
"""

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

CLIENTS, QUEUE, MAX_LEN, BODY_BYTES = 64, 56, 256, 20_000
SEEDS = (3, 11)


@dataclass(frozen=True)
class Known:
    """A request and the tokens that are right for it; an answer may be shorter."""

    body: dict[str, Any]
    tokens: list[int]


@dataclass
class Tally:
    """What came of it. wrong: a line for each answer that should not have been."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    rss_mib: list[float] = field(default_factory=list)
    left: dict[str, float] = field(default_factory=dict)

    def text(self) -> str:
        def two(values: list[float]) -> str:
            if not values:
                return "none"
            return f"p50 {np.percentile(values, 50):.3f} s, p99 {np.percentile(values, 99):.3f} s"

        rss = f"{self.rss_mib[0]:.0f} .. {max(self.rss_mib):.0f}, at the end {self.rss_mib[-1]:.0f} MiB"
        return (
            f"{dict(sorted(self.counts.items()))}\nwrong: {len(self.wrong)}; whole answer {two(self.whole_s)}; "
            f"first token {two(self.first_s)}\nresident {rss}; left {self.left}"
        )


def known_answers(prompts: int, tokens: int) -> list[Known]:
    """Greedy answers by the library on carried state, sampled ones by its runner, one request at a time."""
    from serving import local

    from harness.engines.local import LocalEngine
    from harness.golden import load_golden
    from harness.serving.identity import incremental
    from variants.request import Request
    from variants.runner import Runner

    engine = local()
    alone = LocalEngine(engine.casts, incremental(engine.variant), name="alone", device=engine.device)
    battery = load_golden("gate").prompts[:prompts]
    how = {"ignore_eos": True, "return_token_ids": True}
    greedy = alone.generate(battery, tokens).tokens.tolist()
    known = [Known({"prompt": list(p), "temperature": 0, **how}, row) for p, row in zip(battery, greedy, strict=True)]
    for seed in SEEDS:
        runner = Runner(engine.model, max_len=MAX_LEN)
        runner.add(Request(ids=battery[0], max_tokens=tokens, temperature=1.0, top_p=0.9, seed=seed))
        made = []
        while runner.busy:
            made += [o.token for o in runner.step().outputs if o.token is not None]
        body = {"prompt": list(battery[0]), "temperature": 1.0, "top_p": 0.9, "seed": seed, **how}
        known.append(Known(body, made))
    return known


class Clients:
    """All the clients of one load."""

    def __init__(self, url: str, known: list[Known], seconds: float) -> None:
        self.url, self.known, self.tally = url, known, Tally()
        self.end = time.monotonic() + seconds
        host, _, port = url.removeprefix("http://").rpartition(":")
        self.address = host, int(port)

    async def run(self, pid: int) -> Tally:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=self.url, timeout=120, trust_env=False, limits=limits) as http:
            watch = asyncio.create_task(self._watch(pid))
            await asyncio.gather(*(self._client(http, random.Random(n)) for n in range(CLIENTS)))
            await self._settle(http)
            watch.cancel()
            self.tally.rss_mib.append(resident_mib(pid))
        return self.tally

    async def _client(self, http: httpx2.AsyncClient, draw: random.Random) -> None:
        kinds: list[tuple[int, Callable[..., Awaitable[None]]]] = [
            (40, self._whole), (22, self._stream), (14, self._leaves), (6, self._malformed), (6, self._oversized),
            (6, self._too_long), (6, self._slow),
        ]  # fmt: skip
        weights, doings = zip(*kinds, strict=True)
        while time.monotonic() < self.end:
            await draw.choices(doings, weights)[0](http, draw)

    def _asked(self, draw: random.Random) -> tuple[dict[str, Any], list[int]]:
        known = draw.choice(self.known)
        count = draw.randint(1, len(known.tokens))
        return known.body | {"max_tokens": count}, known.tokens[:count]

    def _check(self, kind: str, got: object, want: object) -> None:
        self.tally.counts[kind] += 1
        if got != want:
            self.tally.wrong.append(f"{kind}: {str(got)[:300]}, expected {str(want)[:200]}")

    async def _whole(self, http: httpx2.AsyncClient, draw: random.Random) -> None:
        body, want = self._asked(draw)
        began = time.monotonic()
        answer = await http.post("/v1/completions", json=body)
        if await self._busy(answer):
            return
        got = answer.json()
        self._check("whole", got["choices"][0]["token_ids"] if answer.status_code == 200 else got, want)
        self.tally.whole_s.append(time.monotonic() - began)

    async def _stream(self, http: httpx2.AsyncClient, draw: random.Random) -> None:
        body, want = self._asked(draw)
        began, got, first = time.monotonic(), [], None
        async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            if await self._busy(answer):
                return
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    first = first or time.monotonic() - began
                    got += event["choices"][0]["token_ids"] if "choices" in event else [event]
        self._check("streamed", got, want)
        self.tally.first_s.append(first or 0.0)
        self.tally.whole_s.append(time.monotonic() - began)

    async def _leaves(self, http: httpx2.AsyncClient, draw: random.Random) -> None:
        """Gone after a while, in the middle of whatever it is."""
        body = self._asked(draw)[0] | {"max_tokens": 150, "stream": draw.random() < 0.5, "n": draw.randint(1, 2)}
        with suppress(TimeoutError):
            async with asyncio.timeout(draw.uniform(0, 1.0)):
                await http.post("/v1/completions", json=body)
        self.tally.counts["left"] += 1

    async def _malformed(self, http: httpx2.AsyncClient, draw: random.Random) -> None:
        kinds = (b"{", b"[[[[", b'{"prompt": NaN}', b'{"prompt": [99999999]}', b"\xff", b'{"prompt": "a", "n": 0}')
        head = {"content-type": "application/json"}
        answer = await http.post("/v1/completions", content=draw.choice(kinds), headers=head)
        self._check("malformed", answer.status_code, 400)

    async def _oversized(self, http: httpx2.AsyncClient, draw: random.Random) -> None:
        chunked = draw.random() < 0.5

        async def parts() -> Any:
            for _ in range(64):
                yield b" " * 65536

        content: Any = parts() if chunked else b" " * (BODY_BYTES + 1)
        try:
            head = {"content-type": "application/json"}
            answer = await http.post("/v1/completions", content=content, headers=head)
            self._check("oversized", answer.status_code, 413)
        except httpx2.TransportError:  # cut while it still sent
            self.tally.counts["oversized, cut"] += 1

    async def _too_long(self, http: httpx2.AsyncClient, draw: random.Random) -> None:
        answer = await http.post("/v1/completions", json={"prompt": [5] * 300, "max_tokens": draw.randint(1, 10**9)})
        self._check("too long", answer.status_code, 400)

    async def _slow(self, http: httpx2.AsyncClient, draw: random.Random) -> None:
        """Reads a few bytes at a time, then leaves."""
        body = json.dumps(self._asked(draw)[0] | {"max_tokens": 40, "stream": True, "logprobs": 20}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        reader, writer = await asyncio.open_connection(*self.address, limit=1024)
        writer.write(f"{head}\r\n\r\n".encode() + body)
        for _ in range(draw.randint(1, 30)):
            await reader.read(16)
            await asyncio.sleep(0.1)
        writer.transport.abort()
        self.tally.counts["slow"] += 1

    async def _busy(self, answer: httpx2.Response) -> bool:
        """True where the server is full, after a part of the time that it asks for."""
        if answer.status_code != 429:
            return False
        self.tally.counts["429"] += 1
        await asyncio.sleep(min(1.0, float(answer.headers["retry-after"])))
        return True

    async def _settle(self, http: httpx2.AsyncClient) -> None:
        """What the server owns once all have gone."""
        for _ in range(200):
            found = dict(
                re.findall(r"^neartie_(live|running|pages_used) (\S+)$", (await http.get("/metrics")).text, re.M)
            )
            self.tally.left = {name: float(value) for name, value in found.items()}
            if not any(self.tally.left.values()):
                return
            await asyncio.sleep(0.1)

    async def _watch(self, pid: int) -> None:
        while True:
            self.tally.rss_mib.append(resident_mib(pid))
            await asyncio.sleep(1)


def resident_mib(pid: int) -> float:
    found = re.search(r"^VmRSS:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) / 1024


def load(seconds: float, known: list[Known], results: Path) -> Tally:
    """Start the server as a user does, load it, stop it."""
    command = [sys.executable, "-m", "experiments.cli", "serve", "variant=paged_batch", "port=0", f"queue={QUEUE}"]
    command += [f"max_len={MAX_LEN}", f"body_bytes={BODY_BYTES}", f"results={results}", "device.threads=1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        try:
            url = next(w for line in process.stderr for w in line.split() if w.startswith("http://"))
            tally = asyncio.run(Clients(url, known, seconds).run(process.pid))
        finally:
            process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
    assert process.returncode == 0, said
    return tally


if __name__ == "__main__":
    print(load(float(sys.argv[1]), known_answers(8, 24), Path(sys.argv[2])).text())
