"""Where a loaded checkpoint lies: straight on its devices, shards read at once, side by side what is read together."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import ODD

from variants.checkpoint import Checkpoint, load_checkpoint, weights_sha256
from variants.checkpoint_write import random_checkpoint, write_checkpoint
from variants.dtypes import dtype_of
from variants.errors import InputError
from variants.placement import Placement, one
from variants.recipe import Semantics
from variants.side_by_side import beside, groups
from variants.weights import Casts, Weights


@pytest.fixture(scope="module")
def tiny() -> Checkpoint:
    return random_checkpoint(ODD, seed=5)


def test_shards_go_straight_to_their_devices(tmp_path: Path, tiny: Checkpoint) -> None:
    """Several shards at once, through a buffer: layers of the second device lie there, the others hold their bits."""
    write_checkpoint(tiny, tmp_path, max_shard_bytes=3000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 8  # more shards than are read at once
    loaded = load_checkpoint(tmp_path, placement=Placement(("cpu", "meta"), (0, 1)))
    assert loaded.sha256 == load_checkpoint(tmp_path).sha256 == weights_sha256(tmp_path)
    here = [name for name, tensor in loaded.tensors.items() if tensor.device.type == "cpu"]
    assert {name.split(".")[2] for name in here if ".layers." in name} == {"0"}
    assert len(here) < len(loaded.tensors)
    assert all(torch.equal(loaded.tensors[name], tiny.tensors[name]) for name in here)


def test_a_shard_with_a_nan_is_refused_while_others_are_read(tmp_path: Path, tiny: Checkpoint) -> None:
    """The refusal names file and tensor wherever the shard stands among those that are read at once."""
    name = "model.layers.0.self_attn.o_proj.weight"
    broken = tiny.tensors[name].clone().view(-1).index_fill_(0, torch.tensor([3]), math.nan).view_as(tiny.tensors[name])
    write_checkpoint(replace(tiny, tensors={**tiny.tensors, name: broken}), tmp_path, max_shard_bytes=3000)
    with pytest.raises(InputError, match=rf"tensor {name} holds 1 NaN"):
        load_checkpoint(tmp_path, placement=Placement(("cpu", "meta"), (0, 1)))


def test_a_loaded_checkpoint_lies_as_it_is_read(tmp_path: Path, tiny: Checkpoint) -> None:
    """What one product reads lies side by side, so that stacking experts copies nothing; mixed dtypes lie apart."""
    name = "model.layers.0.self_attn.k_proj.weight"
    mixed = replace(tiny, tensors={**tiny.tensors, name: tiny.tensors[name].float()})
    write_checkpoint(mixed, tmp_path)
    loaded = load_checkpoint(tmp_path)
    assert loaded.tensors[name].dtype is torch.float32
    casts = Casts(loaded)
    for group in groups(loaded.config, loaded.tensors):
        parts = [loaded.tensors[n] for n in group]
        assert beside(parts) == (name not in group)
        if ".experts." in group[0]:
            leaves = ("w1", "w3") if ".w1." in group[0] else ("w2",)
            prefix, dtype = group[0].partition(".experts.")[0], dtype_of(parts[0])
            stack = Weights(casts, Semantics()).experts(prefix, leaves, loaded.config.num_experts, dtype)
            assert stack.data_ptr() == parts[0].data_ptr()
            assert torch.equal(stack.flatten(), torch.cat([p.flatten() for p in parts]))
            assert casts.nbytes == sum(p.nbytes for p in parts)  # the checkpoint's own
            casts.drop()


@pytest.mark.gpu
def test_shards_reach_a_gpu_with_their_bits(tmp_path: Path, tiny: Checkpoint) -> None:
    """Through page-locked buffers, several shards at once; a NaN is found there too, and named."""
    write_checkpoint(tiny, tmp_path, max_shard_bytes=3000)
    loaded = load_checkpoint(tmp_path, placement=one("cuda:0"))
    assert loaded.sha256 == weights_sha256(tmp_path)
    for name, tensor in loaded.tensors.items():
        assert tensor.device == torch.device("cuda:0")
        assert torch.equal(tensor.cpu(), tiny.tensors[name])
    name = "model.layers.1.self_attn.o_proj.weight"
    broken = tiny.tensors[name].clone()
    broken[0, 2] = math.nan
    write_checkpoint(replace(tiny, tensors={**tiny.tensors, name: broken}), tmp_path / "nan", max_shard_bytes=3000)
    with pytest.raises(InputError, match=rf"tensor {name} holds 1 NaN"):
        load_checkpoint(tmp_path / "nan", placement=one("cuda:0"))
