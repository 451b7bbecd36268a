"""Nothing happens to what a sequence carries between two forwards: whatever does is named by store and layer."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import tiny
import torch
from torch import Tensor

from harness.as_run import AsRun, as_run
from harness.between import INSTRUMENT, of_runner
from harness.engines.local import LocalEngine
from harness.forced_errors import Battery
from variants import decode, request
from variants.axes import Execution, ExecutionAxes
from variants.decode import Sequences
from variants.model import Model
from variants.runner import Runner
from variants.state import State

BATTERY = Battery(prompts=tiny.ragged([4, 9]), continuations=[tiny.prompt(6, seed=1)] * 2)
MODES = {
    "incremental": tiny.INCREMENTAL,
    "recompute": tiny.RECOMPUTE,
    "paged": ExecutionAxes(mode=Execution.paged, block_size=4, batch=2),
}
Monkey = pytest.MonkeyPatch


def asked(execution: ExecutionAxes = tiny.INCREMENTAL) -> AsRun:
    variant = tiny.plain(tiny.Stream.f32, tiny.Gemm.f32, execution=execution)
    return as_run(LocalEngine(tiny.casts(), variant, name="tiny"), BATTERY)


def told(found: AsRun) -> tuple[str | None, int | None, str]:
    (finding,) = found.findings()
    assert finding.instrument == INSTRUMENT
    return finding.site, finding.layer, finding.reason


@pytest.mark.parametrize("mode", MODES)
def test_a_sound_run_leaves_it_alone(mode: str) -> None:
    assert asked(MODES[mode]).findings() == []


def _late(store: str, layer: int) -> Callable[..., Tensor]:
    right = decode.decode_one_token

    def step(model: Model, state: State, slots: list[int], tokens: Tensor) -> Tensor:
        if state.length[0] > 12:  # beyond all tokens that are held against the definition
            stores = getattr(state, store)
            stores[layer] = stores[layer] * (1 + 2**-20)
        return right(model, state, slots, tokens)

    return step


@pytest.mark.parametrize(("store", "site", "layer"), [("recurrent", "kda_state", 2), ("latent", "kv_cache", 1)])
def test_a_small_change_late_in_an_answer(store: str, site: str, layer: int, monkeypatch: Monkey) -> None:
    """The same in the variant, its watched twin and the oracle: a step of 1e-6 after 13 tokens."""
    monkeypatch.setattr(decode, "decode_one_token", _late(store, layer))
    assert told(asked())[:2] == (site, layer)
    assert "after 13 tokens a slot does not hold what a forward left" in told(asked())[2]


def test_a_row_of_a_batch(monkeypatch: Monkey) -> None:
    """Rows run together where the variant has them so: the second one's state is changed between two steps."""
    right = decode.decode_one_token

    def step(model: Model, state: State, slots: list[int], tokens: Tensor) -> Tensor:
        if len(slots) > 1 and state.length[0] == 6:
            first, second = state.conv[2]
            state.conv[2] = torch.stack([first, second + 2**-30])
        return right(model, state, slots, tokens)

    together = replace(tiny.INCREMENTAL, batch=2)
    assert asked(together).findings() == []
    monkeypatch.setattr(decode, "decode_one_token", step)
    assert told(asked(together))[:2] == ("conv_state", 2)


def test_what_a_pass_of_recompute_finds(monkeypatch: Monkey) -> None:
    """Each pass begins with nothing; what is left over from the pass before, or comes after the reset, is found."""
    right = Sequences.after

    def after(self: Sequences, tokens: Tensor) -> Tensor:
        reset = self.state.reset

        def and_more(slots: list[int]) -> None:
            reset(slots)
            self.state.conv[0] = self.state.conv[0] + 2**-30

        self.state.reset = and_more  # pyright: ignore[reportAttributeAccessIssue]
        return right(self, tokens)

    monkeypatch.setattr(Sequences, "after", after)
    site, layer, reason = told(asked(tiny.RECOMPUTE))
    assert (site, layer) == ("conv_state", 0)
    assert "a slot that is taken holds something" in reason


def test_another_token_than_the_sequence_has(monkeypatch: Monkey) -> None:
    """What is fed is not what the prompt and its answer say: no forward has left anything after those."""
    right = decode.decode_one_token
    monkeypatch.setattr(decode, "decode_one_token", lambda m, s, slots, tokens: right(m, s, slots, tokens * 0 + 3))
    site, _, reason = told(asked())
    assert site is None
    assert "after which no forward has left anything" in reason


def test_a_slot_that_no_request_has() -> None:
    """A LookupError, which a runner's task tells as a defect; a StopIteration would end the task in an internal one."""
    variant = tiny.plain(tiny.Stream.f32, tiny.Gemm.f32, execution=MODES["paged"])
    with pytest.raises(LookupError):
        of_runner(Runner(LocalEngine(tiny.casts(), variant, name="tiny").model, max_len=8))(0)


def test_a_length_that_is_another(monkeypatch: Monkey) -> None:
    right = State.advance

    def advance(self: State, slots: list[int], lengths: list[int]) -> None:
        right(self, slots, lengths)
        self.length[slots[0]] -= self.length[slots[0]] == 6

    monkeypatch.setattr(State, "advance", advance)
    assert "a slot has 5 tokens where its sequence has 6" in told(asked(MODES["paged"]))[2]


def test_a_choice_that_is_not_the_largest(monkeypatch: Monkey) -> None:
    """Ties go to the lowest id; greedy decoding is held against another library's."""
    monkeypatch.setattr("harness.as_run.greedy", lambda logits: logits.argmin(-1))
    (finding,) = asked().findings()
    assert "is chosen where the lowest id of the largest logit is" in finding.reason


def test_a_choice_of_rounded_logits(monkeypatch: Monkey) -> None:
    """No token of this battery hangs on a last place, and no choice may: made logits do."""
    monkeypatch.setattr("harness.as_run.greedy", lambda logits: logits.bfloat16().argmax(-1))
    (finding,) = asked().findings()
    assert "token 2 is chosen where the lowest id of the largest logit is 5" in finding.reason
    monkeypatch.undo()
    right = request.told
    monkeypatch.setattr("harness.as_run.told", lambda logits: right(logits.bfloat16()))
    assert "token 2 is chosen" in asked(MODES["paged"]).findings()[0].reason
