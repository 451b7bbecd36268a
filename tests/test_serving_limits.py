"""Bounds of the server: whoever leaves, stalls, floods or is too large costs the others nothing."""

import json
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the [serve] extra is not installed")
pytest.importorskip("uvicorn", reason="the [serve] extra is not installed")

from serving import Client, local, serving

from experiments.cli import main
from harness.compose import load
from harness.engines.local import LocalEngine
from harness.ledger import Ledger
from harness.serving import desk
from harness.serving import server as server_module
from harness.serving.build import Limits, Offer, make_service
from harness.serving.server import Beside
from variants.errors import DeviceError, EngineError, UsageError
from variants.runner import Runner

TEXT = "The quick brown"
LONG = {"prompt": TEXT, "max_tokens": 200, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def server() -> Iterator[Beside]:
    with serving(queue=4, limits=Limits(body_bytes=20_000, read_s=0.5, write_s=0.5)) as beside:
        yield beside


def until(true: Any, seconds: float = 20.0) -> None:
    """Wait for something to become true; a test fails where it does not."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def connect(server: Beside, *, receive: int = 0) -> socket.socket:
    """A bare connection; receive: bytes that the kernel takes for a reader that does not read."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    client = socket.socket()
    client.settimeout(20)
    if receive:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    client.connect((host, int(port)))
    return client


def post(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    return head.encode() + b"\r\n" + content


def rest(client: socket.socket) -> bytes:
    """All that still comes, until the connection ends or is reset."""
    parts = []
    with suppress(ConnectionError):
        while part := client.recv(65536):
            parts.append(part)
    return b"".join(parts)


def idle(server: Beside) -> bool:
    """No answer lives, no slot and no page has an owner, and nothing is kept for anybody."""
    now = server.service.desk
    stats, kept = now.engine.stats, (now.live, now.entries, len(now.tickets), server.service.inbox.held)
    return not any((stats.running, stats.waiting, stats.pages_used, *kept))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reset", [False, True])
def test_a_client_that_leaves_frees_its_slot(server: Beside, stream: bool, reset: bool) -> None:
    """Closed or reset, whole or streamed: its answers are cancelled and own nothing any more."""
    with connect(server) as client:
        client.sendall(post({**LONG, "stream": stream, "n": 2}))
        until(lambda: server.service.desk.engine.stats.running == 2)
        if reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until(lambda: idle(server))
    assert server.service.desk.finished == {"cancelled": 2}


def test_answers_that_wait_are_cancelled_too() -> None:
    """More than there are slots: those that run and those that wait own nothing once their client has gone."""
    with serving(queue=16) as beside:
        with connect(beside) as client:
            client.sendall(post({**LONG, "n": 12}))
            until(
                lambda: (beside.service.desk.engine.stats.running, beside.service.desk.engine.stats.waiting) == (8, 4)
            )
        until(lambda: idle(beside))
        assert beside.service.desk.finished == {"cancelled": 12}


def test_who_comes_when_all_is_full_is_told_when_to_come_back(server: Beside) -> None:
    """429 with Retry-After; a request that could never fit is a 400; when there is room again all is well."""
    with connect(server) as busy, Client(server.url) as client:
        busy.sendall(post({**LONG, "n": 4}))
        until(lambda: server.service.desk.live == 4)
        answer = client.http.post("/v1/completions", json={"prompt": TEXT, "max_tokens": 1})
        assert answer.status_code == 429
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert client.ask(n=5)[0] == 400
        busy.close()
        until(lambda: idle(server))
        assert client.said(max_tokens=1)


def test_a_reader_that_stalls_is_dropped_and_holds_up_nobody(server: Beside) -> None:
    """Others are answered meanwhile; after write_s the connection is cut and what it asked for is cancelled."""
    body = {**LONG, "prompt": [5] * 240, "stream": True, "logprobs": 20, "echo": True, "max_tokens": 16, "n": 3}
    with connect(server, receive=4096) as slow:
        slow.sendall(post(body))
        until(lambda: server.service.desk.engine.stats.running == 3)
        with Client(server.url) as client:
            until(lambda: client.ask(max_tokens=1)[0] == 200)
        until(lambda: idle(server))
        assert b"[DONE]" not in rest(slow)


def test_what_an_answer_may_hold_is_bounded() -> None:
    """Tokens and logprobs of one request, and of all: 400 where they are ever too many, 429 where they are now."""
    with serving() as beside, Client(beside.url) as client:
        many = {"echo": True, "logprobs": 20, "max_tokens": 50, "ignore_eos": True}
        assert "logprobs asked for" in client.ask([5] * 200, n=128, **many)[1]["error"]["message"]
        beside.service.desk.entries += desk.ENTRIES
        assert client.ask(max_tokens=1)[0] == 429
        beside.service.desk.entries -= desk.ENTRIES
        assert client.said(max_tokens=1)
        beside.service.inbox.held += 64 * 2**20
        assert client.ask(max_tokens=1)[0] == 429
        beside.service.inbox.held -= 64 * 2**20
        until(lambda: idle(beside))


def test_connections_are_bounded_in_number_and_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One too many is told so; one that never ends its head is closed, however slowly it goes on."""
    monkeypatch.setattr(server_module, "CONNECTIONS", 2)
    monkeypatch.setattr(server_module, "KEEP_ALIVE_S", 1.0)
    with serving() as beside, connect(beside) as one, connect(beside) as two:
        one.sendall(b"GET /health HTTP/1.1\r\n")
        time.sleep(0.2)
        with connect(beside) as three:
            assert rest(three).startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        with suppress(ConnectionError):
            for _ in range(30):
                two.sendall(b"x")
                time.sleep(0.1)
            pytest.fail("a head that never ends was waited for")
        assert rest(one) == b""


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_refused_while_it_comes(server: Beside, chunked: bool) -> None:
    """Announced or not: 413 after no more than the bound, and the connection is closed."""
    with connect(server) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        client.sendall(
            head + (b"Transfer-Encoding: chunked\r\n\r\n" if chunked else b"Content-Length: 100000000\r\n\r\n")
        )
        sent = 0
        try:
            while chunked and sent < 100 * 2**20:
                client.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
                sent += 65536
        except ConnectionError:
            pass
        assert sent < 16 * 2**20
        if not chunked:
            assert client.recv(4096).startswith(b"HTTP/1.1 413")
    with Client(server.url) as client:
        assert client.said(max_tokens=1)


def test_a_body_that_does_not_come_is_not_waited_for(server: Beside) -> None:
    """408 after read_s."""
    with connect(server) as client:
        client.sendall(post(LONG)[:-5])
        assert client.recv(4096).startswith(b"HTTP/1.1 408")


def test_pipelined_requests_and_garbage(server: Beside) -> None:
    """Requests one after the other on a connection that then closes; bytes that are no HTTP; nothing is left."""
    with connect(server) as client:
        client.sendall(post({**LONG, "max_tokens": 2}) * 3)
        until(lambda: server.service.desk.finished["length"] >= 1)
    with connect(server) as client:
        client.sendall(b"\x00\xff\r\n\r\n")
        assert json.loads(rest(client).partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    until(lambda: idle(server))
    with Client(server.url) as client:
        assert client.said(max_tokens=1)


def test_a_key_is_compared_whole() -> None:
    """401 without it, with a part of it, with more than it, and with bytes that are no text; health asks for none."""
    with serving(key="secret") as beside:
        for given in ("", "Bearer", "Bearer secre", "Bearer secrets", "Basic secret", "Bearer s\xe9cret"):
            with Client(beside.url) as client:
                answer = client.http.get("/v1/models", headers=[(b"authorization", given.encode("latin-1"))])
                assert answer.status_code == 401, given
                assert answer.headers["www-authenticate"] == "Bearer"
                assert client.http.get("/health").status_code == 200
        with Client(beside.url, authorization="Bearer secret") as client:
            assert client.said(max_tokens=1)


def test_logits_that_are_not_finite_fail_their_own_request() -> None:
    """A token whose embedding is NaN: 500 in the API's shape for who has it, the right answer for who runs beside."""
    engine = local()
    model = engine.build()
    for phase in model.phases.values():
        phase.embedding = phase.embedding.clone()
        phase.embedding[7] = float("nan")
    broken = LocalEngine(engine.casts, engine.variant, name="broken", device=engine.device)
    broken._model = model
    with serving(broken) as beside, Client(beside.url) as client:
        want = client.said([5, 6], max_tokens=8, return_token_ids=True)["token_ids"]
        status, body = client.ask([[5, 6], [7, 6]], max_tokens=8)
        assert (status, body["error"]["code"]) == (500, "non_finite_logits")
        assert client.ask([7], max_tokens=0, echo=True, logprobs=1)[0] == 500
        (event,) = client.events([7], max_tokens=8)
        assert event["error"]["code"] == "non_finite_logits"
        assert client.said([5, 6], max_tokens=8, return_token_ids=True)["token_ids"] == want
        until(lambda: idle(beside))


def test_an_engine_that_dies_takes_nobody_with_it_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits gets a 503 in the API's shape, and the server ends with an EngineError."""

    def step(self: Runner) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(Runner, "step", step)
    beside = serving()
    beside.__enter__()
    with Client(beside.url) as client:
        status, body = client.ask(max_tokens=4)
    assert (status, body["error"]["code"]) == (503, "engine_dead")
    with pytest.raises(EngineError, match="out of luck"):
        beside.__exit__(None, None, None)


def test_a_stop_finishes_what_it_can_and_cuts_the_rest() -> None:
    """Whoever runs longer than the grace is told so in the API's shape; nobody new is let in meanwhile."""
    with ExitStack() as stack:
        with Beside(make_service(local(), Offer(max_len=256)), grace_s=0.3) as beside:
            client = stack.enter_context(connect(beside))
            client.sendall(post({**LONG, "n": 4}))
            until(lambda: beside.service.desk.engine.stats.running == 4)
        answer = rest(client)
    assert b"503" in answer.split(b"\r\n")[0]
    assert b'"code":"stopping"' in answer
    assert idle(beside)


def test_a_stop_ends_half_requests_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Half a body and a reader that does not read end with the closing time; nothing is printed of them."""
    monkeypatch.setattr(server_module, "CLOSING_S", 0.3)
    with ExitStack() as stack:
        with Beside(make_service(local(), Offer(max_len=256)), grace_s=5) as beside:
            half, slow = stack.enter_context(connect(beside)), stack.enter_context(connect(beside, receive=4096))
            half.sendall(post(LONG)[:-5])
            slow.sendall(post({**LONG, "n": 8, "logprobs": 20, "stream": True}))
            until(lambda: beside.service.desk.engine.stats.running == 8 and beside.service.inbox.held > 0)
        assert rest(half) == b""
    assert idle(beside)
    assert capfd.readouterr() == ("", "")


def test_the_command_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    """It plans its memory aloud, listens on loopback, and on SIGTERM leaves a row with what it served."""
    command = [sys.executable, "-m", "experiments.cli", "serve", "variant=paged_batch", "port=0", "max_len=64"]
    command += [f"results={tmp_path}", "device.threads=1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = [process.stderr.readline() for _ in range(3)]
        try:
            assert said[0].startswith("kda: 6 layers, 8 state slots")
            assert said[1].startswith("mla: 2 layers, 8 pages")
            url = next(w for w in said[2].split() if w.startswith("http://127.0.0.1:"))
            with Client(url) as client:
                assert client.said(max_tokens=3)
        finally:
            process.send_signal(signal.SIGTERM)
        out, rest_said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert re.fullmatch(
        r"served: answers 1 \(1 length\), tokens 3, cut short 0; "
        r"first token p50 [\d.]+ s, p99 [\d.]+ s; whole answer p50 [\d.]+ s, p99 [\d.]+ s\n",
        out,
    )
    assert rest_said == ""
    (row,) = Ledger(tmp_path / "ledger").rows()
    assert (row["status"], row["experiment"], row["variant"]) == ("ok", "serve", "paged_batch")
    assert row["detail"]["served"]["tokens"] == {"prompt": 3, "completion": 3}
    assert row["detail"]["served"]["left"] == {"sequences": 0, "slots": 0, "pages": 0}
    assert "127.0.0.1" not in json.dumps(row)


def test_a_stop_before_it_serves_is_an_interruption(tmp_path: Path) -> None:
    """SIGTERM while it loads: exit code 130, one line, and a row that says so."""
    code = f"""
import os, signal, sys
from experiments import serve
serve.check_device = lambda device: os.kill(os.getpid(), signal.SIGTERM)
from experiments.cli import main
sys.exit(main(["serve", "variant=paged_batch", "port=0", "results={tmp_path}"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.startswith("neartie: error: interrupted")
    assert len(done.stderr.splitlines()) == 1
    (row,) = Ledger(tmp_path / "ledger").rows()
    assert (row["status"], row["error"]) == ("failed", "interrupted (KeyboardInterrupt: terminated)")


def test_what_cannot_be_served_is_said(tmp_path: Path) -> None:
    """A variant without pages, a length beyond the model's, a port that is taken: one line each, in their class."""
    with pytest.raises(UsageError, match="paged_batch"):
        make_service(LocalEngine(local().casts, load(["variant=f32"]).variant, name="f32"), Offer())
    with pytest.raises(UsageError, match="4096"):
        make_service(local(), Offer(max_len=5000))
    for words in (["golden=wide"], ["seed=3"], ["engine=transformers"], ["port=-1"], ["queue=0"], ["variant=f32"]):
        assert main(["serve", f"results={tmp_path}", *words]) == 2
    with server_module.bound("127.0.0.1", 0) as taken, pytest.raises(DeviceError, match="host= and port="):
        server_module.bound("127.0.0.1", taken.getsockname()[1])
