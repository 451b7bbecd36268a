"""The weights and constants that run are held against the files, which another library reads."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch

from harness.forced_errors import Battery
from harness.shared_code import sound_oracle
from harness.stored import INSTRUMENT, KEYS, stored
from variants.checkpoint import Checkpoint, load_checkpoint
from variants.checkpoint_names import expected_tensors
from variants.checkpoint_write import random_checkpoint, write_checkpoint
from variants.errors import NeartieError
from variants.recipe import resolve
from variants.weights import Casts

CONV = "model.layers.0.self_attn.q_conv1d.weight"


@pytest.fixture
def loaded(tmp_path: Path) -> Checkpoint:
    write_checkpoint(random_checkpoint(tiny.ODD, seed=1), tmp_path, max_shard_bytes=9000)
    return load_checkpoint(tmp_path)


def told(checkpoint: Checkpoint) -> tuple[str, int | None]:
    (finding,) = stored(checkpoint).findings()
    assert finding.instrument == INSTRUMENT
    return finding.reason, finding.layer


@pytest.mark.parametrize("tied", [False, True])
def test_what_was_loaded_is_what_is_stored(tmp_path: Path, tied: bool) -> None:
    """Every tensor of every shard, once; a tied head is in no file."""
    config = replace(tiny.ODD, tie_word_embeddings=tied)
    write_checkpoint(random_checkpoint(config, seed=1), tmp_path, max_shard_bytes=9000)
    found = stored(load_checkpoint(tmp_path))
    assert found.findings() == []
    assert found.record() == {"tensors": len(expected_tensors(config)) - tied, "left_out": None}


def test_a_value_that_was_written_over_is_named(loaded: Checkpoint) -> None:
    """One bit of one value, as a kernel that writes into its weight leaves it, or a row that was read twice."""
    loaded.tensors[CONV].view(torch.int16)[3, 0, 1] ^= 1
    reason, layer = told(loaded)
    assert f"{CONV}: 1 of 84 values are not those that model" in reason
    assert layer == 0


def test_names_that_were_exchanged_are_named(loaded: Checkpoint) -> None:
    name = "model.layers.1.block_sparse_moe.experts.2.{}.weight"
    swapped = {name.format(a): loaded.tensors[name.format(b)] for a, b in (("w1", "w3"), ("w3", "w1"))}
    reason, layer = told(replace(loaded, tensors=loaded.tensors | swapped))
    assert name.format("w1") in reason
    assert layer == 1


def test_another_format_and_a_tensor_that_is_not_there(loaded: Checkpoint) -> None:
    wide = loaded.tensors | {CONV: loaded.tensors[CONV].float()}
    assert f"{CONV}: runs as torch.float32 [21, 1, 4], not as torch.bfloat16" in told(replace(loaded, tensors=wide))[0]
    without = {k: v for k, v in loaded.tensors.items() if k != CONV}
    assert f"{CONV} is in" in told(replace(loaded, tensors=without))[0]
    made = "model.layers.1.made.weight"
    more = loaded.tensors | {made: torch.ones(2)}
    reason, layer = told(replace(loaded, tensors=more))
    assert f"{made} runs and is in no file" in reason
    assert layer == 1


@pytest.mark.parametrize("field", KEYS)
def test_a_constant_that_is_another_is_named(field: str, loaded: Checkpoint) -> None:
    """Each of them, whichever of its two names the file has."""
    value = getattr(loaded.config, field)
    wrong = not value if isinstance(value, bool) else value + 1
    reason, _ = told(replace(loaded, config=replace(loaded.config, **{field: wrong})))
    assert f"is {value} in config.json, {wrong} in what runs" in reason


def test_weights_without_a_file_and_too_large_ones_are_left_out(
    loaded: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "weights were made here" in (stored(tiny.casts().checkpoint).left_out or "")
    monkeypatch.setattr("harness.stored.LARGEST_BYTES", 10)
    assert "too many to read again" in (stored(loaded).left_out or "")


def test_no_other_engine_is_judged_by_other_weights(loaded: Checkpoint) -> None:
    recipe = resolve(tiny.plain(tiny.Stream.f32, tiny.Gemm.f32), tiny.ODD)
    battery = Battery(prompts=[tiny.prompt(3)], continuations=[tiny.prompt(2)])
    assert sound_oracle(Casts(loaded), recipe, battery).departs is None
    file = loaded.path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 1e-6}))
    with pytest.raises(NeartieError, match="no other engine can be judged"):
        sound_oracle(Casts(loaded), recipe, battery)
