"""Paged decode as graphs: the bits of the eager runner, here with every replay a plain call of what is captured."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from test_paged_state import hashes
from tiny import SMALL, Watcher, build, casts, prompt, ragged
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.compose import named_variant
from harness.engines.local import LocalEngine
from variants import decode_graph
from variants.axes import Impl, Preempt, SiteOverride, Store, Variant
from variants.batch import StaticBatch
from variants.decode_graph import DecodeGraphs
from variants.errors import DeviceError, UsageError
from variants.model import Model
from variants.recipe import resolve
from variants.request import Output, Request
from variants.runner import Runner
from variants.state import State

# experts of whole 16 bytes, which the library's grouped product asks for
CONFIG = replace(SMALL, moe_intermediate_size=16)
made = cache(lambda: casts(CONFIG))
ASKED = ((9, 7), (1, 2), (5, 5))  # tokens of the prompt and of the answer
HOST = ("_local_scalar_dense", "nonzero", "bincount", "unique", "lift_fresh", "masked_select")


class NoHost(TorchDispatchMode):
    """Fails at an operation that asks the device something or brings a number of the host to it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not any(name in str(func) for name in HOST), f"{func} in a captured step"
        return func(*args, **(kwargs or {}))


@contextmanager
def hidden(state: State) -> Iterator[None]:
    """What the host knows of slots is not there."""
    known = state.length, state.tables
    state.length = state.tables = None  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        state.length, state.tables = known


@pytest.fixture(autouse=True)
def _plain_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture launches once over nobody's rows; a replay launches again, and neither may know what the host knows."""
    real = DecodeGraphs._launch

    def launch(self: DecodeGraphs, rows: int, step: decode_graph.Step) -> None:
        with hidden(self.state), NoHost():
            real(self, rows, step)

    def captured(launch: Callable[[], None], changed: Sequence[Tensor], device: str) -> Callable[[], None]:
        launch()
        return launch

    monkeypatch.setattr(DecodeGraphs, "_launch", launch)
    monkeypatch.setattr(decode_graph, "captured", captured)


@cache
def variant(**execution: Any) -> Variant:
    """paged_engine_graph with small tiles and pages, since the interpreter pays for each."""
    v = named_variant("paged_engine_graph")
    run: dict[str, Any] = {"batch": 4, "block_size": 4, "prefill_batch": 2, **execution}
    return replace(
        v,
        mla=replace(v.mla, kv_splits=2, tile_k=16, tile_q=16),
        execution=replace(v.execution, **run),
    )


def model(v: Variant, *, eager: bool = False) -> Model:
    return build(v, made(), probe=Watcher() if eager else None)


def run(runner: Runner, asked: Sequence[Request]) -> list[list[Output]]:
    """Outputs by request, the last of them queued when others decode."""
    got: dict[int, list[Output]] = {}
    for number, request in enumerate(asked):
        assert runner.add(request) == number
        if number >= 2:
            for o in runner.step().outputs:
                got.setdefault(o.request, []).append(o)
    while runner.busy:
        for o in runner.step().outputs:
            got.setdefault(o.request, []).append(o)
        runner.scheduler.audit()
    return [got[n] for n in sorted(got)]


def requests() -> list[Request]:
    prompts = ragged([n for n, _ in ASKED], vocab=CONFIG.vocab_size)
    return [Request(ids=tuple(p), max_tokens=n) for p, (_, n) in zip(prompts, ASKED, strict=True)]


SCHEDULES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "fixed rows": {"fixed_rows": True, "batch": 3},
    "few pages": {"pages": 5, "prefill_piece": 4},
    "few pages, offloaded": {"pages": 5, "prefill_piece": 4, "preempt": Preempt.offload},
}


@cache
def eager(name: str) -> tuple[list[list[Output]], Runner]:
    runner = Runner(model(variant(**SCHEDULES[name]), eager=True), max_len=16)
    assert runner.graphs is None
    return run(runner, requests()), runner


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_replayed_step_has_the_bits_of_its_launches(name: str) -> None:
    """Joins, leaves, growing pages, preemption: logits, tokens and every byte of slots and pages are the eager ones."""
    runner = Runner(model(variant(**SCHEDULES[name])), max_len=16)
    assert runner.graphs is not None
    wanted, other = eager(name)
    for ours, theirs in zip(run(runner, requests()), wanted, strict=True):
        assert torch.equal(torch.stack([o.logits for o in ours]), torch.stack([o.logits for o in theirs]))
        assert [(o.token, o.finite, o.finish) for o in ours] == [(o.token, o.finite, o.finish) for o in theirs]
    assert hashes(runner.state) == hashes(other.state)
    for layer, pages in runner.state.latent.items():
        assert torch.equal(pages, other.state.latent[layer])
    assert sorted(runner.graphs.steps) == ([3] if name == "fixed rows" else [1, 2, 4] if "few" not in name else [1, 2])
    assert (runner.stats().preemptions > 0) is name.startswith("few pages")


def test_a_capture_and_rows_that_fill_up_write_nowhere() -> None:
    """No byte of a slot or page moves when steps are captured, and none of others' when one sequence runs in three."""
    runner = Runner(model(variant(fixed_rows=True, batch=3)), max_len=16)
    assert runner.graphs is not None
    for stores in (runner.state.conv, runner.state.recurrent, runner.state.latent):
        for x in stores.values():
            x[:-1].normal_()
    before = hashes(runner.state)
    runner.graphs.prepare(1)
    assert hashes(runner.state) == before
    runner.add(Request(ids=(5, 6, 7), max_tokens=4))
    runner.step()
    before = hashes(runner.state)
    assert [(p.rows, p.lengths) for p in runner.step().passes] == [((0, -1, -1), (1, 0, 0))]
    assert sum(a != b for a, b in zip(before, hashes(runner.state), strict=True)) == 1
    assert not any(x[-1].any() for x in runner.state.latent.values())


@pytest.mark.parametrize("fault", ["stale pages", "written through"])
def test_the_comparison_can_fail(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that are copied once alone, and rows that fill up but write, are seen."""
    if fault == "stale pages":
        real = decode_graph.Inputs.put_pages

        def once(self: decode_graph.Inputs, tables: Sequence[Sequence[int]]) -> None:
            if not any(self._known):
                real(self, tables)

        monkeypatch.setattr(decode_graph.Inputs, "put_pages", once)
    else:
        monkeypatch.setattr(StaticBatch, "written", lambda self, value: (value.flatten(0, 1), self._cells))
    with pytest.raises(AssertionError):
        test_a_replayed_step_has_the_bits_of_its_launches("as it comes")


def test_the_host_is_told_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and finiteness of all rows come as one transfer, greedy ones with no further question."""
    runner, asked = Runner(model(variant()), max_len=16), []
    for p in ragged((4, 2, 3), vocab=CONFIG.vocab_size):
        runner.add(Request(ids=tuple(p), max_tokens=3))
    runner.step()
    real = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: asked.append(tuple(self.shape)) or real(self))
    monkeypatch.setattr(Tensor, "item", lambda self: pytest.fail("a value by itself"))
    monkeypatch.setattr(Tensor, "__bool__", lambda self: pytest.fail("a question by itself"))
    assert len(runner.step().outputs) == 3
    assert asked == [(4, 2)]


def test_forced_and_cancelled_requests_run_as_before() -> None:
    """A forced answer takes its tokens through the graph; one that is cancelled leaves its row to nobody."""
    runner = Runner(model(variant()), max_len=16)
    ids = tuple(prompt(4, vocab=CONFIG.vocab_size))
    led = runner.add(Request(ids=ids, max_tokens=3, forced=(5, 6, 7)))
    gone = runner.add(Request(ids=ids, max_tokens=9))
    tokens = [[o.token for o in runner.step().outputs if o.request == led] for _ in range(2)]
    assert runner.cancel(gone)
    stepped = runner.step()
    assert [*tokens, [o.token for o in stepped.outputs]] == [[5], [6], [7]]
    assert [p.rows for p in stepped.passes] == [(led,)]
    runner.scheduler.audit()


@pytest.mark.parametrize(
    ("execution", "sizes"),
    [({"batch": 6}, "1 2 4 6"), ({"batch": 4}, "1 2 4"), ({"batch": 1, "prefill_batch": 1}, "1"),
     ({"batch": 6, "fixed_rows": True}, "6")],
)  # fmt: skip
def test_the_recipe_says_how_rows_are_filled(execution: dict[str, object], sizes: str) -> None:
    """Its record names the graph and the numbers of rows; without a graph both are absent."""
    v = variant(**execution)
    said = resolve(v, CONFIG).as_dict()["execution"]
    assert isinstance(said, dict)
    assert (said["graph"], said["decode_filled_up_to"]) == ("cuda", sizes)
    assert {v.execution.filled(n) for n in range(1, v.execution.batch + 1)} == {int(n) for n in sizes.split()}
    off = resolve(named_variant("paged_engine"), CONFIG)
    assert "graph" not in str(off.as_dict()["execution"])
    assert off.hash != resolve(named_variant("paged_engine_graph"), CONFIG).hash


def test_what_cannot_be_captured_is_refused() -> None:
    """Another implementation, an override, a CPU, two devices: one line each."""
    v = named_variant("paged_engine_graph")
    for change in (
        {"impl": replace(v.impl, experts=Impl.triton)},
        {"override": {"o_proj": SiteOverride(output=Store.f32)}},
    ):
        with pytest.raises(UsageError, match="replays what fast_decode or paged_engine_graph runs"):
            replace(v, **change)
    with pytest.raises(DeviceError, match=r"execution.graph=cuda needs a CUDA device"):
        LocalEngine(made(), v, name="x")
