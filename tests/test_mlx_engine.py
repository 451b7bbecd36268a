"""MLX in this process and its own server, started here: float32 tokens and logits of the others."""

from pathlib import Path

import numpy as np
import pytest

from harness.compose import load, named_variant
from harness.engines import make_engine
from harness.engines.local import LocalEngine, shared_casts
from harness.engines.mlx_engine import MlxEngine
from harness.gate import part_of, run_gate
from harness.golden import load_golden
from variants.errors import InputError, UsageError

pytest.importorskip("mlx.core", reason="pip install 'neartie[mlx]'")
pytest.importorskip("mlx_lm", reason="pip install 'neartie[mlx]'")

SHIPPED = "assets/kimi-linear-12m"
GATE = load_golden("gate")


@pytest.fixture(scope="module")
def engine() -> MlxEngine:
    return MlxEngine.load(SHIPPED)


def test_every_token_and_logit_is_that_of_our_float32(engine: MlxEngine) -> None:
    """Half the gate's tokens agree with `f32` without exception; forced logits within 4e-5 nat, its rounding."""
    ours = LocalEngine(shared_casts(SHIPPED, None, "cpu"), named_variant("f32"), name="f32")
    prompts = GATE.prompts[:4]
    assert np.array_equal(engine.generate(prompts, 16).tokens, ours.generate(prompts, 16).tokens)
    forced = GATE.tokens[0][:2].tolist()
    found, right = (e.score(prompts[:2], forced, full_logits=True) for e in (engine, ours))
    assert found.forced == "decode"
    assert found.logits is not None
    assert right.logits is not None
    assert np.abs(found.logits - right.logits).max() < 4e-5 * np.abs(right.logits).max()


def test_float32_of_four_engines_is_one(engine: MlxEngine) -> None:
    """The goldens of transformers, llama.cpp and MLX hold the same 128 tokens, and our `f32` meets each one's bar."""
    ours = LocalEngine(shared_casts(SHIPPED, None, "cpu"), named_variant("f32"), name="f32")
    goldens = [load_golden(f"gate_{name}") for name in ("transformers", "llama_cpp", "mlx")]
    assert all(np.array_equal(g.tokens[k], goldens[0].tokens[0]) for g in goldens for k in range(3))
    assert all(run_gate(g, ours, require="strict").met for g in goldens)
    assert run_gate(part_of(goldens[2], prompts=3), engine, require="strict").met


@pytest.mark.parametrize("many", [1, 4])
def test_its_server_gives_the_same_tokens(engine: MlxEngine, many: int, tmp_path: Path) -> None:
    """Prompts as text, one after the other and four at a time: the tokens of the library in this process."""
    words = ["engine=mlx", "engine.via=http", f"engine.concurrency={many}", f"results={tmp_path}"]
    server = make_engine(load(words))
    found = server.generate(GATE.prompts[:4], 16)
    assert np.array_equal(found.tokens, engine.generate(GATE.prompts[:4], 16).tokens)
    assert server.info.name == "mlx_server"
    assert server.info.model_sha256 == GATE.provenance["model_sha256"]
    server.stop()  # type: ignore[attr-defined]


def test_what_it_cannot_do_is_refused(engine: MlxEngine) -> None:
    """Another precision, another checkpoint, an id outside the vocabulary and requests together in one process."""
    assert engine.at_precision("f32") is engine
    with pytest.raises(UsageError, match="expected f32"):
        engine.at_precision("bf16")
    with pytest.raises(InputError, match="SHA-256"):
        MlxEngine.load(SHIPPED, expect_sha256="0" * 64)
    with pytest.raises(InputError, match=r"outside 0\.\.4095"):
        engine.generate([[4096]], 1)
    with pytest.raises(UsageError, match="one after the other"):
        load(["engine=mlx", "engine.concurrency=2"])
