"""Engines against each other: every pair once in each direction, with what the tokens say of it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from mock_server import serving

from experiments.cli import main
from harness.cross import as_generation, cross
from harness.engines.protocol import EngineInfo
from harness.golden import Golden, load_golden
from harness.offers import instruments, offers

Captured = pytest.CaptureFixture[str]


def test_every_pair_is_held_against_each_other() -> None:
    """Three references by two candidates, none against itself; one changed token is one in both directions."""
    golden = load_golden("gate")
    tokens = golden.tokens[:1].copy()
    assert golden.top_ids is not None
    tokens[0, 3, 5] = golden.top_ids[3, 5, 1]
    other = replace(golden, tokens=tokens)
    once = replace(golden, tokens=golden.tokens[:1])
    cells = {(c.reference, c.candidate): c for c in cross(golden, {"a": once, "b": other})}
    assert set(cells) == {("golden (vllm)", "a"), ("golden (vllm)", "b"), ("a", "b"), ("b", "a")}
    assert str(cells["golden (vllm)", "a"]) == "128 PASS"
    assert {cells[p].matched for p in (("golden (vllm)", "b"), ("a", "b"), ("b", "a"))} == {127}
    assert golden.top_logprobs is not None
    gap = float(golden.top_logprobs[3, 5, 0] - golden.top_logprobs[3, 5, 1])
    assert cells["a", "b"].max_margin_nats == pytest.approx(gap)
    assert as_generation(golden).gaps[3, 5] == pytest.approx(gap)


def test_one_command_makes_the_table(tmp_path: Path, capsys: Captured) -> None:
    """A variant and a server, from the command line; what is named twice or not at all is refused."""
    golden: Golden = load_golden("gate")
    with serving(golden) as server:
        served = f"openai engine.url={server.url} engine.dialect=vllm"
        words = ["cross", f"engines=[f32,'{served}']", "limit=2", "max_tokens=4", f"results={tmp_path}"]
        assert main([*words, "--json"]) == 0
        (cells,) = json.loads(capsys.readouterr().out).values()
        assert {(c["candidate"], c["matched"]) for c in cells if c["reference"] == "golden (vllm)"} >= {
            ("openai_server", 8)
        }
        assert main(words) == 0
        assert "golden (vllm)" in capsys.readouterr().out
    assert main(["cross", f"results={tmp_path}"]) == 2
    for twice in ("[f32,f32]", "[f64_islands,'bf16_residual variant.stream=f32']"):
        assert main(["cross", f"engines={twice}", "limit=1", "max_tokens=1", f"results={tmp_path}"]) == 2
        assert "name one engine twice" in capsys.readouterr().err
    assert main(["cross", "engines=[f32]", "golden=wide", f"results={tmp_path}"]) == 2
    assert "golden=wide has no effect; name goldens with goldens=[wide]" in capsys.readouterr().err


def test_a_doctor_says_what_a_server_offers(tmp_path: Path, capsys: Captured) -> None:
    """One screen: ids, echo, logprobs, and that no instrument looks inside; a server of text alone exits 5."""
    golden = load_golden("gate")
    with serving(golden) as server:
        words = ["doctor", "engine=openai", f"engine.url={server.url}", "engine.dialect=vllm", "engine.retries=0"]
        assert main(words) == 0
        out = capsys.readouterr().out
        assert len(out.splitlines()) < 26
        assert "logprobs              20 a token" in out
        assert "local replay       no, needs values inside" in out
        assert "envelope           yes, the golden's checkpoint is here" in out
        server.misdeed = lambda h, b: bool(h.answer({"choices": [{"text": "a", "finish_reason": "length"}]})) or True
        assert main(words) == 5
    assert "text alone: tokens cannot be compared" in capsys.readouterr().out


def test_what_an_engine_cannot_do_is_said() -> None:
    """Tokens alone allow the gate and nothing else; taps and precisions without the checkpoint allow no more."""
    bare = EngineInfo(name="e", version="1", device="d", dtype="f", can_score=False)
    assert {name for name, said in instruments(bare, oracle=False) if said.startswith("yes")} == {"gate"}
    inside = replace(bare, taps=True, precisions=("a", "b"), top_logprobs=None)
    assert all(said.startswith("yes") for _, said in instruments(inside, oracle=True))
    assert {name for name, said in instruments(inside, oracle=False) if said.startswith("yes")} == {
        "gate",
        "margins and noise",
    }
    assert dict(offers(bare))["sampling"] == "unknown"
