"""llama.cpp's own server, started here: the same tokens by every way of asking, and clear lines where it fails."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.cli import main
from harness.compose import load, named_variant
from harness.engines import make_engine
from harness.engines.http_server import JsonServer
from harness.engines.llama_answers import read
from harness.engines.llama_child import LlamaSettings
from harness.engines.llama_server import LlamaOrigin, LlamaServerEngine
from harness.engines.local import LocalEngine, shared_casts
from harness.engines.protocol import Generation
from harness.engines.server_process import ServerProcess
from harness.gate import run_gate
from harness.golden import load_golden
from harness.ledger import Ledger
from variants.errors import EngineError, InputError, UsageError

pytest.importorskip("xllamacpp", reason="pip install 'neartie[llama]'")
pytest.importorskip("gguf", reason="pip install 'neartie[llama]'")

SHIPPED = "assets/kimi-linear-12m"
GATE = load_golden("gate")
FORCED = GATE.tokens[0].tolist()


@pytest.fixture(scope="module")
def engine() -> Iterator[LlamaServerEngine]:
    made = LlamaServerEngine.of_checkpoint(SHIPPED, LlamaSettings(gguf="", threads=1))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def tokens(engine: LlamaServerEngine) -> Generation:
    return engine.generate(GATE.prompts, 16)


def local(name: str) -> LocalEngine:
    return LocalEngine(shared_casts(SHIPPED, None, "cpu"), named_variant(name), name=name)


def test_every_token_is_that_of_our_float32(tokens: Generation) -> None:
    """128 of 128 agree with `f32`; what came back says greedy settings and the very ids that were asked."""
    ours = local("f32").generate(GATE.prompts, 16)
    assert np.array_equal(tokens.tokens, ours.tokens)
    assert tokens.finite.all()
    assert tokens.prompt_ids == [tuple(p) for p in GATE.prompts]
    assert tokens.finish == ("length",) * 8
    assert np.allclose(tokens.gaps, ours.gaps, atol=1e-3)


def test_the_gate_scores_it_as_any_engine(engine: LlamaServerEngine) -> None:
    """109 of 128 against vLLM's bf16, as every float32 engine; its steps are timed."""
    result = run_gate(GATE, engine)
    assert result.agreement.matched == 109
    assert run_gate(load_golden("gate_llama_cpp"), engine, require="strict").met
    assert result.timing.decode_tok_s.steps == 8 * 15
    assert engine.info.model_sha256 == GATE.provenance["model_sha256"]


def test_forced_tokens_go_through_its_decode_path(engine: LlamaServerEngine) -> None:
    """Whole rows of logprobs are those of float64 within float32's rounding, once its eps of the L2 norm is declared.

    It puts rms_norm_eps under the root of the L2 norm: 30 times its own rounding away from the 1e-6 of the others.
    """
    prompts, forced = GATE.prompts[:2], FORCED[:2]
    found = engine.score(prompts, forced, top_k=2, full_logits=True)
    assert found.forced == "decode"
    assert found.logits is not None
    distance = {}
    for eps in ("config", "eps_1e6"):
        variant = load(["variant=oracle", f"variant.kda.l2_eps={eps}"]).variant
        right = LocalEngine(shared_casts(SHIPPED, None, "cpu"), variant, name=eps)
        logits = right.score(prompts, forced, full_logits=True).logits
        assert logits is not None
        shifted = found.logits - logits
        distance[eps] = float(np.sqrt(np.mean((shifted - shifted.mean(-1, keepdims=True)) ** 2)))
    assert distance["config"] < 4e-6
    assert distance["eps_1e6"] > 2e-5


@pytest.mark.parametrize(
    "words",
    [
        ["engine.concurrency=4"],
        ["engine.api=openai"],
        ["engine.api=openai", "engine.concurrency=4"],
        ["engine.api=openai", "engine.via=process"],
    ],
)
def test_every_way_of_asking_gives_the_same_tokens(words: list[str], tokens: Generation, tmp_path: Path) -> None:
    """Four at a time, over /v1/completions, and inside this process."""
    made = make_engine(load(["engine=llama_server", *words, "device.threads=1", f"results={tmp_path}"]))
    assert np.array_equal(made.generate(GATE.prompts, 16).tokens, tokens.tokens)
    assert made.info.name == "llama_server"
    assert made.info.model_sha256 == GATE.provenance["model_sha256"]


def test_a_given_server_is_asked_and_not_stopped(engine: LlamaServerEngine, tokens: Generation) -> None:
    """Only its address is known: the same tokens come, and the server goes on."""
    assert engine.process is not None
    guest = LlamaServerEngine(JsonServer(engine.process.url, retries=0), LlamaOrigin())
    assert np.array_equal(guest.generate(GATE.prompts[:2], 16).tokens, tokens.tokens[:2])
    assert guest.info.model_sha256 is None
    guest.stop()
    assert engine.process.alive


def test_cache_and_attention_are_settings_that_act(engine: LlamaServerEngine) -> None:
    """A cache of f16 and flash attention each move the logprobs, by less than a hundredth of a nat."""
    prompts, forced = GATE.prompts[:2], FORCED[:2]
    exact = engine.score(prompts, forced).token_logprobs
    seen = []
    for settings in (LlamaSettings(gguf="", threads=1, kv="f16"), LlamaSettings(gguf="", threads=1, flash=True)):
        other = LlamaServerEngine.of_checkpoint(SHIPPED, settings)
        seen.append(other.score(prompts, forced).token_logprobs)
        assert 1e-5 < np.nanmax(np.abs(seen[-1] - exact)) < 1e-2
        other.stop()
    assert not np.array_equal(*seen)


def test_a_server_that_is_killed_in_the_middle_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real server, killed before its third answer: exit 5, one line, a failed row, and two prompts kept on disk."""
    made = LlamaServerEngine.of_checkpoint(SHIPPED, LlamaSettings(gguf="", threads=1))
    assert made.process is not None
    asked, real = [], JsonServer.post

    def post(self: JsonServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
        asked.append(path)
        if len(asked) == 3:
            os.kill(made.process.pid, signal.SIGKILL)  # pyright: ignore[reportOptionalMemberAccess]
        return real(self, path, body)

    monkeypatch.setattr(JsonServer, "post", post)
    words = ["engine=openai", f"engine.url={made.process.url}", "engine.dialect=llama", "engine.retries=0"]
    assert main(["gate", *words, "max_tokens=2", "engine.timeout_s=30", f"results={tmp_path}"]) == 5
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "2 of 8 prompts are finished and kept" in error
    (row,) = Ledger(tmp_path / "ledger").rows()
    assert row["status"] == "failed"
    (kept,) = (tmp_path / "unfinished").glob("*.jsonl")
    assert len(kept.read_text().splitlines()) >= 2
    assert not made.process.alive
    made.stop()


def test_what_a_server_prints_does_not_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that prints before and after its address, more than any pipe holds, is found and goes on."""
    code = (
        "import http.server, sys\nfrom harness.engines.server_process import announce, end_with_owner\n"
        "out = end_with_owner()\nprint('loading', flush=True)\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        print('x' * 300_000, flush=True)\n"
        "        self.send_response(200)\n        self.end_headers()\n"
        "s = http.server.HTTPServer(('127.0.0.1', 0), H)\n"
        "announce(out, f'http://127.0.0.1:{s.server_address[1]}')\ns.serve_forever()\n"
    )
    (tmp_path / "talkative.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    made = ServerProcess("talkative", {}, ready_s=60)
    assert made.alive
    made.stop()
    assert not made.alive


def test_a_server_that_dies_is_one_line() -> None:
    """The engine says that its server has ended, and a file that is none says so before anything runs."""
    made = LlamaServerEngine.of_checkpoint(SHIPPED, LlamaSettings(gguf="", threads=1), timeout_s=5)
    assert made.process is not None
    made.process.stop()
    with pytest.raises(EngineError, match="the server has ended in the middle of a run"):
        made.generate(GATE.prompts[:1], 2)
    with pytest.raises(InputError, match="no such file"):
        LlamaServerEngine.of_file(LlamaSettings(gguf="/nowhere.gguf"))
    with pytest.raises(EngineError, match=r"llama\.cpp could not start"):
        LlamaServerEngine.of_file(LlamaSettings(gguf=f"{SHIPPED}/config.json"))


def test_the_server_ends_with_its_owner() -> None:
    """An owner that is killed leaves no server behind."""
    code = (
        "import os, time; from harness.engines.server_process import ServerProcess; "
        "from harness.engines.llama_child import LlamaSettings; from harness.gguf_write import write_gguf; "
        "from variants.checkpoint import load_checkpoint; import sys; "
        f"write_gguf(load_checkpoint('{SHIPPED}'), sys.argv[1]); "
        "s = ServerProcess('harness.engines.llama_child', LlamaSettings(gguf=sys.argv[1], threads=1).plain()); "
        "print(s.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-c", code, f"{folder}/m.gguf"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
        stat = Path(f"/proc/{int(done.stdout)}/stat")
        until = time.monotonic() + 10
        while stat.exists() and stat.read_text().split(")")[1].split()[0] != "Z":
            assert time.monotonic() < until
            time.sleep(0.05)


ANSWER = {
    "tokens": [7, 8],
    "tokens_evaluated": 3,
    "prompt": "[1][5][6]",
    "stop_type": "limit",
    "timings": {"prompt_n": 3, "prompt_ms": 4.0, "predicted_ms": 2.0},
    "generation_settings": {"temperature": 0.0},
    "completion_probabilities": [
        {"top_logprobs": [{"id": 9, "logprob": -2.0}, {"id": 7, "logprob": -0.5}]},
        {"top_logprobs": [{"id": 8, "logprob": -0.1}, {"id": 2, "logprob": None}]},
    ],
}


def test_an_answer_is_read_or_refused() -> None:
    """Lists are ranked and a null is no number; another count of ids, held-back tokens and no answer are told apart."""
    found = read(ANSWER, [1, 5, 6], "prompt 0")
    assert found.tokens == (7, 8)
    assert found.ranked[0] == ((7, -0.5), (9, -2.0))
    assert np.isnan(found.ranked[1][0][1])
    assert (found.prompt_ids, found.prefill_s, found.step_s) == ((1, 5, 6), 0.004, 0.002)
    with pytest.raises(InputError, match="it adds a BOS of its own"):
        read({**ANSWER, "tokens_evaluated": 4}, [1, 5, 6], "prompt 0")
    with pytest.raises(EngineError, match=r"logprobs of 1 of 2 tokens.*vocabulary=ids"):
        read({**ANSWER, "completion_probabilities": ANSWER["completion_probabilities"][:1]}, [1, 5, 6], "prompt 0")
    with pytest.raises(EngineError, match="lacks 'tokens'"):
        read({"content": "x"}, [1, 5, 6], "prompt 0")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["engine.via=process"], "engine.api is openai alone"),
        (["engine.url=http://h", "engine.gguf=f"], "a server at engine.url has its own file"),
        (["engine.url=http://h", "engine.kv=f16"], "engine.url has what it has"),
        (["engine.gguf=f", "engine.dtype=bf16"], "engine.gguf has what it has"),
        (["engine.concurrency=2", "engine.via=process", "engine.api=openai"], "one after the other"),
        (["variant=f32"], "has no effect with engine=llama_server"),
    ],
)
def test_settings_without_effect_are_refused(words: list[str], message: str) -> None:
    """Nothing is said that a server would not hear."""
    with pytest.raises(UsageError, match=message):
        load(["engine=llama_server", *words])
