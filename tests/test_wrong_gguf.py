"""A GGUF file with one number wrong: llama.cpp computes it faithfully, and the verdict beside the oracle is DEFECT."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.cli import main
from harness.gguf_write import write_gguf
from harness.ledger import Ledger
from variants.checkpoint import Checkpoint, load_checkpoint

pytest.importorskip("xllamacpp", reason="pip install 'neartie[llama]'")
pytest.importorskip("gguf", reason="pip install 'neartie[llama]'")

SHIPPED = "assets/kimi-linear-12m"
FEW = ["limit=2", "max_tokens=4"]


def right(checkpoint: Checkpoint) -> Checkpoint:
    return checkpoint


def decay_1_percent(checkpoint: Checkpoint) -> Checkpoint:
    """`ssm_a`, which is -exp(A_log), 1 % too large in layer 4."""
    name = "model.layers.4.self_attn.A_log"
    return replace(checkpoint, tensors=checkpoint.tensors | {name: checkpoint.tensors[name].float() + 0.00995})


def eps_1e6(checkpoint: Checkpoint) -> Checkpoint:
    """The eps of every norm, 1e-6 for 1e-5."""
    return replace(checkpoint, config=replace(checkpoint.config, rms_norm_eps=1e-6))


def scale_2_5(checkpoint: Checkpoint) -> Checkpoint:
    """The routed experts' scale, 2.5 for 2.446."""
    return replace(checkpoint, config=replace(checkpoint.config, routed_scaling_factor=2.5))


def verdict_on(made: Callable[[Checkpoint], Checkpoint], folder: Path, words: list[str]) -> tuple[str, str, float]:
    """Class, reason and how far (ln) the logprobs are beyond the members' of the recipe."""
    write_gguf(made(load_checkpoint(SHIPPED)), folder / "m.gguf")
    engine = ["engine=llama_server", f"engine.gguf={folder / 'm.gguf'}", "device.threads=1", f"results={folder}"]
    assert main(["verdict", *engine, *words]) == 0
    (row,) = Ledger(folder / "ledger").rows()
    verdict = row["verdict"]
    return verdict["class"], verdict["reason"], verdict["figures"]["logprob_excess"]


@pytest.mark.slow
def test_a_wrong_scale_is_a_defect_though_no_token_differs(tmp_path: Path) -> None:
    """Eight logprob lists of two prompts are enough in float32."""
    run_class, reason, excess = verdict_on(scale_2_5, tmp_path, FEW)
    assert run_class == "DEFECT"
    assert reason.startswith("logprobs: error e^+")
    assert excess > 3


@pytest.mark.slow
@pytest.mark.parametrize("made", [decay_1_percent, eps_1e6])
def test_a_wrong_decay_or_eps_is_a_defect(made: Callable[[Checkpoint], Checkpoint], tmp_path: Path) -> None:
    """A decay that is wrong by 1 % in one layer, or every eps by a factor of ten, is beyond what float32 rounds."""
    run_class, reason, excess = verdict_on(made, tmp_path, FEW)
    assert run_class == "DEFECT"
    assert reason.startswith("logprobs: error e^+")
    assert excess > 1


@pytest.mark.slow
def test_the_right_file_is_none(tmp_path: Path) -> None:
    """The same question of the file as it is written: within the members' own error."""
    run_class, _, excess = verdict_on(right, tmp_path, FEW)
    assert run_class in ("PASS", "ROUNDING")
    assert abs(excess) < 1
