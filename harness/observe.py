"""What really ran: dtypes read off the values at every site, and the torch operations that were dispatched there.

Nothing here reads a declaration to fill an observation. A dispatch mode sees each operation with the dtypes of its
operands and the function of ours that called it; a probe sees each value as it arrives and as it leaves. Afterwards
the two are held against the recipe, and any difference is a finding.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from harness.implementations import JOINED, JOINED_UP, expected_function
from harness.observation import Observed, SiteObservation
from harness.short_run import short_run
from variants.dtypes import DType, dtype_of, narrowest_holding
from variants.model import Model
from variants.ops import calls
from variants.recipe import Recipe, Rule
from variants.rounding import NoProbe, RoundAt, Step
from variants.sites import INTEGER, rule_key
from variants.weights import Casts, Weights

FLOATS = {d.torch: d for d in DType}
# Operations that move values and compute none.
MOVES = {
    "_to_copy", "copy_", "cat", "stack", "view", "clone", "slice", "select", "index_put_", "zeros", "empty",
    "new_zeros", "unsqueeze", "squeeze", "expand", "split", "split_with_sizes", "t", "transpose", "permute", "detach",
    "index", "_unsafe_view", "as_strided", "alias", "fill_", "zero_", "full", "full_like", "new_full", "new_empty",
    "eye", "arange", "embedding", "unbind", "gather", "masked_fill", "masked_fill_", "where", "tril", "triu", "to",
    "chunk", "contiguous", "flatten", "unflatten", "take_along_dim", "index_fill", "constant_pad_nd", "reshape",
    "scalar_tensor", "ones", "_reshape_alias", "lift_fresh",
}  # fmt: skip
OPS, MODEL = "variants.ops.", "variants.model"  # the model calls layers, layers call operations
# Algorithms that only move or choose values: what leaves may be as narrow as what arrived.
MOVING = {"copy", "operand", "gather", "top_k_lowest_id"}
MOVED_ALONE = {"kda_ainv", "kda_kg"}  # in a chunk of one token the first is one and the second k as it arrived
MIN_ELEMENTS = 16  # fewer values may fit a narrow format by chance


class _Dispatched(TorchDispatchMode):
    """Collects "operation:dtype of its floating result" and "function of `variants.ops` that called it:dtype"."""

    def __init__(self) -> None:
        super().__init__()
        self.arithmetic: set[str] = set()
        self.functions: set[str] = set()
        self.launches: set[str] = set()
        self.sequence = hashlib.sha256()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # else torch imports its compiler, over a second, to keep it off this
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        first = out[0] if isinstance(out, tuple | list) and out else out
        if first is None:  # an operation of another library that writes into what it is given
            first = next((x for x in args if isinstance(x, Tensor)), None)
        if name not in MOVES and isinstance(first, Tensor) and first.dtype in FLOATS:
            dtype = FLOATS[first.dtype].name
            self.arithmetic.add(f"{name}:{dtype}")
            self.sequence.update(f"{name} {dtype} {tuple(first.shape)}\n".encode())
            caller = _calling_op()
            if caller:
                self.functions.add(f"{caller}:{dtype}")
        return _defined(out)

    def launched(self, kernel: str, tensors: list[Tensor], settings: str) -> None:
        """A Triton kernel is about to run; what torch's dispatch sees of it is at most its buffers."""
        dtypes = sorted({FLOATS[x.dtype].name for x in tensors if x.dtype in FLOATS})
        self.launches.add(f"{_calling_op()}/{kernel}:{','.join(dtypes)}")
        self.sequence.update(f"{kernel} {dtypes} {[tuple(x.shape) for x in tensors]} {settings}\n".encode())

    def take(self) -> tuple[set[str], set[str], set[str]]:
        taken = self.arithmetic, self.functions, self.launches
        self.arithmetic, self.functions, self.launches = set(), set(), set()
        return taken


def _defined(out: object) -> object:
    """What an operation returned, fit to go back through torch: a tensor that it left undefined came as None."""
    if isinstance(out, list) and any(x is None for x in out):
        return [torch.empty(0) if x is None else x for x in out]
    return out


def _calling_op() -> str | None:
    """The outermost function of variants.ops on the stack: the implementation that a layer dispatched to."""
    frame, found = sys._getframe(1), None
    while frame is not None and (module := frame.f_globals.get("__name__", "")) != MODEL:
        if module.startswith(OPS) and not frame.f_code.co_name.startswith("<"):
            found = frame
        frame = frame.f_back
    return found and f"{found.f_globals['__name__'].rsplit('.', 1)[-1]}.{found.f_code.co_name}"


class ObserveProbe:
    """Sees each value before and after its rounding; operations dispatched between two belong to the later."""

    def __init__(self, dispatched: _Dispatched) -> None:
        self.dispatched, self.phase = dispatched, "prefill"
        self.places: dict[str, SiteObservation] = {}

    def begin(self, step: Step) -> None:
        self.phase = step.phase
        self.dispatched.take()

    def bind(self, site: str, layer: int, rule: Rule, rounding: RoundAt | None) -> RoundAt | None:
        def seen(x: Tensor) -> Tensor:
            arithmetic, functions, launches = self.dispatched.take()
            y = x if rounding is None else rounding(x)
            if site not in INTEGER:
                with _disable_current_modes():  # looking at a value is not part of what ran
                    self._record(f"{site}.{self.phase}@{layer}", x, y)
            place = self.places.setdefault(f"{site}.{self.phase}@{layer}", SiteObservation())
            place.arithmetic |= arithmetic
            place.functions |= functions
            place.launches |= launches
            self.dispatched.take()
            return y

        return seen

    def _record(self, key: str, x: Tensor, y: Tensor) -> None:
        place = self.places.setdefault(key, SiteObservation())
        place.arrives.add(dtype_of(x).name)
        place.leaves.add(dtype_of(y).name)
        if x.numel() >= MIN_ELEMENTS and bool((x != 0).any()):
            arriving = narrowest_holding(x).name
            place.arriving_values.add(arriving)
            place.values.add(arriving if y is x else narrowest_holding(y).name)
        place.devices.add(y.device.type)


def observe(recipe: Recipe, casts: Casts, prompt: Sequence[int], *, wrap: object = None) -> Observed:
    """Run a prompt and one decoded token under watch, and hold what was seen against the recipe.

    As many rows as the recipe runs together, all of this prompt. wrap: a probe inside the watch, as tests plant lies.
    """
    dispatched = _Dispatched()
    probe = ObserveProbe(dispatched)
    inner = wrap or NoProbe()
    both = _Both(probe, inner)  # pyright: ignore[reportArgumentType]
    model = Model(casts.checkpoint.config, recipe, Weights(casts, recipe.semantics), probe=both)
    with dispatched, _launches(recipe, dispatched):
        passes = short_run(model, [tuple(prompt)] * recipe.execution.batch)
    found = tuple(contradictions(recipe, probe.places))
    return Observed(probe.places, found, dispatched.sequence.hexdigest(), passes)


@contextmanager
def _launches(recipe: Recipe, dispatched: _Dispatched) -> Iterator[None]:
    """Watch calls of our CPU kernels and of what torch.compile made, and Triton's launches.

    A process that has not imported triton has none of these.
    """
    with calls.watched(dispatched.launched):
        if recipe.implementations <= {"torch", "native", "inductor"} and "triton" not in sys.modules:
            yield
            return
        from harness.launches_triton import watched

        with watched(dispatched.launched):
            yield


class _Both:
    """An inner probe's doing, seen by an outer one."""

    def __init__(self, outer: ObserveProbe, inner: NoProbe) -> None:
        self.outer, self.inner = outer, inner

    def begin(self, step: Step) -> None:
        self.inner.begin(step)
        self.outer.begin(step)

    def bind(self, site: str, layer: int, rule: Rule, rounding: RoundAt | None) -> RoundAt | None:
        return self.outer.bind(site, layer, rule, self.inner.bind(site, layer, rule, rounding))


def contradictions(recipe: Recipe, places: Mapping[str, SiteObservation]) -> list[str]:
    """One line for each way in which what was seen is not what the recipe says."""
    found = []
    for key, seen in places.items():
        name, layer = key.split("@")
        site, phase = name.rsplit(".", 1)
        if site in INTEGER or (site in MOVED_ALONE and _chunks_of_one(recipe, int(layer), phase)):
            continue
        rule = recipe.rule(site, int(layer), phase)
        joined = recipe.fused_projections or site in JOINED or (recipe.fused_gate_up and site in JOINED_UP)
        lines = _contradicts(rule, seen) + _another_function(site, rule, seen, joined=joined)
        found += [f"layer {layer} {rule_key(site, phase)}: {line}" for line in lines]
    return found


def _chunks_of_one(recipe: Recipe, layer: int, phase: str) -> bool:
    """Whether the chunked core has one token at a time."""
    size = dict(recipe.rule("kda_core", layer, phase).options).get("chunk_size", 0)
    return size == 1 or phase == "decode" or recipe.execution.prefill_piece == 1


def _contradicts(rule: Rule, seen: SiteObservation) -> list[str]:
    lines = []
    storage = {rule.storage.name} if rule.storage else seen.arrives
    if seen.leaves != storage:
        lines.append(f"stored as {_list(seen.leaves)}, declared {_list(storage)}")
    if rule.output and any(DType[v].precision > rule.output.precision for v in seen.values):
        lines.append(f"values are {_list(seen.values)}, declared rounded to {rule.output.name}")
    return lines + (_lost(rule, seen) if rule.algorithm in MOVING else _undeclared(rule, seen))


def _undeclared(rule: Rule, seen: SiteObservation) -> list[str]:
    """Arithmetic in another dtype than declared, or values narrower than anything declared.

    Around a kernel torch only prepares its operands.
    """
    lines = []
    dtypes = {a.rsplit(":", 1)[1] for a in seen.arithmetic} if rule.impl == "torch" else set()
    if dtypes and rule.accum.name not in dtypes:
        lines.append(f"computed in {_list(dtypes)}, declared {rule.accum.name}")
    floor = rule.output or rule.accum
    narrow = {v for v in seen.values if DType[v].precision < min(floor.precision, rule.accum.precision)}
    if narrow and seen.values == narrow:
        lines.append(f"values fit {_list(narrow)}, though {floor.name} was declared: an undeclared rounding")
    return lines


def _lost(rule: Rule, seen: SiteObservation) -> list[str]:
    """Values that left a place which only moves them narrower than they arrived, without a declared rounding."""
    least = min((DType[v].precision for v in seen.arriving_values), default=0)
    declared = least if rule.output is None else min(least, rule.output.precision)
    lost = {v for v in seen.values if DType[v].precision < declared}
    return [f"values fit {_list(lost)} but arrived wider: an undeclared rounding"] if lost else []


def _another_function(site: str, rule: Rule, seen: SiteObservation, *, joined: bool) -> list[str]:
    """Another function of ours than declared, or that one in another dtype; a kernel where none was declared."""
    expected = expected_function(site, rule)
    if rule.impl == "torch" and seen.launches:
        return [f"ran {_list({x.split(':')[0] for x in seen.launches})}, declared impl torch"]
    if rule.impl != "torch" and expected:
        ran = {x.split("/")[0] for x in seen.launches} | {f.split(":")[0] for f in seen.functions}
        return (
            []
            if expected in ran or (joined and not ran)
            else [f"ran {_list(ran)}, declared {expected} (impl {rule.impl})"]
        )
    if not expected or (joined and not seen.arithmetic):  # the first of a joined product stands for all
        return []
    dtypes = {f.split(":")[1] for f in seen.functions if f.split(":")[0] == expected}
    if not dtypes:
        return [f"ran {_list(seen.functions)}, declared {expected}"]
    if rule.accum.name in dtypes:
        return []
    return [f"{expected} ran in {_list(dtypes)}, declared {rule.accum.name}"]


def _list(names: set[str]) -> str:
    return "/".join(sorted(names)) or "nothing"
