"""The forward pass of Kimi-Linear under a recipe: built once for each phase, then only called."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from variants.axes import Execution
from variants.batch import Batch
from variants.binding import Binder
from variants.layers import KdaBlock, MlaBlock, Norm, Residual
from variants.mlp_layers import DenseBlock, MoeBlock
from variants.model_config import LayerKind, ModelConfig
from variants.placement import current
from variants.recipe import Recipe
from variants.rounding import NoProbe, Probe, Step
from variants.state import State
from variants.weights import Weights

PHASES = ("prefill", "decode")
Pair = tuple[Tensor, Tensor]


class Layer:
    """One layer in one phase: attention block, MLP block, their norms and residual adds."""

    def __init__(self, b: Binder) -> None:
        name, eps = f"model.layers.{b.layer}", b.config.rms_norm_eps
        self.input_norm = Norm(b, "input_norm", f"{name}.input_layernorm.weight", eps)
        self.attention = KdaBlock(b) if b.config.layer_kinds[b.layer] is LayerKind.kda else MlaBlock(b)
        self.attn_residual = Residual(b, "attn_residual", b.rule("post_attn_norm"))
        self.post_norm = Norm(b, "post_attn_norm", f"{name}.post_attention_layernorm.weight", eps)
        self.mlp = MoeBlock(b) if b.config.moe_layers[b.layer] else DenseBlock(b)
        after = b.on(b.layer + 1)
        following = after.rule("final_norm" if after.layer == b.config.num_layers else "input_norm")
        self.mlp_residual = Residual(b, "mlp_residual", following)

    def __call__(self, h: Tensor, unrounded: Tensor, batch: Batch, state: State) -> tuple[Tensor, Tensor]:
        h, unrounded = self.attn_residual(h, self.attention(self.input_norm(h, unrounded), batch, state))
        return self.mlp_residual(h, self.mlp(self.post_norm(h, unrounded)))


class Phase:
    """Embedding, layers and head bound for prefill or for decode."""

    def __init__(self, b: Binder) -> None:
        config = b.config
        self.embedding = b.weights.get("model.embed_tokens.weight", b.on(-1).rule("embed").accum)
        self.embed = b.on(-1).at("embed")
        self.layers = [Layer(b.on(i)) for i in range(config.num_layers)]
        self.stages = b.weights.casts.placement.stages(config.num_layers)
        head = b.on(config.num_layers)
        self.final_norm = Norm(head, "final_norm", "model.norm.weight", config.rms_norm_eps)
        self.head_in = head.at("lm_head_in")
        self.head = head.product("lm_head", head.weight("lm_head", "lm_head.weight"))

    def __call__(self, tokens: Tensor, batch: Batch, state: State) -> tuple[Tensor, Tensor]:
        """Residual stream after the last layer, as stored and unrounded: tokens [B, T] -> two of [B, T, D]."""
        if len(self.stages) > 1:
            return self._in_stages(tokens, batch, state)
        h = self.embed(self.embedding[tokens])
        unrounded = h
        for layer in self.layers:
            h, unrounded = layer(h, unrounded, batch, state)
        return h, unrounded

    def _in_stages(self, tokens: Tensor, batch: Batch, state: State) -> tuple[Tensor, Tensor]:
        """The same over several devices: the stream is moved where a stage ends, and nothing is computed otherwise."""
        h = self.embed(self.embedding[tokens.to(self.embedding.device)])
        unrounded = h
        for device, layers in self.stages:
            same = unrounded is h
            h = h.to(device)
            unrounded, here = h if same else unrounded.to(device), batch.to(device)
            with current(device):
                for i in layers:
                    h, unrounded = self.layers[i](h, unrounded, here, state)
        return h, unrounded

    def logits(self, h: Tensor, unrounded: Tensor) -> Tensor:
        if len(self.stages) > 1:
            with current(self.stages[-1][0]):
                return self.head(self.head_in(self.final_norm(h, unrounded)))
        return self.head(self.head_in(self.final_norm(h, unrounded)))


class Model:
    """A checkpoint under a recipe. Holds no sequence: everything carried is in the `State` that is passed in."""

    def __init__(self, config: ModelConfig, recipe: Recipe, weights: Weights, *, probe: Probe | None = None) -> None:
        self.config, self.recipe, self.weights = config, recipe, weights
        self.probe = probe or NoProbe()
        self.device = weights.casts.device
        self._steps: WeakKeyDictionary[State, object] = WeakKeyDictionary()
        self.phases = {p: Phase(Binder(config, recipe, weights, self.probe, -1, p)) for p in PHASES}

    def new_state(self, *, slots: int, max_len: int, pages: int | None = None) -> State:
        """Empty slots; under paged execution each owns the pages that max_len needs, or none of `pages` yet."""
        run = self.recipe.execution
        block = run.block_size if run.mode is Execution.paged else None
        return State(
            self.config,
            self.recipe,
            slots=slots,
            max_len=max_len,
            device=self.device,
            block_size=block,
            pages=pages,
            placement=self.weights.casts.placement,
        )

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        state: State,
        *,
        slots: Sequence[int],
        lengths: Sequence[int],
        phase: str,
        every: bool = False,
    ) -> Tensor:
        """Run tokens [B, T] (`lengths` of each row real) and advance the slots.

        Returns logits of each row's last real token [B, vocab], or of every token [B, T, vocab] when `every`.
        """
        if self.recipe.execution.fused and phase == "decode" and isinstance(self.probe, NoProbe):
            from variants.fused_step import decode_step

            return decode_step(self, state, slots[0], tokens[0], self._steps)
        last, all_ = self._run(tokens, state.batch(slots, lengths, tokens.shape[1], self.device), state, phase)
        run = self.phases[phase]
        return run.logits(*all_) if every else run.logits(*last)[:, 0]

    @torch.inference_mode()
    def forward_both(
        self, tokens: Tensor, state: State, *, slots: Sequence[int], lengths: Sequence[int], every: bool
    ) -> tuple[Tensor, Tensor | None]:
        """As `forward` in prefill: logits of each row's last token, by themselves, and those of every token or None."""
        batch = state.batch(slots, lengths, tokens.shape[1], self.device)
        last, all_ = self._run(tokens, batch, state, "prefill")
        run = self.phases["prefill"]
        return run.logits(*last)[:, 0], run.logits(*all_) if every else None

    def _run(self, tokens: Tensor, batch: Batch, state: State, phase: str) -> tuple[Pair, Pair]:
        """The residual stream, as stored and unrounded: of each row's last real token, and of all."""
        self.probe.begin(Step(phase, batch.slots, batch.starts, batch.lengths))
        h, unrounded = self.phases[phase](tokens, batch, state)
        state.advance(batch.slots, batch.lengths)
        return (_last(h, batch), _last(unrounded, batch)), (h, unrounded)


def _last(x: Tensor, batch: Batch) -> Tensor:
    """[B, T, D] -> [B, 1, D] of each row's last real token."""
    if batch.real is None:
        return x[:, -1:]
    rows = torch.arange(x.shape[0], device=x.device)
    return x[rows, torch.tensor(batch.lengths, device=x.device) - 1].unsqueeze(1)
