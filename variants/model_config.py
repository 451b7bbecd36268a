"""The geometry of a Kimi-Linear model, read from its config; no arithmetic is chosen here."""

from dataclasses import dataclass
from enum import Enum


class LayerKind(Enum):
    """What mixes tokens in a layer: Kimi delta attention or latent attention."""

    kda = "linear_attention"
    mla = "full_attention"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and constants of one model; every layer index is 0-based.

    `kda_head_dim` is K (keys) and `kda_v_head_dim` V (values) of the delta rule; the release has K = V.
    """

    vocab_size: int
    hidden_size: int
    rms_norm_eps: float
    layer_kinds: tuple[LayerKind, ...]
    moe_layers: tuple[bool, ...]
    intermediate_size: int
    kda_num_heads: int
    kda_head_dim: int
    kda_v_head_dim: int
    conv_size: int
    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    num_experts: int
    experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    renormalize: bool
    tie_word_embeddings: bool
    max_length: int
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @property
    def qk_head_dim(self) -> int:
        """Width of an MLA query or key: the part without position plus the part that rope would rotate."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def mla_scale(self) -> float:
        """Softmax scale of MLA, from the key's width and never from the latent's."""
        return self.qk_head_dim**-0.5

    @property
    def kda_scale(self) -> float:
        return self.kda_head_dim**-0.5
