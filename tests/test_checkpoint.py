"""The loader takes what fits the config, bit for bit, and refuses everything else before a forward, by name."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import variants.checkpoint_file as checkpoint_file
from variants.checkpoint import Checkpoint, expected_tensors, load_checkpoint
from variants.checkpoint_file import find_weights
from variants.checkpoint_names import EMBEDDING, HEAD, is_float32_parameter
from variants.checkpoint_write import random_checkpoint, write_checkpoint
from variants.errors import DeviceError, InputError, UsageError
from variants.model_config import LayerKind, ModelConfig
from variants.placement import one

ASSETS = Path(__file__).parents[1] / "assets"
SHIPPED = ASSETS / "kimi-linear-12m"
TINY = ModelConfig(  # sizes that differ wherever two could be confused; K != V
    vocab_size=61,
    hidden_size=18,
    rms_norm_eps=1e-5,
    layer_kinds=(LayerKind.kda, LayerKind.mla, LayerKind.kda),
    moe_layers=(False, True, True),
    intermediate_size=26,
    kda_num_heads=3,
    kda_head_dim=5,
    kda_v_head_dim=7,
    conv_size=4,
    num_heads=2,
    kv_lora_rank=11,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=9,
    num_experts=3,
    experts_per_token=2,
    num_shared_experts=2,
    moe_intermediate_size=8,
    routed_scaling_factor=2.446,
    renormalize=True,
    tie_word_embeddings=False,
    max_length=128,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
A_LOG = "model.layers.0.self_attn.A_log"
SECOND = "model-00002-of-00002.safetensors"
Edit = Callable[[Path], object]


def saved(path: Path, checkpoint: Checkpoint, *, shards: bool = False) -> Path:
    total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    write_checkpoint(checkpoint, path, max_shard_bytes=total * 2 // 3 if shards else None)
    return path


def with_tensors(checkpoint: Checkpoint, **changes: torch.Tensor | None) -> Checkpoint:
    """The checkpoint with tensors replaced, or dropped where None; names use `__` for `.`."""
    named = {name.replace("__", "."): tensor for name, tensor in changes.items()}
    merged = {**checkpoint.tensors, **named}
    return replace(checkpoint, tensors={name: tensor for name, tensor in merged.items() if tensor is not None})


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        load_checkpoint(path)
    assert caught.value.exit_code == 3
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def tiny() -> Checkpoint:
    return random_checkpoint(TINY, seed=5)


def test_the_shipped_model_is_the_goldens_model_bit_for_bit() -> None:
    """The shipped weights load as the safetensors library reads them, under the hashes that the goldens state."""
    loaded = load_checkpoint(SHIPPED)
    golden = json.loads((ASSETS / "goldens" / "vllm-0.26.0-h200" / "gate.json").read_text())
    assert (loaded.sha256, loaded.tokenizer_sha256) == (golden["model_sha256"], golden["tokenizer_sha256"])
    assert (loaded.notes, loaded.rounded) == ((), ())
    stored = load_file(SHIPPED / "model.safetensors")
    assert loaded.tensors.keys() == stored.keys()
    for name, tensor in loaded.tensors.items():
        assert tensor.dtype == (torch.float32 if is_float32_parameter(name) else torch.bfloat16)
        assert tensor.dtype == stored[name].dtype
        assert tensor.shape == stored[name].shape
        assert torch.equal(bits(tensor), bits(stored[name])), name


def test_the_assets_are_the_files_of_the_checksum_list() -> None:
    """Each file named in SHA256SUMS has that SHA-256, and every file of the model but its card is named."""
    listed = {line[66:]: line[:64] for line in (ASSETS / "SHA256SUMS").read_text().splitlines()}
    for name, sha256 in listed.items():
        assert hashlib.sha256((ASSETS / name).read_bytes()).hexdigest() == sha256, name
    assert {f"{SHIPPED.name}/{file.name}" for file in SHIPPED.iterdir()} - listed.keys() == {
        f"{SHIPPED.name}/README.md"
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shards", [False, True])
def test_what_is_written_loads_back_in_every_dtype(tmp_path: Path, dtype: torch.dtype, shards: bool) -> None:
    """A written checkpoint comes back with the same config, dtypes and bits, its tensors aligned, in whatever files."""
    made = random_checkpoint(TINY, seed=0, dtype=dtype)
    loaded = load_checkpoint(saved(tmp_path, made, shards=shards))
    assert (tmp_path / SECOND).exists() == shards
    assert all(t.start % t.dtype.itemsize == f.data_start % 8 == 0 for f in find_weights(tmp_path) for t in f.tensors)
    assert loaded.config == TINY
    assert (loaded.notes, loaded.rounded) == ((), ())
    assert list(loaded.tensors) == list(expected_tensors(TINY))
    for name, tensor in made.tensors.items():
        assert loaded.tensors[name].dtype == tensor.dtype
        assert torch.equal(bits(loaded.tensors[name]), bits(tensor)), name


def test_the_hash_of_shards_is_the_hash_of_their_sorted_checksum_lines(tmp_path: Path, tiny: Checkpoint) -> None:
    """For shards, sha256 is `sha256sum *.safetensors | sort | sha256sum`, and the index is no part of it."""
    write_checkpoint(tiny, tmp_path, max_shard_bytes=3000)
    files = tmp_path.glob("*.safetensors")
    lines = sorted(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    expected = hashlib.sha256("".join(lines).encode()).hexdigest()
    assert len(lines) > 5
    assert load_checkpoint(tmp_path, expect_sha256=expected).sha256 == expected
    with pytest.raises(InputError, match=f"SHA-256 is {expected}, expected {'0' * 64}"):
        load_checkpoint(tmp_path, expect_sha256="0" * 64)


def test_chunked_reading_changes_nothing(tmp_path: Path, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors longer than a chunk arrive whole, hashed once, their non-finite values counted over all chunks."""
    whole = load_checkpoint(saved(tmp_path / "whole", tiny))
    monkeypatch.setattr(checkpoint_file, "_CHUNK_BYTES", 16)
    pieces = load_checkpoint(tmp_path / "whole")
    assert (
        pieces.sha256 == whole.sha256 == hashlib.sha256((tmp_path / "whole/model.safetensors").read_bytes()).hexdigest()
    )
    assert all(torch.equal(bits(pieces.tensors[name]), bits(whole.tensors[name])) for name in whole.tensors)
    broken = tiny.tensors[HEAD].clone()
    broken[0, 0], broken[30, 3], broken[-1, -1] = float("nan"), float("inf"), float("-inf")
    message = refusal(saved(tmp_path / "broken", with_tensors(tiny, lm_head__weight=broken)))
    assert f"model.safetensors: tensor {HEAD} holds 3 NaN or infinite values among {broken.numel()}" in message


def test_a_shard_missing_cut_or_too_long_is_refused_by_its_first_tensor(tmp_path: Path, tiny: Checkpoint) -> None:
    """P43: a deleted, a truncated and an overlong shard are three different refusals naming file and tensor."""
    source = saved(tmp_path / "source", tiny, shards=True)
    shard = (source / SECOND).read_bytes()
    length = int.from_bytes(shard[:8], "little")
    header = json.loads(shard[8 : 8 + length])
    ends = {entry["data_offsets"][1]: name for name, entry in header.items() if name != "__metadata__"}
    last, middle = ends[max(ends)], sorted(ends)[len(ends) // 2]
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    first_in_index = next(name for name, file in index.items() if file == SECOND)
    damages: dict[str, tuple[Edit, str]] = {
        "shard is missing": (lambda file: file.unlink(), first_in_index),
        "truncated, 1 of": (lambda file: file.write_bytes(shard[:-1]), last),
        "truncated, ": (lambda file: file.write_bytes(shard[: 8 + length + middle - 1]), ends[middle]),
        "16 trailing bytes": (lambda file: file.write_bytes(shard + bytes(16)), last),
        "do not hold a safetensors header": (lambda file: file.write_bytes(shard[: length // 2]), ""),
        "header is not JSON": (lambda file: file.write_bytes(shard[:8] + b"?" + shard[9:]), ""),
    }
    for number, (reason, (damage, tensor)) in enumerate(damages.items()):
        copy = Path(shutil.copytree(source, tmp_path / str(number)))
        damage(copy / SECOND)
        message = refusal(copy)
        assert str(copy / SECOND) in message
        assert reason in message
        assert f" {tensor}" in message


def test_files_and_index_must_name_each_other(tmp_path: Path, tiny: Checkpoint) -> None:
    """A weights file the index does not name, a tensor in another shard than stated, and no weights are refused."""
    source = saved(tmp_path / "source", tiny, shards=True)
    extra = Path(shutil.copytree(source, tmp_path / "extra"))
    shutil.copy(extra / SECOND, extra / "model-00003-of-00003.safetensors")
    assert "model-00003-of-00003.safetensors: weights file not named in model.safetensors.index.json" in refusal(extra)
    moved = Path(shutil.copytree(source, tmp_path / "moved"))
    index = json.loads((moved / "model.safetensors.index.json").read_text())
    index["weight_map"][EMBEDDING] = SECOND
    (moved / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"unexpected tensor {EMBEDDING}" in refusal(moved)
    index["weight_map"][EMBEDDING] = "../source/" + SECOND
    (moved / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "expected a safetensors file of the same directory" in refusal(moved)
    (source / "model.safetensors.index.json").unlink()
    assert "neither model.safetensors nor model.safetensors.index.json is there" in refusal(source)
    assert "config.json: cannot be read" in refusal(tmp_path / "nowhere")


def test_tensors_that_do_not_fit_the_config_are_refused(tmp_path: Path, tiny: Checkpoint) -> None:
    """A missing, an unexpected and a misshaped tensor are refused by file and name, shapes stated."""
    name, norm = "model.layers.1.self_attn.kv_b_proj.weight", "model.norm.weight"
    missing = saved(tmp_path / "missing", with_tensors(tiny, model__norm__weight=None))
    assert refusal(missing) == f"{missing}/model.safetensors: tensor {norm} is missing; config.json asks for it"
    extra = saved(tmp_path / "extra", with_tensors(tiny, model__norm__bias=torch.zeros(18)))
    assert f"{extra}/model.safetensors: unexpected tensor model.norm.bias" in refusal(extra)
    turned = tiny.tensors[name].T.contiguous()
    shaped = saved(tmp_path / "shape", replace(tiny, tensors={**tiny.tensors, name: turned}))
    assert f"tensor {name} has shape [11, 30], config.json expects [30, 11]" in refusal(shaped)
    both = {"model.layers.0.block_sparse_moe.up_proj.weight": tiny.tensors["model.layers.0.mlp.up_proj.weight"]}
    twice = saved(tmp_path / "twice", replace(tiny, tensors={**tiny.tensors, **both}))
    assert "is there under another name too" in refusal(twice)


@pytest.mark.parametrize(
    ("dtype", "code"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.int64, "I64")]
)
def test_quantised_and_integer_weights_are_refused(
    tmp_path: Path, tiny: Checkpoint, dtype: torch.dtype, code: str
) -> None:
    """A weight in a dtype that no forward here reads is refused by name and dtype, even if its shape fits."""
    saved(tmp_path, tiny)
    save_file({**tiny.tensors, EMBEDDING: tiny.tensors[EMBEDDING].to(dtype)}, tmp_path / "model.safetensors")
    assert f"model.safetensors: tensor {EMBEDDING} is {code}, expected one of F64, F32, F16, BF16" in refusal(tmp_path)


def test_float32_parameters_in_a_lower_dtype_are_named(tmp_path: Path, tiny: Checkpoint) -> None:
    """P15: a float32 parameter that arrives in bfloat16 loads in its stored dtype, named in `rounded` and in a note."""
    bias = "model.layers.1.block_sparse_moe.gate.e_score_correction_bias"
    lower = {name: tiny.tensors[name].bfloat16() for name in (A_LOG, bias)}
    loaded = load_checkpoint(saved(tmp_path, replace(tiny, tensors={**tiny.tensors, **lower})))
    assert loaded.rounded == (A_LOG, bias)
    assert [loaded.tensors[name].dtype for name in loaded.rounded] == [torch.bfloat16, torch.bfloat16]
    assert [name in note for name, note in zip(loaded.rounded, loaded.notes, strict=True)] == [True, True]


def test_a_head_must_agree_with_the_tie(tmp_path: Path, tiny: Checkpoint) -> None:
    """P44: tied + absent shares storage, tied + equal loads with a note; tied + different, untied + absent refuse."""
    tied = replace(tiny, config=replace(TINY, tie_word_embeddings=True))
    equal, other = tiny.tensors[EMBEDDING].clone(), tiny.tensors[EMBEDDING].clone()
    other[-1, -1] += 1
    loaded = load_checkpoint(saved(tmp_path / "absent", with_tensors(tied, lm_head__weight=None)))
    assert loaded.tensors[HEAD].data_ptr() == loaded.tensors[EMBEDDING].data_ptr()
    assert loaded.notes == ()
    loaded = load_checkpoint(saved(tmp_path / "equal", with_tensors(tied, lm_head__weight=equal)))
    assert loaded.tensors[HEAD].data_ptr() == loaded.tensors[EMBEDDING].data_ptr()
    assert len(loaded.notes) == 1
    assert loaded.notes[0].startswith(HEAD)
    different = saved(tmp_path / "different", with_tensors(tied, lm_head__weight=other))
    assert f"{different}/model.safetensors: tensor {HEAD} differs from {EMBEDDING}" in refusal(different)
    untied = saved(tmp_path / "untied", with_tensors(tiny, lm_head__weight=None))
    assert f"tensor {HEAD} is missing" in refusal(untied)


def test_a_tied_model_is_written_without_its_head(tmp_path: Path) -> None:
    """Random weights of a tied model have one tensor for embedding and head, and the file holds it once."""
    made = random_checkpoint(replace(TINY, tie_word_embeddings=True), seed=1)
    assert made.tensors[HEAD] is made.tensors[EMBEDDING]
    assert HEAD not in load_file(saved(tmp_path, made) / "model.safetensors")
    assert load_checkpoint(tmp_path).config.tie_word_embeddings


def test_random_weights_depend_on_the_seed_and_nothing_else() -> None:
    """Equal seeds give equal bits, seed 0 is a seed like another, and a tensor is the same in a shallower model."""
    first, again, other = (random_checkpoint(TINY, seed=seed) for seed in (0, 0, 1))
    deeper = replace(TINY, num_shared_experts=1, layer_kinds=TINY.layer_kinds[:2], moe_layers=TINY.moe_layers[:2])
    assert first.sha256 == again.sha256 != other.sha256
    assert list(first.tensors) == list(expected_tensors(TINY))
    for name, shape in expected_tensors(TINY).items():
        tensor = first.tensors[name]
        assert tensor.shape == shape
        assert tensor.dtype == (torch.float32 if is_float32_parameter(name) else torch.bfloat16)
        assert torch.isfinite(tensor).all()
        assert torch.equal(tensor, again.tensors[name])
        assert not torch.equal(tensor, other.tensors[name])
    assert torch.equal(random_checkpoint(deeper, seed=0).tensors[A_LOG], first.tensors[A_LOG])


def test_a_directory_with_weights_and_a_device_that_is_absent_are_refused(tmp_path: Path, tiny: Checkpoint) -> None:
    """Weights are never written over others, and a device that cannot be used is an error of its own class."""
    saved(tmp_path, tiny)
    with pytest.raises(UsageError, match="holds weights already"):
        write_checkpoint(tiny, tmp_path, max_shard_bytes=1000)
    with pytest.raises(DeviceError, match="device 'nonsense' cannot be used"):
        load_checkpoint(tmp_path, placement=one("nonsense"))
