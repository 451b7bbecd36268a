"""The MLP blocks of a layer: dense, and experts behind a sigmoid router. x is [B, T, D], N = B * T tokens."""

from collections.abc import Callable

import torch
from torch import Tensor

from variants.binding import Binder
from variants.dtypes import round_to
from variants.ops import moe
from variants.ops.norm import SIGMOID, SILU
from variants.rounding import adds_at_once, both_bf16, pinned

Route = Callable[[Tensor], tuple[Tensor, Tensor]]


class Swiglu:
    """A gated MLP: the dense layer's and the shared expert's."""

    def __init__(self, b: Binder, sites: str, name: str) -> None:
        names = {f"{sites}_gate": f"{name}.gate_proj", f"{sites}_up": f"{name}.up_proj"}
        self.project = b.linears(fused=b.recipe.fused_gate_up, **names)
        self.accum, self.silu = b.rule(f"{sites}_act").accum, SILU[b.rule(f"{sites}_silu").algorithm]
        self.round_silu, self.round_act = b.at(f"{sites}_silu", self.accum), b.at(f"{sites}_act", self.accum)
        bind = b.kernel("silu_and_mul", f"{sites}_act")
        self.activate = self._activate if bind is None else bind(b)
        self.down_in, self.down = b.at(f"{sites}_down_in"), b.linear(f"{sites}_down", f"{name}.down_proj")

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.down_in(self.round_act(self.activate(*self.project(x)))))

    def _activate(self, gate: Tensor, up: Tensor) -> Tensor:
        gate = pinned(self.round_silu(self.silu(pinned(gate, self.accum))), self.accum)
        return gate * pinned(up, self.accum)


class DenseBlock:
    """The MLP of a layer without experts."""

    def __init__(self, b: Binder) -> None:
        self.operand, self.mlp = b.at("mlp_in"), Swiglu(b, "mlp", "mlp")

    def __call__(self, x: Tensor) -> Tensor:
        return self.mlp(self.operand(x))


class MoeBlock:
    """Sigmoid router, chosen experts, shared expert."""

    def __init__(self, b: Binder) -> None:
        c, name = b.config, "block_sparse_moe"
        self.config, self.operand, self.router_in = c, b.at("mlp_in"), b.at("router_in")
        self.logits = b.linear("router", f"{name}.gate")
        self.score_accum, self.sigmoid = b.rule("router_scores").accum, SIGMOID[b.rule("router_scores").algorithm]
        self.bias = b.parameter(f"{name}.gate.e_score_correction_bias", "router_scores")
        self.weigh = moe.WEIGHTS[b.rule("router_weights").algorithm]
        self.round_scores, self.round_ids = b.at("router_scores", self.score_accum), b.at("router_ids")
        self.round_weights = b.at("router_weights", self.score_accum)
        bind = b.kernel("route", "router_weights")
        self.route = self._choose if bind is None else self._shown(bind(b, self.bias))
        self._bind_experts(b, f"model.layers.{b.layer}.{name}")
        self.shared = Swiglu(b, "shared", f"{name}.shared_experts") if c.num_shared_experts else None
        self.sum_accum, self.round_combine = b.rule("combine").accum, b.at("combine")
        self.at_once = adds_at_once(b.rule("combine"), b.probe)

    def _bind_experts(self, b: Binder, name: str) -> None:
        w13, w2 = expert_weights(b, name)
        routed = b.rule("routed")
        bind = b.kernel("experts", "routed")
        self.routed = self._routed if bind is None else bind(b, w13, w2)
        self.round_routed = b.at("routed", routed.accum if bind is None else routed.storage or routed.accum)
        if bind is not None:
            return
        self.up = [b.product("expert_gate_up", w) for w in w13]
        self.down = [b.product("expert_down", w) for w in w2]
        self.act_accum, self.silu = b.rule("expert_act").accum, SILU[b.rule("expert_silu").algorithm]
        self.round_silu, self.round_act = b.at("expert_silu", self.act_accum), b.at("expert_act", self.act_accum)
        self.down_in = b.at("expert_down_in")
        self.out_accum, self.round_out = b.rule("expert_out").accum, b.at("expert_out", b.rule("expert_out").accum)
        self.sum = moe.SUM[routed.algorithm]
        rounding = routed.output
        self.round_each = (lambda y: round_to(y, rounding)) if routed.option("round_each") and rounding else None

    def __call__(self, x: Tensor) -> Tensor:
        ids, weights = self._route(x.flatten(0, 1))
        x = self.operand(x)
        routed = self.round_routed(self.routed(x.flatten(0, 1), ids, weights))
        routed = routed.view(*x.shape[:2], -1)
        if self.shared is None:
            return self.round_combine(pinned(routed, self.sum_accum))
        shared = self.shared(x)
        if self.at_once and both_bf16(routed, shared):
            return routed + shared
        return self.round_combine(pinned(routed, self.sum_accum) + pinned(shared, self.sum_accum))

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.route(self.logits(self.router_in(x)))

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = pinned(self.round_scores(self.sigmoid(pinned(logits, self.score_accum))), self.score_accum)
        ids = self.round_ids(moe.top_k_lowest_id(scores + self.bias, self.config.experts_per_token))
        chosen = scores.gather(-1, ids)
        return ids, self.round_weights(self.weigh(chosen, self.config.routed_scaling_factor, self.config.renormalize))

    def _shown(self, route: Route) -> Route:
        """A kernel's choice, passed through its sites."""

        def shown(logits: Tensor) -> tuple[Tensor, Tensor]:
            ids, weights = route(logits)
            weights = self.round_weights(weights)
            return self.round_ids(ids), weights

        return shown

    def _routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = self._experts(x, ids) * weights.to(self.out_accum.torch).unsqueeze(-1)
        return self.sum(pinned(self.round_out(out), self.out_accum), ids, self.round_each)

    def _experts(self, x: Tensor, ids: Tensor) -> Tensor:
        """Each token through its chosen experts: x [N, D], ids [N, k] -> [N, k, D] in the dtype of the weighting."""
        if x.shape[0] == 1:
            return torch.stack([self._expert(e, x) for e in ids[0].tolist()], 1)
        experts, counts = ids.unique(return_counts=True)
        order = ids.flatten().argsort(stable=True)  # rows of one expert lie together, in the order of their tokens
        rows = x[order // ids.shape[1]].split(counts.tolist())
        done = torch.cat([self._expert(e, row) for e, row in zip(experts.tolist(), rows, strict=True)])
        return torch.empty_like(done).index_copy_(0, order, done).view(*ids.shape, -1)

    def _expert(self, e: int, x: Tensor) -> Tensor:
        gate, up = self.up[e](x).chunk(2, -1)
        gate = pinned(self.round_silu(self.silu(pinned(gate, self.act_accum))), self.act_accum)
        y = self.down[e](self.down_in(self.round_act(gate * pinned(up, self.act_accum))))
        return pinned(y, self.out_accum)


def expert_weights(b: Binder, name: str) -> tuple[Tensor, Tensor]:
    """Gate and up [E, 2 I, D], and down [E, D, I], of a layer's experts."""

    def stacked(site: str, *leaves: str) -> Tensor:
        held = b.lies(site, f"{name}.experts.0.{leaves[0]}.weight")
        return b.weights.experts(name, leaves, b.config.num_experts, held, operand=b.rule(site).weights)

    return stacked("expert_gate_up", "w1", "w3"), stacked("expert_down", "w2")
