"""A decode step of one sequence as one list of operations over fixed memory: which there is, and when it is made."""

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from variants.axes import Impl
from variants.state import State

if TYPE_CHECKING:
    from variants.model import Model

TAKEN = 1 << 16  # tokens that a step list remembers


class Step(Protocol):
    """A step bound to a model, a state and one of its slots; the carried tensors are those that it writes to."""

    carried: tuple[Tensor, ...]

    def step(self, token: Tensor, position: int) -> Tensor:
        """Logits [1, V] after one token [1] at a position; the state has moved on by it."""
        ...

    def begin(self, token: Tensor, position: int) -> None:
        """What the next step reads: its token and where it stands."""
        ...

    def run(self, steps: int) -> None:
        """So many steps, each on the token that the one before it chose."""
        ...

    def taken(self, steps: int) -> list[int]:
        """The last tokens that were chosen."""
        ...


def carried_by(state: State) -> tuple[Tensor, ...]:
    return tuple(x for store in _stores(state) for x in store.values())


def _stores(state: State) -> tuple[dict[int, Tensor], ...]:
    return state.conv, state.recurrent, state.latent, state.keys, state.values


@torch.inference_mode()
def fused_step(model: "Model", state: State, slot: int, kept: Any) -> Step:
    """The step list of a state's slot, made again where its tensors were exchanged."""
    found = kept.get(state)
    if found is None or found[0] != slot or not _fits(found[1], state):
        for store in _stores(state):
            for layer, x in store.items():
                store[layer] = x.contiguous()
        kept[state] = found = (slot, _made(model, state, slot))
    return found[1]


def _fits(step: Step, state: State) -> bool:
    return all(a.data_ptr() == b.data_ptr() for a, b in zip(step.carried, carried_by(state), strict=True))


def _made(model: "Model", state: State, slot: int) -> Step:
    if Impl.native.name in model.recipe.implementations:
        from variants.native_step import NativeStep

        return NativeStep.of(model, state, slot)
    from variants.fused import FusedStep  # it imports triton

    return FusedStep.of(model, state, slot)


@torch.inference_mode()
def decode_step(model: "Model", state: State, slot: int, token: Tensor, kept: Any) -> Tensor:
    """As `Model.forward` of one token in decode: logits [1, V]; the slot has one token more."""
    step = fused_step(model, state, slot, kept)
    return step.step(token, state.take_one(slot))
