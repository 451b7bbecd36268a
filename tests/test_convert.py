"""A checkpoint passes to any engine's form and back bit for bit, and no form adds a BOS."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.cli import main
from harness.convert import Target, convert
from harness.gguf_write import WeightFormat
from tests.tiny import ODD
from variants.checkpoint import Checkpoint, load_checkpoint
from variants.checkpoint_library import library_tensors, load_any_checkpoint, release_tensors
from variants.checkpoint_write import random_checkpoint
from variants.errors import InputError

SHIPPED = "assets/kimi-linear-12m"


def assert_same(a: Checkpoint, b: Checkpoint) -> None:
    assert a.tensors.keys() == b.tensors.keys()
    for name, tensor in a.tensors.items():
        assert tensor.dtype == b.tensors[name].dtype, name
        assert torch.equal(tensor, b.tensors[name]), name


@pytest.mark.parametrize("target", [Target.hf, Target.transformers])
@pytest.mark.parametrize("tied", [False, True])
def test_there_and_back_is_the_same(target: Target, tied: bool, tmp_path: Path) -> None:
    """Values K != V wide, dense layers between and a tied head come back bit for bit, and so does the geometry."""
    made = random_checkpoint(replace(ODD, tie_word_embeddings=tied), seed=2)
    convert(made, tmp_path / "there", target=target)
    there = load_any_checkpoint(tmp_path / "there")
    assert_same(made, there)
    assert there.config == made.config
    convert(there, tmp_path / "back", target=Target.hf)
    assert_same(made, load_checkpoint(tmp_path / "back"))


def test_what_the_library_saves_comes_out_under_the_release_s_names(tmp_path: Path) -> None:
    """save_pretrained names dense layers as experts': converted, every name is the release's, in both of its forms."""
    transformers = pytest.importorskip("transformers", reason="pip install 'neartie[transformers]'")
    model = transformers.KimiLinearForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)
    for original in (True, False):
        saved, out = tmp_path / f"saved-{original}", tmp_path / f"out-{original}"
        model.save_pretrained(saved, save_original_format=original)
        convert(load_any_checkpoint(saved), out, target=Target.hf, weights=WeightFormat.bf16)
        made = load_checkpoint(out)
        assert_same(load_checkpoint(SHIPPED), made)
        assert made.notes == ()


def test_the_library_loads_its_own_form(tmp_path: Path) -> None:
    """Nothing is missing or unexpected, and every parameter is the one that the release's names give."""
    transformers = pytest.importorskip("transformers", reason="pip install 'neartie[transformers]'")
    convert(load_checkpoint(SHIPPED), tmp_path / "own", target=Target.transformers)
    load = transformers.KimiLinearForCausalLM.from_pretrained
    ours, report = load(tmp_path / "own", dtype=torch.float32, output_loading_info=True)
    assert not any(report.values())
    theirs = load(SHIPPED, dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.state_dict().items())


def test_joined_tensors_that_do_not_divide_are_refused() -> None:
    """A fused projection of another width is named, never cut somewhere."""
    made = random_checkpoint(ODD, seed=2)
    fused = library_tensors(made.tensors, ODD)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    with pytest.raises(InputError, match=r"gate_up_proj has shape \[5, 17, 23\], config.json expects \[5, 18, 23\]"):
        release_tensors({**fused, name: fused[name][:, :17]}, ODD)


def test_a_folder_without_an_end_names_none(tmp_path: Path) -> None:
    """eos=unreachable leaves no id to stop at, in config and tokenizer alike; no tokenizer adds a BOS."""
    shipped = load_checkpoint(SHIPPED)
    convert(shipped, tmp_path / "m", target=Target.hf, eos_reachable=False)
    config = json.loads((tmp_path / "m/config.json").read_text())
    tokenizer = json.loads((tmp_path / "m/tokenizer_config.json").read_text())
    assert config["eos_token_id"] is None
    assert "eos_token" not in tokenizer
    assert tokenizer["add_bos_token"] is False
    assert (tmp_path / "m/tokenizer.json").read_bytes() == Path(SHIPPED, "tokenizer.json").read_bytes()


def test_the_command_converts_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line says what was written; no place, a setting without effect and a folder that is full each exit 2."""
    words = ["convert", "to=hf", f"out={tmp_path}/m"]
    assert main([*words, "weights=f32"]) == 0
    assert "hf of kimi-linear-12m 48fb90540679" in capsys.readouterr().out
    assert load_checkpoint(tmp_path / "m").tensors["lm_head.weight"].dtype == torch.float32
    assert main(words) == 2
    assert main(["convert", "to=hf"]) == 2
    assert main(["convert", "to=hf", "out=x", "vocabulary=text"]) == 2
    err = capsys.readouterr().err
    assert "holds weights already" in err
    assert "vocabulary=text has no effect with to=hf" in err
