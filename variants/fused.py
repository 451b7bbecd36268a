"""One decode step of one sequence as a list of launches over static buffers, the same bits as the plain path.

Built for a model, a state and a slot: every address is fixed, the token and its position are on the device, and the
next token is chosen there, so the whole list can be replayed as one graph (`variants.graph`) without the host.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from variants.axes import Graph
from variants.binding import Binder
from variants.fused_experts import mixture
from variants.fused_layers import Buffers, Launch, dense, head, kda, mla, starting
from variants.fused_step import TAKEN, carried_by
from variants.model_config import LayerKind
from variants.state import State

if TYPE_CHECKING:
    from variants.model import Model


@dataclass
class FusedStep:
    """The launches of a step. `step` runs one on a given token; `run` goes on greedily, without the host."""

    buffers: Buffers
    launches: list[Launch]
    carried: tuple[Tensor, ...]
    graph: Graph
    replay: Callable[[], None] | None = field(default=None, init=False)

    @classmethod
    def of(cls, model: "Model", state: State, slot: int) -> "FusedStep":
        """Bind every launch to the weights and to the slot's part of the state."""
        buffers = Buffers.of(model.config, state, model.device, taken=TAKEN)
        where = Binder(model.config, model.recipe, model.weights, model.probe, -1, "decode")
        launches = starting(where, buffers)
        for layer, kind in enumerate(model.config.layer_kinds):
            b = where.on(layer)
            launches += (kda if kind is LayerKind.kda else mla)(b, buffers, state, slot)
            launches += (mixture if model.config.moe_layers[layer] else dense)(b, buffers)
        launches += head(where.on(model.config.num_layers), buffers)
        return cls(buffers, launches, carried_by(state), model.recipe.execution.graph)

    def step(self, token: Tensor, position: int) -> Tensor:
        """Logits [1, V] after one token [1] at a position; the state has moved on by it."""
        self.begin(token, position)
        self.run(1)
        return self.buffers.logits.clone().unsqueeze(0)

    @torch.inference_mode()
    def begin(self, token: Tensor, position: int) -> None:
        """What the next step reads: its token and where it stands."""
        self.buffers.token.copy_(token)
        self.buffers.position.fill_(position)

    @torch.inference_mode()
    def run(self, steps: int) -> None:
        """So many steps, each on the token that the one before it chose."""
        if self.graph is Graph.cuda and self.replay is None:
            from variants.graph import captured

            self.replay = captured(self.launch, (*self.carried, *self.buffers.moved))
        for _ in range(steps):
            (self.replay or self.launch)()

    def launch(self) -> None:
        for one in self.launches:
            one()

    def taken(self, steps: int) -> list[int]:
        """The last tokens that were chosen on the device."""
        count = int(self.buffers.count)
        return [int(self.buffers.taken[i % TAKEN]) for i in range(count - steps, count)]
