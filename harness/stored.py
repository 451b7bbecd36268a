"""Whether the weights and constants that a run holds are those of the checkpoint's files, read by another library.

Variants, oracle and definition are given one `Checkpoint`: a tensor under a wrong name, a row that was read twice or a
kernel that writes into a weight is in all of them. Here the files are read again, by safetensors' own reader and the
json module, and nothing of `variants` but what is to be held.
"""

import json
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from harness.parts import part
from harness.verdict import Finding
from variants.checkpoint import Checkpoint

INSTRUMENT = "stored"
LARGEST_BYTES = 2**31  # of weights; beyond that reading them again would take longer than the verdict
NESTED = "linear_attn_config"
# Constants and sizes that a tensor's shape does not show by itself: (release's key, the library's).
KEYS = {
    "rms_norm_eps": ("rms_norm_eps",),
    "routed_scaling_factor": ("routed_scaling_factor",),
    "renormalize": ("moe_renormalize", "norm_topk_prob"),
    "experts_per_token": ("num_experts_per_token", "num_experts_per_tok"),
    "num_shared_experts": ("num_shared_experts", "n_shared_experts"),
    "tie_word_embeddings": ("tie_word_embeddings",),
    "num_heads": ("num_attention_heads",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_nope_head_dim": ("qk_nope_head_dim",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
    "kda_num_heads": (f"{NESTED}.num_heads", "linear_num_heads"),
    "kda_head_dim": (f"{NESTED}.head_dim", "linear_head_dim"),
}


@dataclass(frozen=True, kw_only=True)
class Stored:
    """tensors: how many were held. found: the first that differs; left_out: why none was held."""

    tensors: int = 0
    found: Finding | None = None
    left_out: str | None = None

    def record(self) -> dict[str, object]:
        return {"tensors": self.tensors, "left_out": self.left_out}

    def findings(self) -> list[Finding]:
        return [] if self.found is None else [self.found]


@part("stored weights")
def stored(checkpoint: Checkpoint) -> Stored:
    """Every tensor of the files bit by bit, none beside them, then the constants.

    A checkpoint without a file, or of too many bytes, is left out.
    """
    size = sum(t.nbytes for t in checkpoint.tensors.values())
    files = sorted(checkpoint.path.glob("*.safetensors"))
    if not files:
        return Stored(left_out=f"{checkpoint.path} holds no safetensors file: weights were made here")
    if size > LARGEST_BYTES:
        return Stored(left_out=f"{size / 1e9:.1f} GB of weights: too many to read again")
    held: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as source:
            for name in source.keys():  # noqa: SIM118  # it is no mapping
                own = checkpoint.tensors.get(released := _released(name, checkpoint))
                if own is None:
                    what = f"{name} is in {file.name} and nowhere in what runs"
                    return Stored(tensors=len(held), found=_finding(what))
                if (differs := _differ(source.get_tensor(name), own)) is not None:
                    return Stored(tensors=len(held), found=_finding(f"{name}: {differs} {file.name} holds", name))
                held.add(released)
    tied = {"lm_head.weight"} if checkpoint.config.tie_word_embeddings else set()
    if more := sorted(checkpoint.tensors.keys() - held - tied):
        return Stored(tensors=len(held), found=_finding(f"{more[0]} runs and is in no file", more[0]))
    other = _constants(checkpoint)
    return Stored(tensors=len(held), found=None if other is None else _finding(other))


def _released(name: str, checkpoint: Checkpoint) -> str:
    """The library saves dense layers under the experts' name."""
    return name if name in checkpoint.tensors else name.replace(".block_sparse_moe.", ".mlp.")


def _differ(stored: Tensor, own: Tensor) -> str | None:
    """How a tensor differs, for a sentence that goes on with its file and "holds"; None where all bits are the same."""
    if stored.dtype is not own.dtype or stored.shape != own.shape:
        return f"runs as {own.dtype} {list(own.shape)}, not as {stored.dtype} {list(stored.shape)} as"
    one, other = (x.contiguous().cpu().view(-1).view(torch.uint8).view(x.numel(), -1) for x in (stored, own))
    wrong = int((one != other).any(-1).sum())
    return f"{wrong} of {own.numel()} values are not those that" if wrong else None


def _constants(checkpoint: Checkpoint) -> str | None:
    """The first constant that config.json names and that is another in what runs."""
    raw: dict[str, Any] = json.loads((checkpoint.path / "config.json").read_text(encoding="utf-8"))
    raw |= {f"{NESTED}.{key}": value for key, value in (raw.get(NESTED) or {}).items()}
    for field, keys in KEYS.items():
        for key in keys:
            if raw.get(key) is not None and raw[key] != getattr(checkpoint.config, field):
                return f"{key} is {raw[key]} in config.json, {getattr(checkpoint.config, field)} in what runs"
    return None


def _finding(what: str, name: str = "") -> Finding:
    parts = name.split(".")
    layer = int(parts[2]) if parts[:2] == ["model", "layers"] else None
    reason = f"{what}: what runs is not the checkpoint on disk (look at what reads it, or writes into a weight)"
    return Finding(instrument=INSTRUMENT, reason=reason, layer=layer)
