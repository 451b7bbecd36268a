"""A GGUF file holds the checkpoint's numbers under llama.cpp's names, and what llama.cpp cannot compute is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.gguf_vocabulary import Vocabulary
from harness.gguf_write import WeightFormat, write_gguf
from tests.tiny import ODD
from variants.checkpoint import Checkpoint, load_checkpoint
from variants.checkpoint_write import random_checkpoint
from variants.errors import InputError, UsageError

gguf = pytest.importorskip("gguf", reason="pip install 'neartie[llama]'")

SHIPPED = "assets/kimi-linear-12m"
SQUARE = replace(ODD, kda_v_head_dim=ODD.kda_head_dim)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return random_checkpoint(SQUARE, seed=5)


def read(path: Path) -> dict[str, np.ndarray]:
    """float32 arrays by name, in the shape that numpy sees."""
    return {
        t.name: np.asarray(gguf.dequantize(t.data, t.tensor_type)).reshape([int(n) for n in t.shape][::-1])
        for t in gguf.GGUFReader(path).tensors
    }


def test_every_tensor_is_the_checkpoint_s_own(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Decay as -exp(A_log), kv_b split with k_b transposed per head, experts stacked, all else bit for bit."""
    write_gguf(checkpoint, tmp_path / "m.gguf")
    found, c = read(tmp_path / "m.gguf"), checkpoint.config
    stored = {name: t.float().numpy() for name, t in checkpoint.tensors.items()}
    attention = "model.layers.1.self_attn"
    kv_b = stored[f"{attention}.kv_b_proj.weight"].reshape(c.num_heads, -1, c.kv_lora_rank)
    expected = {
        "token_embd.weight": stored["model.embed_tokens.weight"],
        "blk.0.ssm_a": -np.exp(stored["model.layers.0.self_attn.A_log"].astype(float)),
        "blk.0.ssm_dt.bias": stored["model.layers.0.self_attn.dt_bias"],
        "blk.2.ssm_conv1d_k.weight": stored["model.layers.2.self_attn.k_conv1d.weight"].reshape(1, -1, 1, c.conv_size),
        "blk.1.attn_k_b.weight": kv_b[:, : c.qk_nope_head_dim].transpose(0, 2, 1),
        "blk.1.attn_v_b.weight": kv_b[:, c.qk_nope_head_dim :],
        "blk.1.ffn_down_exps.weight": np.stack(
            [stored[f"model.layers.1.block_sparse_moe.experts.{e}.w2.weight"] for e in range(c.num_experts)]
        ),
        "blk.1.exp_probs_b.bias": stored["model.layers.1.block_sparse_moe.gate.e_score_correction_bias"],
        "blk.0.ffn_up.weight": stored["model.layers.0.mlp.up_proj.weight"],
    }
    for name, values in expected.items():
        assert found[name].shape == values.shape, name
        assert np.array_equal(found[name], values.astype(np.float32)), name
    assert sum(x.size for x in found.values()) == sum(t.numel() for t in checkpoint.tensors.values())


def test_matrices_alone_are_narrowed(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """In bf16 the matrices keep their stored bits; norms, convolutions, decay and router stay float32."""
    write_gguf(checkpoint, tmp_path / "m.gguf", weights=WeightFormat.bf16)
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    narrow = {"token_embd.weight", "output.weight", "blk.0.attn_q.weight", "blk.1.attn_k_b.weight"}
    assert {kinds[name] for name in narrow} == {"BF16"}
    wide = ("blk.0.ssm_a", "blk.0.ssm_conv1d_q.weight", "blk.1.ffn_gate_inp.weight", "blk.0.attn_norm.weight")
    assert {kinds[name] for name in wide} == {"F32"}
    head = torch.from_numpy(read(tmp_path / "m.gguf")["output.weight"])
    assert torch.equal(head.bfloat16(), checkpoint.tensors["lm_head.weight"])


def test_ids_as_texts_have_no_end_unless_it_is_declared(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Every id has a text of its own, no BOS is added, and an EOS is there only where it is asked for."""
    for name, reachable in (("a", False), ("b", True)):
        write_gguf(checkpoint, tmp_path / name, eos_reachable=reachable)
        fields = gguf.GGUFReader(tmp_path / name).fields
        assert ("tokenizer.ggml.eos_token_id" in fields) is reachable
        assert fields["tokenizer.ggml.add_bos_token"].contents() is False
        texts = fields["tokenizer.ggml.tokens"].contents()
        assert texts == [f"[{i}]" for i in range(SQUARE.vocab_size)]


def test_texts_are_the_tokenizer_s_own(tmp_path: Path) -> None:
    """The shipped vocabulary goes over whole, special tokens marked; without an end of sequence it is refused."""
    shipped = load_checkpoint(SHIPPED)
    write_gguf(shipped, tmp_path / "m.gguf", vocabulary=Vocabulary.text, eos_reachable=True)
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    texts, kinds = fields["tokenizer.ggml.tokens"].contents(), fields["tokenizer.ggml.token_type"].contents()
    assert texts[:4] == ["<|pad|>", "<|bos|>", "<|eos|>", "!"]
    assert kinds[:4] == [3, 3, 3, 1]
    assert len(set(texts)) == 4096
    with pytest.raises(UsageError, match="add eos=reachable"):
        write_gguf(shipped, tmp_path / "n.gguf", vocabulary=Vocabulary.text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kda_v_head_dim": 11}, "kda_v_head_dim 11 differs"),
        ({"kda_num_heads": 2}, "2 heads and attention 3"),
        ({"moe_layers": (True, False, True)}, "dense layers are not the first"),
        ({"renormalize": False}, "does not renormalise"),
    ],
)
def test_what_llama_cpp_does_not_compute_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    """Nothing is written for a geometry that would run as another model."""
    made = random_checkpoint(replace(SQUARE, **change), seed=1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=message):
        write_gguf(made, tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_a_file_that_exists_and_an_end_that_is_unknown_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """No file is overwritten; a reachable EOS needs an id."""
    (tmp_path / "m.gguf").touch()
    with pytest.raises(UsageError, match="exists already"):
        write_gguf(checkpoint, tmp_path / "m.gguf")
    nameless = random_checkpoint(replace(SQUARE, eos_token_id=None), seed=1)
    with pytest.raises(InputError, match="names no eos_token_id"):
        write_gguf(nameless, tmp_path / "n.gguf", eos_reachable=True)
