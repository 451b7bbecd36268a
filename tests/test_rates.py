"""Rates of engines that are asked from outside: what a step is, what is refused, both sides run as they should."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import SMALL, casts

from harness import rates_runner, rates_vllm
from harness.compose import load, named_variant
from harness.engines.local import LocalEngine
from harness.rates import PROMPT, Asked, Rates, parted, stepped
from variants.checkpoint_write import write_checkpoint
from variants.errors import EngineError, UsageError

ASKED = Asked(contexts=(5,), batches=(1, 3), prefills=(7,), steps=3, seed=0)
needs_library = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is optional")


def test_a_run_is_its_prefill_and_its_steps() -> None:
    """All but the last steps belong to the prompt, however many pieces it ran in."""
    left = iter([True, True, True, False])
    assert len(stepped(lambda: next(left))) == 4
    prefill, step = parted([10.0, 20.0, 1.0, 2.0, 3.0], 3)
    assert (prefill, step.median, step.repeats) == (30.0, 2.0, 3)
    assert ASKED.decodes == [(1, 5), (1, PROMPT), (3, PROMPT)]
    assert len(ASKED.prompts(3, 5, 64)) == 3
    assert ASKED.prompts(1, 5, 64) == ASKED.prompts(1, 5, 64)


def test_what_a_path_cannot_do_is_its_line() -> None:
    """Rows found before stay, and tokens a second are of all sequences."""
    rates = Rates()

    def fails() -> None:
        rates.add("graph", "decode", (8, 32), parted([1.0, 4.0], 1)[1])
        raise RuntimeError("no graph\nmore")

    rates.attempt("graph", fails)
    assert rates.refused == {"graph": "no graph"}
    assert [r.tok_s for r in rates.rows] == [2000.0]
    assert json.loads(json.dumps(rates.record()))["rates"][0]["sequences"] == 8


def test_the_runner_and_the_server_answer_what_is_asked() -> None:
    """Every run gives all its tokens, through the library and through HTTP; too many sequences are refused."""
    engine = LocalEngine(casts(SMALL), load(["variant=paged_absorbed", "variant.execution.batch=3"]).variant, name="p")
    rates = Rates()
    rates_runner.measured(engine, ASKED, rates)
    assert not rates.refused
    assert [(r.path, r.phase, r.sequences, r.tokens) for r in rates.rows] == [
        *(("runner", "decode", *d) for d in ASKED.decodes),
        ("runner", "prefill", 1, 7),
        *(("server", "decode", b, PROMPT) for b in ASKED.batches),
    ]
    lone = LocalEngine(casts(SMALL), named_variant("paged_absorbed"), name="p")
    with pytest.raises(UsageError, match="runs fewer together"):
        rates_runner.measured(lone, ASKED, Rates())


class Vllm:
    """vLLM's engine as far as it is asked: a prompt takes a step, then each step gives every request a token."""

    def __init__(self, *, lost: bool = False) -> None:
        self.left: dict[str, int] = {}
        self.lost, self.graphs = lost, []
        runner = SimpleNamespace(cudagraph_dispatcher=SimpleNamespace(keys_initialized=True))
        self.dispatcher = runner.cudagraph_dispatcher
        worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
        self.model_executor = SimpleNamespace(driver_worker=worker)

    def add_request(self, name: str, prompt: dict[str, list[int]], sampling: SimpleNamespace) -> None:
        assert prompt["prompt_token_ids"]
        self.left[name] = sampling.max_tokens

    def step(self) -> list[SimpleNamespace]:
        self.graphs.append(self.dispatcher.keys_initialized)
        self.left = {name: n - 1 for name, n in self.left.items()}
        done = [name for name, n in self.left.items() if n == 0]
        self.left = {name: n for name, n in self.left.items() if n}
        return [SimpleNamespace(finished=not self.lost) for _ in done]

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)


LIBRARY = SimpleNamespace(SamplingParams=SimpleNamespace)


def test_vllm_runs_with_its_graphs_and_without() -> None:
    """One engine; its dispatcher is as it was afterwards, and a lost answer is an error."""
    fake, rates = Vllm(), Rates()
    engine = rates_vllm._Engine(LIBRARY, fake, 64)
    engine.timed("graph", ASKED, rates)
    assert all(fake.graphs)
    fake.graphs.clear()
    engine.without_graphs("eager", ASKED, rates)
    assert not any(fake.graphs)
    assert fake.dispatcher.keys_initialized
    assert [r.path for r in rates.rows] == ["graph"] * 3 + ["eager"] * 4
    assert rates.rows[0].ms.repeats == ASKED.steps
    with pytest.raises(EngineError, match="answered 0 of 2"):
        rates_vllm._Engine(LIBRARY, Vllm(lost=True), 64).run([[1], [2]], 2)


def test_vllm_chooses_experts_by_its_tokens() -> None:
    """Biases are zeroed where they lie, nothing else is; a model without any is refused."""
    model = torch.nn.Module()
    model.gate = torch.nn.Linear(2, 3, bias=False)
    model.gate.e_score_correction_bias = torch.nn.Parameter(torch.ones(3))
    before, weight = model.gate.e_score_correction_bias.data_ptr(), model.gate.weight.clone()
    assert rates_vllm.without_biases(model) == 1
    assert model.gate.e_score_correction_bias.data_ptr() == before
    assert not model.gate.e_score_correction_bias.any()
    assert torch.equal(model.gate.weight, weight)
    with pytest.raises(EngineError, match="no router"):
        rates_vllm.without_biases(torch.nn.Linear(2, 3))


def test_vllm_is_given_room_for_what_is_asked() -> None:
    """Graphs for the batches, and steps as long as the longest prompt."""
    given = rates_vllm.options(Asked(contexts=(8192,), batches=(1, 64), prefills=(4096,), steps=8, seed=0),
                               memory=0.9, backend=None)  # fmt: skip
    assert given["compilation_config"]["cudagraph_capture_sizes"] == [1, 64]
    assert given["max_num_batched_tokens"] == 4096
    assert given["max_model_len"] > 8192 + 8
    assert "attention_backend" not in given


@needs_library
def test_the_library_runs_on_our_tensors_as_on_its_own(tmp_path: Path) -> None:
    """The bits of a checkpoint that it loaded itself, with masks made before a step too; experts lie where ours do."""
    from harness.engines.transformers_engine import TransformersEngine
    from harness.engines.transformers_load import modeling
    from harness.rates_library import _Sequence, library_model, lone_masks

    config = replace(SMALL, moe_intermediate_size=16)  # rows of 16 bytes, which the grouped product asks for
    held = casts(config)
    write_checkpoint(held.checkpoint, tmp_path)
    ids = torch.tensor([[5, 9, 2, 7, 3]])
    with torch.inference_mode():
        ours = library_model(held)
        theirs = TransformersEngine.load(tmp_path, dtype="bf16")._loaded.model
        assert torch.equal(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)
        steps = []
        for masks in (None, lone_masks(ids.device)):
            sequence = _Sequence(ours, modeling("cpu"))
            sequence(ids)
            steps.append(sequence(ids[:, :1], masks))
        assert torch.equal(*steps)
    layer = config.moe_layers.index(True)
    first = held.checkpoint.tensors[f"model.layers.{layer}.block_sparse_moe.experts.0.w1.weight"]
    assert ours.model.layers[layer].mlp.experts.gate_up_proj.data_ptr() == first.data_ptr()
