"""Whether what a sequence carries is left alone between two forwards of a model.

Operations are watched inside a forward; what decode loop, scheduler and snapshots do between two of them is the same
for a variant, its watched twin and the oracle, so no comparison of these shows it. Nothing may happen there: a slot
holds, bit for bit, what some forward left after the very tokens that it stands for, and nothing after none.
"""

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from harness.reused_slot import SITES
from harness.verdict import Finding
from variants.batch import NOBODY
from variants.model import Model
from variants.runner import Runner
from variants.state import SLOTTED, State

INSTRUMENT = "between_forwards"
Tokens = tuple[int, ...]
Digests = dict[tuple[int, str], bytes]  # by layer and store, in the order of layers


class Untouched:
    """Watches every forward of a model. stands_for(slot): the tokens that a slot is said to hold.

    found: the first thing that is not as a forward left it.
    """

    def __init__(self, model: Model, stands_for: Callable[[int], Tokens]) -> None:
        self.stands_for, self.found = stands_for, None
        self.left: dict[Tokens, list[Digests]] = {}
        forward, forward_both = model.forward, model.forward_both

        def one(tokens: Tensor, state: State, *, slots: Sequence[int], lengths: Sequence[int], **how: object) -> Tensor:
            after = self._before(tokens, state, slots, lengths)
            out = forward(tokens, state, slots=slots, lengths=lengths, **how)  # pyright: ignore[reportArgumentType]
            self._after(after, state)
            return out

        def both(
            tokens: Tensor, state: State, *, slots: Sequence[int], lengths: Sequence[int], **how: object
        ) -> tuple[Tensor, Tensor | None]:
            after = self._before(tokens, state, slots, lengths)
            out = forward_both(tokens, state, slots=slots, lengths=lengths, **how)  # pyright: ignore[reportArgumentType]
            self._after(after, state)
            return out

        model.forward, model.forward_both = one, both

    def _before(self, tokens: Tensor, state: State, slots: Sequence[int], lengths: Sequence[int]) -> dict[int, Tokens]:
        """Look at every slot of a pass; what it will stand for afterwards."""
        after: dict[int, Tokens] = {}
        for row, slot, n in zip(tokens.tolist(), slots, lengths, strict=True):
            if slot != NOBODY:
                held = self.stands_for(slot)
                self.found = self.found or self._look(state, slot, held)
                after[slot] = (*held, *row[:n])
        return after

    def _after(self, after: dict[int, Tokens], state: State) -> None:
        for slot, held in after.items():
            known, now = self.left.setdefault(held, []), digests(state, slot, len(held))
            if now not in known:
                known.append(now)

    def _look(self, state: State, slot: int, held: Tokens) -> Finding | None:
        if state.length[slot] != len(held):
            return _finding(f"a slot has {state.length[slot]} tokens where its sequence has {len(held)}")
        if not held:
            full = [key for key, x in _held(state, slot, state.max_len) if bool((x != 0).any())]
            return _at(full[0], "a slot that is taken holds something") if full else None
        if held not in self.left:
            return _finding(f"a slot stands for {len(held)} tokens after which no forward has left anything")
        now = digests(state, slot, len(held))
        if now in self.left[held]:
            return None
        last = self.left[held][-1]
        key = next(key for key in now if now[key] != last[key])
        return _at(key, f"after {len(held)} tokens a slot does not hold what a forward left after them")


def of_runner(runner: Runner) -> Callable[[int], Tokens]:
    """What the requests of a runner say that its slots hold. Raises KeyError for a slot that no request has."""

    def stands_for(slot: int) -> Tokens:
        live = {x.slot: x for x in runner.live.values()}[slot]
        return (*live.request.ids, *live.made)[: live.computed]

    return stands_for


def digests(state: State, slot: int, length: int) -> Digests:
    """Of each store, what a slot holds of its first `length` tokens."""
    return {key: _digest(x) for key, x in _held(state, slot, length)}


def _held(state: State, slot: int, length: int) -> list[tuple[tuple[int, str], Tensor]]:
    found = [
        ((layer, store), x[slot] if store in SLOTTED else x[state.tables[slot]].flatten(0, 1)[:length])
        for store in SITES
        for layer, x in getattr(state, store).items()
    ]
    return sorted(found, key=lambda item: item[0][0])  # stable: a layer's stores as SITES has them


def _digest(x: Tensor) -> bytes:
    return hashlib.blake2b(x.contiguous().cpu().view(torch.uint8).numpy().tobytes(), digest_size=16).digest()


def _at(key: tuple[int, str], what: str) -> Finding:
    layer, store = key
    return _finding(f"layer {layer} {SITES[store]}: {what}", site=SITES[store], layer=layer)


def _finding(what: str, **place: object) -> Finding:
    reason = f"{what}: no operation did that (look at what runs between two forwards: decode, runner, prefix, state)"
    return Finding(instrument=INSTRUMENT, reason=reason, **place)  # pyright: ignore[reportArgumentType]
