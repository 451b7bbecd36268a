"""An engine seen by its logprobs alone: a departure is named, rounding is not a defect, a hidden fault shows in f32."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from torch import Tensor

from harness.compose import load, named_variant
from harness.engines.llama_child import LlamaSettings
from harness.engines.llama_server import LlamaServerEngine
from harness.engines.local import LocalEngine, shared_casts
from harness.engines.protocol import Engine, Scored
from harness.gate import part_of, run_gate
from harness.gguf_write import write_gguf
from harness.golden import load_golden
from harness.verdict import RunClass, Verdict
from harness.verdict_outside import OutsideQuestion, judge_outside
from variants.axes import Variant
from variants.checkpoint import Checkpoint
from variants.recipe import resolve
from variants.weights import Casts

SHIPPED = "assets/kimi-linear-12m"
PART = part_of(load_golden("gate"), prompts=2, tokens=6)
FORCED = PART.tokens[0].tolist()
F32 = named_variant("f32")


def casts() -> Casts:
    return shared_casts(SHIPPED, None, "cpu")


def local(variant: Variant) -> LocalEngine:
    return LocalEngine(casts(), variant, name="candidate")


def forced(engine: Engine) -> Scored:
    return engine.score(PART.prompts, FORCED, top_k=64)


@cache
def judged(name: str, *words: str) -> Verdict:
    """The verdict on a variant of ours, of which nothing is shown but forced logprobs, taken to compute as `name`."""
    engine = local(load(["variant=f32", *words]).variant)
    return judge(engine, name)


def judge(engine: Engine, declared: str, *, members: int = 3, **more: object) -> Verdict:
    question = OutsideQuestion(
        golden=PART,
        casts=casts(),
        declared=resolve(named_variant(declared), casts().checkpoint.config),
        reference=resolve(named_variant("bf16_engine"), casts().checkpoint.config),
        members=members,
        scored=forced(engine),
        **more,  # type: ignore[arg-type]
    )
    return judge_outside(question, run_gate(PART, engine))


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("variant.kda.l2_eps=config", "explained by L2 norm of q and k with eps 1e-05"),
        ("variant.norm.kv_eps=eps_1e6", "explained by kv_a_norm eps 1e-06"),
        pytest.param(
            "variant.params.a_log=bf16", "explained by A_log rounded to bf16 when loaded", marks=pytest.mark.slow
        ),
    ],
)
def test_a_departure_is_named_from_the_outside(word: str, said: str) -> None:
    """Each changes the function by less than any token shows; the oracle with that meaning takes the error away."""
    found = judged("f32", word)
    assert found.run_class is RunClass.defect
    assert said in found.reason


def test_what_is_declared_is_rounding() -> None:
    """The same arithmetic, declared, is within its members, and every divergence has its sigma."""
    found = judged("llama_cpp", "variant.kda.l2_eps=config")
    assert found.run_class in (RunClass.rounding, RunClass.passed)
    assert float(str(found.figures["logprob_excess"])) < 0.3
    assert not found.findings


def test_a_server_s_own_softmax_is_no_error() -> None:
    """A constant on all logprobs of a place changes no choice and no verdict."""
    engine = local(F32)
    scored = forced(engine)
    moved = replace(scored, top_logprobs=scored.top_logprobs + 1e-3)
    question = OutsideQuestion(
        golden=PART,
        casts=casts(),
        declared=resolve(F32, casts().checkpoint.config),
        reference=resolve(named_variant("bf16_engine"), casts().checkpoint.config),
        members=3,
        scored=moved,
    )
    assert not judge_outside(question, run_gate(PART, engine)).findings


class Patched(LocalEngine):
    """A variant whose dt_bias of layer 1 is off by one part in 14000."""

    def build(self, **more: object):  # type: ignore[override]
        return super().build(**more, patch=off)  # type: ignore[arg-type]


def off(name: str, x: Tensor) -> Tensor:
    return x * (1 + 7e-5) if name == "model.layers.1.self_attn.dt_bias" else x


def test_a_fault_under_the_rounding_shows_in_the_finer_format() -> None:
    """With an f16 cache the fault is within the envelope; the engine's own code in float32 has a floor."""
    coarse, fine = (Patched(casts(), named_variant(n), name=n) for n in ("llama_cpp_f16_kv", "llama_cpp"))
    found = judge(coarse, "llama_cpp_f16_kv", members=6, finer={"f32": forced(fine)})
    assert found.run_class is RunClass.defect
    assert found.reason.startswith("logprobs in f32")
    assert found.figures["f32_logprob_excess"] > 1.0 > found.figures["logprob_excess"]  # type: ignore[operator]


def wrong(checkpoint: Checkpoint) -> Iterator[tuple[str, Checkpoint]]:
    """What a converter may get wrong: whose decay is whose, the norms' eps, the experts' scale."""
    a_log = "model.layers.4.self_attn.A_log"
    swapped = {**checkpoint.tensors, a_log: checkpoint.tensors[a_log].roll(1, dims=2)}
    yield "ssm_a", replace(checkpoint, tensors=swapped)
    yield "eps", replace(checkpoint, config=replace(checkpoint.config, rms_norm_eps=1e-6))
    yield "scale", replace(checkpoint, config=replace(checkpoint.config, routed_scaling_factor=2.5))


@pytest.mark.parametrize("part", ["ssm_a", *(pytest.param(p, marks=pytest.mark.slow) for p in ("eps", "scale"))])
def test_a_wrong_gguf_is_a_defect(part: str, tmp_path: Path) -> None:
    """llama.cpp on a file with one wrong number: a defect of the run, where its values cannot be looked at."""
    pytest.importorskip("xllamacpp", reason="pip install 'neartie[llama]'")
    pytest.importorskip("gguf", reason="pip install 'neartie[llama]'")
    write_gguf(dict(wrong(casts().checkpoint))[part], tmp_path / "m.gguf")
    engine = LlamaServerEngine.of_file(LlamaSettings(gguf=str(tmp_path / "m.gguf"), threads=1, length=256))
    found = judge(engine, "llama_cpp")
    engine.stop()
    assert found.run_class is RunClass.defect
    assert found.figures["logprob_excess"] > 1.5  # type: ignore[operator]


def test_llama_cpp_is_rounding() -> None:
    """The right file, as declared: within e^0.3 of its recipe's members, and no defect."""
    pytest.importorskip("xllamacpp", reason="pip install 'neartie[llama]'")
    pytest.importorskip("gguf", reason="pip install 'neartie[llama]'")
    engine = LlamaServerEngine.of_checkpoint(SHIPPED, LlamaSettings(gguf="", threads=1, length=256))
    found = judge(engine, "llama_cpp")
    engine.stop()
    assert found.run_class in (RunClass.rounding, RunClass.passed)
    assert float(str(found.figures["logprob_excess"])) < 0.3
