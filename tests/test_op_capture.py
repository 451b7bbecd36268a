"""One captured operation: its inputs found, its bits run again from the file, and a planted fault that shows."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from experiments.cli import main
from harness.localize import Passed, Runner, Spot
from harness.op_capture import OpCapture, capture_op
from harness.op_file import HEADER, read_capture, write_capture
from harness.op_replay import replay_op
from harness.probes import chain
from variants.axes import (
    Execution,
    Gemm,
    KdaAxes,
    KdaCore,
    MlaAxes,
    MlaCore,
    NormAxes,
    NormVariance,
    Order,
    SiteOverride,
    Store,
    Stream,
    Variant,
)
from variants.errors import InputError, UsageError
from variants.model import Model
from variants.recipe import Place, Recipe, Rule, resolve
from variants.rounding import Probe, RoundAt, Step
from variants.sites import EMBED, places
from variants.weights import Casts, Weights

PROMPT = tiny.prompt(9, seed=3)
PREFILL, DECODE = Spot(prompt=PROMPT, forced=()), Spot(prompt=PROMPT, forced=tiny.prompt(3, seed=4))
STORED = NormAxes(variance=NormVariance.stored)
F32 = tiny.plain(Stream.f32, Gemm.f32)
NARROW = tiny.plain(Stream.bf16, Gemm.bf16, kda=KdaCore.recurrent, mla=MlaCore.dense_bf16)
VARIANTS: dict[str, Variant] = {
    "f32": F32,
    "narrow": replace(NARROW, kda=KdaAxes(prefill=KdaCore.chunk, decode=KdaCore.recurrent, chunk_size=4,
                                          state=Store.bf16)),
    "absorbed": replace(NARROW, mla=MlaAxes(prefill=MlaCore.flash, decode=MlaCore.absorbed, tile_q=4, tile_k=4)),
    "island": tiny.plain(Stream.f32, Gemm.bf16_f32out, kda=KdaCore.island_f64, mla=MlaCore.island_f64,
                         execution=tiny.RECOMPUTE),
    "pieces": replace(F32, execution=replace(tiny.INCREMENTAL, prefill_piece=4), fused_projections=True),
    "override": replace(F32, override={"lm_head": SiteOverride(output=Store.bf16), "o_norm": SiteOverride(
        output=Store.bf16, layers=(2,))}),
    "rows": replace(F32, batch_invariant=True),
    "conv1d": replace(NARROW, elementwise=replace(NARROW.elementwise, conv=Order.stepwise, swiglu=Order.stepwise)),
}  # fmt: skip
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def made() -> Casts:
    return tiny.casts()


def maker(made: Casts, recipe: Recipe, *, fault: Probe | None = None) -> Callable[[Probe], Model]:
    def build(probe: Probe) -> Model:
        probes = probe if fault is None else chain([fault, probe])
        return Model(tiny.ODD, recipe, Weights(made, recipe.semantics), probe=probes)

    return build


def captured(made: Casts, variant: Variant, spot: Spot, place: Place) -> OpCapture:
    return capture_op(maker(made, resolve(variant, tiny.ODD)), spot, place)


RUNS = [(name, spot) for name in VARIANTS for spot in (PREFILL, DECODE)]
SHARE = 24  # of the places of a run, one in so many is captured by the quick test


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_operations_replay_their_bits(made: Casts, tmp_path: Path, number: int) -> None:
    """In every variant and phase, some of the places, others in each."""
    replays_its_bits(made, tmp_path, *RUNS[number], places(tiny.ODD)[number % SHARE :: SHARE])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "spot"), RUNS)
def test_every_operation_replays_its_bits(made: Casts, tmp_path: Path, name: str, spot: Spot) -> None:
    """At every place of every layer and of the head."""
    replays_its_bits(made, tmp_path, name, spot, places(tiny.ODD))


def replays_its_bits(made: Casts, tmp_path: Path, name: str, spot: Spot, wanted: list[Place]) -> None:
    """Read back from its file, an operation gives the same bits under its own rule, and nothing that is not finite: all
    that it read was in the file."""
    recipe = resolve(VARIANTS[name], tiny.ODD)
    passed = Passed()
    Runner(made).logits(recipe, spot, probe=passed)
    assert len(passed.last) > 60
    for place in wanted:
        if place not in passed.last or place[0] == EMBED:
            continue
        capture = capture_op(maker(made, recipe), spot, place)
        again = replay_op(read_capture(write_capture(capture, tmp_path / "op")))
        assert again.bit_equal, place
        assert again.changed == 0
        if again.captured is not None:
            assert again.captured.non_finite == 0, place
            assert again.own == again.captured


READS = {
    ("input_norm", 1): ({"stream"}, {"input_layernorm.weight"}),
    ("q_proj", 0): ({"attn_in"}, {"self_attn.q_proj.weight"}),
    ("conv_sum", 0): ({"q_proj", "k_proj", "v_proj", "conv"}, {f"self_attn.{x}_conv1d.weight" for x in "qkv"}),
    ("decay_gate", 2): ({"f_b_proj"}, {"self_attn.A_log", "self_attn.dt_bias"}),
    ("beta", 2): ({"b_proj"}, set()),
    ("q_l2norm", 0): ({"short_conv"}, set()),
    ("kda_core", 0): ({"q_l2norm", "k_l2norm", "kda_v", "decay_gate", "beta", "recurrent"}, set()),
    ("o_norm", 2): ({"kda_core", "g_b_proj"}, {"self_attn.o_norm.weight"}),
    ("kv_b_in", 1): ({"kv_cache", "latent"}, set()),
    ("mla_core", 1): ({"mla_q", "mla_k", "mla_v"}, set()),
    ("router_ids", 1): ({"router_scores"}, {"block_sparse_moe.gate.e_score_correction_bias"}),
    ("expert_act", 1): ({"expert_gate_up", "expert_silu", "router_ids"}, set()),
    ("mlp_act", 0): ({"mlp_silu", "mlp_up"}, set()),
    ("final_norm", 3): ({"stream"}, {"model.norm.weight"}),
    ("lm_head", 3): ({"lm_head_in"}, {"lm_head.weight"}),
}


@pytest.mark.parametrize("place", READS, ids=str)
def test_inputs_are_what_the_operation_reads(made: Casts, place: Place) -> None:
    """Found by poisoning, in a decode step: the values, the carried state and the parameters that the formula names."""
    values, parameters = READS[place]
    found = captured(made, tiny.plain(Stream.bf16, Gemm.bf16, norm=STORED), DECODE, place).inputs
    assert {*found.values, *found.carried} == values
    prefix = f"model.layers.{place[1]}."
    assert {name.removeprefix(prefix) for name in found.parameters} == parameters


def test_only_the_chosen_experts_are_kept(made: Casts) -> None:
    """One token goes through two experts of five: their weights are in the capture, the others' are not."""
    capture = captured(made, F32, DECODE, ("expert_down", 1))
    (ids,) = capture.inputs.values["router_ids"]
    wanted = {f"model.layers.1.block_sparse_moe.experts.{e}.w2.weight" for e in ids[0].tolist()}
    assert set(capture.inputs.parameters) == wanted
    assert len(capture.output) == 2


class Scaled:
    """A fault: one site's values off by a factor, before its rounding."""

    def __init__(self, place: Place, factor: float) -> None:
        self.place, self.factor = place, factor

    def begin(self, step: Step) -> None:
        return None

    def bind(self, site: str, layer: int, rule: Rule, rounding: RoundAt | None) -> RoundAt | None:
        if (site, layer) != self.place:
            return rounding
        return lambda x: x * self.factor if rounding is None else rounding(x * self.factor)


@pytest.mark.parametrize("place", [("q_proj", 0), ("decay_gate", 2), ("kda_core", 0), ("mla_core", 1), ("mlp_act", 0),
                                   ("expert_act", 1), ("router_scores", 2), ("lm_head", 3)], ids=str)  # fmt: skip
def test_a_planted_fault_shows(made: Casts, tmp_path: Path, place: Place) -> None:
    """A factor of 1.001 at one site: other bits, an error beyond the bound that looks like that factor; the operation
    before it, captured in the same run, has none."""
    build = maker(made, resolve(F32, tiny.ODD), fault=Scaled(place, 1.001))
    found = replay_op(read_capture(write_capture(capture_op(build, DECODE, place), tmp_path / "op")))
    assert not found.bit_equal
    assert found.fault
    assert found.captured is not None
    assert found.own is not None
    assert found.captured.in_excess
    assert not found.own.in_excess
    assert found.captured.scale == pytest.approx(1e-3, rel=0.02)
    assert any("a scale: x 1.001" in line for line in found.hints)
    assert found.worst is not None
    assert found.worst.captured == pytest.approx(1.001 * found.worst.exact, rel=1e-4)
    before = replay_op(capture_op(build, DECODE, ("input_norm", place[1]) if place[1] < 3 else ("final_norm", 3)))
    assert not before.fault


def test_a_fault_of_a_parameter_shows(made: Casts) -> None:
    """A weight that the run had otherwise than the checkpoint: what is kept is the checkpoint's, so the bits differ."""
    recipe, name = resolve(F32, tiny.ODD), "model.layers.0.self_attn.dt_bias"

    def patched(probe: Probe) -> Model:
        weights = Weights(made, recipe.semantics, patch=lambda n, x: x * 1.01 if n == name else x)
        return Model(tiny.ODD, recipe, weights, probe=probe)

    assert replay_op(capture_op(patched, DECODE, ("decay_gate", 0))).fault
    assert not replay_op(capture_op(patched, DECODE, ("f_b_proj", 0))).fault


def test_another_choice_of_experts_shows(made: Casts) -> None:
    """A run that sends a token to another expert than its scores say: other bits, and one token's set is changed."""

    class Other(Scaled):
        def bind(self, site: str, layer: int, rule: Rule, rounding: RoundAt | None) -> RoundAt | None:
            if (site, layer) != self.place:
                return rounding
            return lambda ids: torch.stack([_left_out(row) for row in ids])

    build = maker(made, resolve(F32, tiny.ODD), fault=Other(("router_ids", 1), 1))
    found = replay_op(capture_op(build, DECODE, ("router_ids", 1)))
    assert (found.bit_equal, found.fault, found.changed) == (False, True, 1)


def _left_out(row: torch.Tensor) -> torch.Tensor:
    rest = [e for e in range(5) if e not in row.tolist()]
    return torch.tensor([int(row[0]), rest[0]])


def test_the_chunked_rule_is_held_against_the_recurrent_one(made: Casts) -> None:
    """float64 is the delta rule step by step, so the chunks' own algorithm is judged, and its error is a rounding's."""
    found = replay_op(captured(made, VARIANTS["narrow"], PREFILL, ("kda_core", 0)))
    assert found.captured is not None
    assert 0 < found.captured.relative < 2**-6
    assert not found.fault


def test_the_file_is_the_capture(made: Casts, tmp_path: Path) -> None:
    """Recipe with exceptions, geometry, step and every tensor come back as they were; the folder is made."""
    capture = captured(made, VARIANTS["override"], DECODE, ("o_norm", 2))
    path = write_capture(capture, tmp_path / "new" / "op")
    again = read_capture(path)
    assert path.name == "op.safetensors"
    assert (again.where, again.config, again.recipe) == (capture.where, capture.config, capture.recipe)
    assert again.model_sha256 == made.checkpoint.sha256
    assert torch.equal(again.output[0], capture.output[0])
    assert again.recipe.rule("o_norm", 2).output is not again.recipe.rule("o_norm", 0).output


def edited(path: Path, change: Callable[[dict, dict], None]) -> Path:
    with safe_open(path, framework="pt") as file:
        document = json.loads(file.metadata()[HEADER])
    tensors = load_file(path)
    change(document, tensors)
    save_file(tensors, path, metadata={HEADER: json.dumps(document)})
    return path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d, t: t["output/0000"].view(-1)[0].add_(1), "not what its hash says"),
        (lambda d, t: d["where"].update(layer=0), "not what its hash says"),
        (lambda d, t: d.update(schema=99), "schema 99"),
        (lambda d, t: d["layout"].clear(), "not what its hash says"),
        (lambda d, t: d.pop("content_sha256"), "content_sha256"),
    ],
)
def test_an_edited_file_is_refused(
    made: Casts, tmp_path: Path, change: Callable[[dict, dict], None], said: str
) -> None:
    """A value, the place, the schema or the hash changed: one line, exit code 3."""
    path = write_capture(captured(made, F32, DECODE, ("o_norm", 2)), tmp_path / "op")
    with pytest.raises(InputError, match=said):
        read_capture(edited(path, change))


def test_what_is_no_capture_is_refused(tmp_path: Path) -> None:
    """No file, another safetensors file, and something else entirely."""
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    (tmp_path / "text.safetensors").write_text("no header here at all")
    for name, said in (("other", "no captured operation"), ("text", "cannot read"), ("none", "cannot read")):
        with pytest.raises(InputError, match=said):
            read_capture(tmp_path / f"{name}.safetensors")


@pytest.mark.parametrize(
    ("place", "said"),
    [((EMBED, -1), "no operation"), (("q_proj", 1), "no operation"), (("o_norm", 9), "no operation"),
     (("kda_ainv", 0), "no value passes"), (("q_latent", 1), "no value passes")],
)  # fmt: skip
def test_a_place_that_is_not_there_is_refused(made: Casts, place: Place, said: str) -> None:
    """Not in this model, or not in this variant."""
    with pytest.raises(UsageError, match=said):
        captured(made, F32, DECODE, place)


def test_only_runs_on_the_host_are_captured(made: Casts) -> None:
    """On another device the replay could not give its bits: refused before anything runs."""

    def elsewhere(probe: Probe) -> Model:
        model = maker(made, resolve(F32, tiny.ODD))(probe)
        model.device = "cuda:0"
        return model

    with pytest.raises(UsageError, match="device=cpu"):
        capture_op(elsewhere, DECODE, ("o_norm", 0))


def test_commands_capture_and_replay(tmp_path: Path, capsys: Captured, made: Casts) -> None:
    """`bisect capture=` leaves the culprit of both variants, `replay` runs each from its file; --fail tells a fault.

    Which token parts them first, and by which place, follows the processor: its bf16 products have their own bits.
    """
    ops = tmp_path / "ops"
    assert main(["bisect", "a=f64_islands", "b=device_kda", f"capture={ops}", f"results={tmp_path}"]) == 0
    (minimal,) = re.findall("A with (.*) as in B chooses", capsys.readouterr().out)
    one, other = sorted(file.stem for file in ops.iterdir())
    assert one[:-2] == other[:-2]
    assert one[:-2] in minimal.split(", ")
    for name, stored in ((one, "as computed"), (other, "bf16")):
        assert main(["replay", str(ops / f"{name}.safetensors"), "--fail"]) == 0
        out = capsys.readouterr().out
        assert "its own rule gives the captured bits" in out
        assert f"stores {stored}" in out
        assert "within rounding" in out
    build = maker(made, resolve(F32, tiny.ODD), fault=Scaled(("o_norm", 0), 1.01))
    bad = write_capture(capture_op(build, DECODE, ("o_norm", 0)), ops / "bad")
    assert main(["replay", str(bad)]) == 0
    assert "OTHER BITS" in capsys.readouterr().out
    assert main(["replay", str(bad), "--fail", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["fault"], document["bit_equal"], document["where"]["site"]) == (True, False, "o_norm")


@pytest.mark.parametrize(("argv", "code"), [([], 2), (["a", "b"], 2), (["/nowhere.safetensors"], 3)])
def test_replay_takes_one_file(capsys: Captured, argv: list[str], code: int) -> None:
    """One word, and a file that is there."""
    assert main(["replay", *argv]) == code
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_execution_is_as_recorded(made: Casts) -> None:
    """A recompute run is one pass over prompt and tokens, an incremental one a step of a single token."""
    incremental = captured(made, F32, DECODE, ("o_norm", 0)).where
    assert (incremental.phase, incremental.starts, incremental.lengths) == ("decode", (11,), (1,))
    again = replace(F32, execution=replace(tiny.RECOMPUTE, mode=Execution.recompute))
    recompute = captured(made, again, DECODE, ("o_norm", 0)).where
    assert (recompute.phase, recompute.starts, recompute.lengths) == ("prefill", (0,), (12,))
