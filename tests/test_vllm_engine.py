"""The vLLM library as an engine, over a stand-in for it with the parts of its public API that are used."""

import os
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from experiments.cli import main
from harness.compose import load
from harness.engines import make_engine, vllm_engine
from harness.engines.protocol import Engine
from harness.engines.vllm_engine import SWITCHES, VllmEngine
from harness.golden import Golden, load_golden
from harness.pregate import check_answers
from harness.score import score
from variants.errors import DeviceError, EngineError, UsageError

Captured = pytest.CaptureFixture[str]


@dataclass
class SamplingParams:
    """The real one refuses what it does not know; so does a dataclass."""

    temperature: float = 1.0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    ignore_eos: bool = False
    stop_token_ids: list[int] = field(default_factory=list)


class LLM:
    """Recites the gate golden; remembers how it was made and asked."""

    made: dict[str, Any]
    batches: list[int]

    def __init__(self, model: str, **options: Any) -> None:
        LLM.made, LLM.batches = options, []
        self.golden = load_golden("gate")

    def generate(self, prompts: list[dict[str, list[int]]], params: SamplingParams, *, use_tqdm: bool = True) -> list:
        assert (params.temperature, params.detokenize, use_tqdm) == (0.0, False, False)
        LLM.batches.append(len(prompts))
        return [self._one(tuple(p["prompt_token_ids"]), params) for p in prompts]

    def _one(self, ids: tuple[int, ...], params: SamplingParams) -> SimpleNamespace:
        g = self.golden
        assert g.top_ids is not None
        assert g.top_logprobs is not None
        n = next(i for i, p in enumerate(g.prompts) if ids[: len(p)] == p)
        given = len(ids) - len(g.prompts[n])

        def row(t: int, k: int) -> dict[int, SimpleNamespace]:
            pairs = zip(g.top_ids[n, t, :k].tolist(), g.top_logprobs[n, t, :k].tolist(), strict=True)  # type: ignore[index]
            return {i: SimpleNamespace(logprob=v, rank=r + 1) for r, (i, v) in enumerate(pairs)}

        tokens = g.tokens[0, n, given : given + (params.max_tokens or 0)].tolist()
        lists = [row(given + t, params.logprobs) for t in range(len(tokens))] if params.logprobs else None
        first = [None, *[{1: SimpleNamespace(logprob=-1.0)}] * (len(g.prompts[n]) - 1)]
        forced = [*first, *[row(t, params.prompt_logprobs) for t in range(given)]] if params.prompt_logprobs else None
        said = SimpleNamespace(token_ids=tokens, logprobs=lists, finish_reason="length")
        return SimpleNamespace(outputs=[said], prompt_token_ids=list(ids), prompt_logprobs=forced)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module named vllm, with the switches of the environment put back afterwards."""
    fake = ModuleType("vllm")
    fake.LLM, fake.SamplingParams, fake.__version__ = LLM, SamplingParams, "0.26.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setattr(vllm_engine, "COMPILED", [])
    for name, value in SWITCHES.items():
        monkeypatch.setenv(name, value)
    vllm_engine._loaded.cache_clear()
    return fake


@pytest.fixture
def golden() -> Golden:
    return load_golden("gate")


def test_it_gates_with_the_settings_that_made_the_golden(library: ModuleType, golden: Golden) -> None:
    """Eager, no prefix cache, no tokenizer, one request at a time: 128/128 with ids echoed and gaps known."""
    engine = make_engine(load(["engine=vllm", "engine.backend=FLASH_ATTN_MLA"]))
    assert isinstance(engine, Engine)
    generation = engine.generate(golden.prompts, 16)
    check_answers(golden, engine.info, generation, stop_at_eos=False)
    assert score(golden, generation).matched == 128
    assert LLM.batches == [1] * 8
    assert LLM.made["attention_backend"] == "FLASH_ATTN_MLA"
    assert LLM.made["dtype"] == "bfloat16"
    assert {LLM.made[k] for k in ("enforce_eager", "skip_tokenizer_init")} == {True}
    assert {LLM.made[k] for k in ("enable_prefix_caching", "async_scheduling")} == {False}
    assert engine.info.model_sha256 == golden.provenance["model_sha256"]
    assert not np.isnan(generation.gaps).any()
    assert generation.finish == ("length",) * 8
    assert generation.notes == ()


def test_a_batch_is_one_call(library: ModuleType, golden: Golden) -> None:
    """engine.batch=0 gives it all prompts at once, and says so; the batched arm is offered for a capture."""
    engine = make_engine(load(["engine=vllm", "engine.batch=0"]))
    assert isinstance(engine, VllmEngine)
    engine.generate(golden.prompts, 2)
    assert LLM.batches == [8]
    make_engine(load(["engine=vllm"])).generate(golden.prompts, 2)
    assert LLM.batches == [8] + [1] * 8, "another batch size asks for no other load"
    assert engine.provenance["batch"] == "all requests together"
    assert engine.arms() == {}
    assert set(make_engine(load(["engine=vllm"])).arms()) == {"all together"}  # type: ignore[attr-defined]


def test_scores_are_a_prompts_logprobs(library: ModuleType, golden: Golden) -> None:
    """Teacher-forced logprobs are those of the prompt, of one pass, and named so."""
    scored = make_engine(load(["engine=vllm"])).score(golden.prompts, golden.tokens[0, :, :5].tolist(), top_k=3)
    assert golden.top_logprobs is not None
    np.testing.assert_array_equal(scored.token_logprobs, golden.top_logprobs[:, :5, 0])
    assert scored.forced == "single_pass"


def test_eos_is_named_where_it_stops(library: ModuleType, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a tokenizer the library knows no EOS: it is given the checkpoint's."""
    seen: list[SamplingParams] = []
    real = LLM.generate
    monkeypatch.setattr(LLM, "generate", lambda s, p, q, **k: seen.append(q) or real(s, p, q, **k))
    make_engine(load(["engine=vllm"])).generate(golden.prompts[:1], 2, stop_at_eos=True)
    assert (seen[0].ignore_eos, seen[0].stop_token_ids) == (False, [2])


def test_a_failure_inside_is_one_line(library: ModuleType, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the library raises becomes an engine error; what keeps it from starting, a device error."""

    def out_of_memory(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA out of memory\nmore")

    engine = make_engine(load(["engine=vllm"]))
    monkeypatch.setattr(LLM, "generate", out_of_memory)
    with pytest.raises(EngineError, match=r"vllm failed: CUDA out of memory$"):
        engine.generate(golden.prompts, 2)
    monkeypatch.setattr(LLM, "__init__", out_of_memory)
    vllm_engine._loaded.cache_clear()
    with pytest.raises(DeviceError, match=r"vllm could not start: CUDA out of memory$"):
        make_engine(load(["engine=vllm"]))


@pytest.mark.skipif("vllm" in sys.modules, reason="the library is here")
def test_without_the_library_one_line_says_what_to_do(capsys: Captured, tmp_path: Any) -> None:
    """Exit 4, what to install, and the way round it."""
    assert main(["gate", "engine=vllm", f"results={tmp_path}"]) == 4
    error = capsys.readouterr().err
    assert "vllm is not installed" in error
    assert "engine=openai engine.dialect=vllm" in error
    assert error.count("\n") == 1


def test_compile_and_graph_are_one_setting_each(library: ModuleType) -> None:
    """Each alone, or both: the label says which, the compiler is off unless asked for, the rest stays."""
    made, labels = [], []
    for how in ([], ["compile"], ["graph"], ["compile", "graph"]):
        vllm_engine._loaded.cache_clear()
        vllm_engine.COMPILED.clear()
        config = load(["engine=vllm", *(f"engine.{name}=true" for name in how)])
        make_engine(config)
        made.append(LLM.made)
        labels.append(config.label)
        assert (os.environ[vllm_engine.DYNAMO] == "0") is ("compile" in how)
        os.environ[vllm_engine.DYNAMO] = "1"
    changed = [{k: v for k, v in m.items() if made[0].get(k) != v} for m in made]
    assert changed[0] == {}
    assert [c["compilation_config"] for c in changed[1:]] == [
        {"mode": 3, "cudagraph_mode": "NONE"},
        {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        {"mode": 3, "cudagraph_mode": "FULL_DECODE_ONLY"},
    ]
    assert all(set(c) == {"enforce_eager", "compilation_config"} and not c["enforce_eager"] for c in changed[1:])
    assert len(set(labels)) == 4


@pytest.mark.parametrize("first", [False, True])
def test_a_process_has_one_way_of_compiling(library: ModuleType, first: bool) -> None:
    """Which functions are compiled is settled when the library is imported: a second job would not be what it says."""
    ways = [f"engine.compile={str(way).lower()}" for way in (first, not first)]
    make_engine(load(["engine=vllm", ways[0]]))
    make_engine(load(["engine=vllm", ways[0], "engine.graph=true"]))
    with pytest.raises(UsageError, match=f"^{ways[1]}: this process has imported vLLM for {ways[0]}"):
        make_engine(load(["engine=vllm", ways[1]]))
