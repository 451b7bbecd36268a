"""Two steps of training with the library: the loss falls, experts are balanced, and what is saved is a checkpoint."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.cli import main
from harness.training import BIAS_STEP, Schedule, batches, new_model, train
from tests.tiny import ODD
from variants.checkpoint import load_checkpoint
from variants.errors import InputError
from variants.model_config import ModelConfig

pytest.importorskip("transformers", reason="pip install 'neartie[transformers]'")

SHIPPED = Path("assets/kimi-linear-12m")


def geometry() -> ModelConfig:
    return replace(ODD, kda_v_head_dim=ODD.kda_head_dim, hidden_size=24, moe_intermediate_size=8)


def test_a_step_lowers_the_loss_of_its_own_rows() -> None:
    """The same rows again cost less after each step, and every router's bias has moved by one step towards balance."""
    schedule = Schedule(steps=4, batch=2, length=17, rate=1e-2, warmup=1)
    model = new_model(geometry(), seed=1, device="cpu")
    tokens = torch.randint(3, 67, (200,), generator=torch.Generator().manual_seed(2))
    row = next(batches(tokens, schedule, bos=1, seed=0))
    assert row.shape == (2, 17)
    assert (row[:, 0] == 1).all()
    losses = [p.loss for p in train(model, iter([row] * 4), schedule)]
    assert losses == sorted(losses, reverse=True)
    biases = [m.e_score_correction_bias for m in model.modules() if hasattr(m, "e_score_correction_bias")]
    assert len(biases) == 2
    for bias in biases:
        steps = bias / BIAS_STEP
        assert torch.allclose(steps, steps.round(), atol=1e-3)
        assert steps.abs().max() >= 1


def test_seeds_are_kept_and_little_text_is_refused() -> None:
    """One seed gives one model and one order of rows; a text shorter than a row is named."""
    schedule = Schedule(steps=3, batch=2, length=9)
    tokens = torch.arange(40)
    assert all(map(torch.equal, batches(tokens, schedule, bos=1, seed=5), batches(tokens, schedule, bos=1, seed=5)))
    a, b = (new_model(geometry(), seed=s, device="cpu").lm_head.weight for s in (3, 3))
    assert torch.equal(a, b)
    with pytest.raises(InputError, match="got 5 tokens of text"):
        next(batches(torch.arange(5), schedule, bos=1, seed=0))


def test_the_rate_rises_and_falls() -> None:
    """Up to the rate over the warm-up, then a cosine to a tenth of it."""
    schedule = Schedule(steps=101, warmup=10, rate=1.0)
    rates = [schedule.rate_at(step) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)


def test_two_steps_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint in the release's names and dtypes comes out, with the tokenizer beside it; none is overwritten."""
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 60, encoding="utf-8")
    words = ["train", f"text={tmp_path}", f"out={tmp_path}/made", "steps=2", "batch=1", "length=17", "warmup=1"]
    assert main(words) == 0
    assert "validation loss" in capsys.readouterr().out
    made = load_checkpoint(tmp_path / "made")
    assert made.notes == ()
    assert made.rounded == ()
    assert made.config == load_checkpoint(SHIPPED).config
    assert made.tensors["lm_head.weight"].dtype == torch.bfloat16
    assert (tmp_path / "made/tokenizer.json").read_bytes() == (SHIPPED / "tokenizer.json").read_bytes()
    assert main(words) == 2
    assert main(["train", "text=x"]) == 2
