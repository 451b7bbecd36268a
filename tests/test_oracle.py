"""The float64 oracle: one pass that equals the decode path, one layer in memory at a time, a cache that cannot lie."""

import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness import oracle as module
from harness.compose import named_variant
from harness.engines.assets import checkpoint_folder
from harness.engines.local import forced_logits, shared_casts
from harness.gate import part_of
from harness.golden import load_golden
from harness.oracle import Forced, Oracle, consult, oracle_recipe
from harness.streamed import streamed_logits
from variants.checkpoint import Checkpoint
from variants.checkpoint_names import EMBEDDING, HEAD
from variants.dtypes import DType
from variants.errors import EngineError, InputError
from variants.model import Model
from variants.recipe import Recipe, Semantics, resolve
from variants.weights import Casts, Weights

# nats: float64 rounding (1e-16) through eight layers, with two orders of sums; a wrong mask or state costs 1e-3.
SAME_FUNCTION = 1e-10
KV_EPS = Semantics(kv_eps=1e-6)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return shared_casts(str(checkpoint_folder("kimi-linear-12m")), None, "cpu").checkpoint


@pytest.fixture(scope="module")
def forced() -> Forced:
    """Three prompts of 7, 10 and 25 ids; the rows end after 5, 2 and 0 tokens."""
    golden = part_of(load_golden("gate"), prompts=3, tokens=5)
    tokens = golden.tokens[0].copy()
    tokens[1, 2:], tokens[2] = -1, -1
    return Forced(prompts=golden.prompts, tokens=tokens)


@pytest.fixture(scope="module")
def oracle(checkpoint: Checkpoint, forced: Forced) -> Oracle:
    return consult(checkpoint, forced)


def logits(checkpoint: Checkpoint, recipe: Recipe, forced: Forced, **options: Any) -> dict[int, torch.Tensor]:
    """Logits [n, V] by row."""
    rows: dict[int, list[torch.Tensor]] = {}
    pass_ = streamed_logits(Casts(checkpoint), recipe, forced.prompts, forced.continuations, **options)
    for row, first, x in pass_:
        assert first == sum(map(len, rows.get(row, [])))
        rows.setdefault(row, []).append(x)
    return {row: torch.cat(parts) for row, parts in rows.items()}


def decoded(checkpoint: Checkpoint, recipe: Recipe, forced: Forced) -> dict[int, torch.Tensor]:
    """The same by prefill and decode steps, a row at a time."""
    model = Model(checkpoint.config, recipe, Weights(Casts(checkpoint), recipe.semantics))
    rows = enumerate(zip(forced.prompts, forced.continuations, strict=True))
    return {i: torch.cat(forced_logits(model, [p], [c])) for i, (p, c) in rows if c}


def furthest(a: dict[int, torch.Tensor], b: dict[int, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[i] - b[i]).abs().max()) for i in a)


def test_equals_the_decode_path(checkpoint: Checkpoint, forced: Forced) -> None:
    """One streamed pass gives what prefill and decode of `oracle` give, rows of unlike length beside each other."""
    expected = decoded(checkpoint, resolve(named_variant("oracle"), checkpoint.config), forced)
    assert furthest(logits(checkpoint, oracle_recipe(checkpoint.config), forced), expected) < SAME_FUNCTION


def test_another_recipe_is_not_taken_for_the_same(checkpoint: Checkpoint, forced: Forced) -> None:
    """The bound of the test above is far under a change that is worth seeing: one eps of 1e-6 for 1e-5."""
    other = replace(oracle_recipe(checkpoint.config), semantics=KV_EPS)
    expected = decoded(checkpoint, resolve(named_variant("oracle"), checkpoint.config), forced)
    assert furthest(logits(checkpoint, other, forced), expected) > 1e3 * SAME_FUNCTION


def test_cores_on_the_device_are_the_islands(checkpoint: Checkpoint, forced: Forced) -> None:
    """On the host the oracle's cores have every bit of conf/variant/oracle.yaml's islands."""
    islands = resolve(named_variant("oracle"), checkpoint.config)
    assert furthest(
        logits(checkpoint, oracle_recipe(checkpoint.config), forced), logits(checkpoint, islands, forced)
    ) == pytest.approx(0.0, abs=0.0)


@pytest.mark.parametrize("tokens_at_once", [4, 11, 26])
def test_pieces_and_groups_change_nothing(checkpoint: Checkpoint, forced: Forced, tokens_at_once: int) -> None:
    """Rows cut into pieces, alone or in other groups, say the same."""
    recipe = oracle_recipe(checkpoint.config)
    whole = logits(checkpoint, recipe, forced)
    assert furthest(logits(checkpoint, recipe, forced, tokens_at_once=tokens_at_once), whole) < SAME_FUNCTION


class Watched(Casts):
    """Casts that remember the most that they held together, and how many outlived each `drop`."""

    peak = 0

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.left: list[int] = []

    def drop(self) -> None:
        super().drop()
        self.left.append(sum(ref() is not None for ref in self.made))

    def cast(self, *args: object, **kwargs: object) -> torch.Tensor:
        return self._seen(super().cast(*args, **kwargs))  # pyright: ignore[reportArgumentType]

    def stack(self, *args: object, **kwargs: object) -> torch.Tensor:
        return self._seen(super().stack(*args, **kwargs))  # pyright: ignore[reportArgumentType]

    def _seen(self, made: torch.Tensor) -> torch.Tensor:
        self.made.append(weakref.ref(made))
        self.peak = max(self.peak, self.nbytes)
        return made


def largest_part(checkpoint: Checkpoint) -> int:
    """Bytes in float64 of the largest of a layer, the embedding and the head with the final norm."""
    config, tensors = checkpoint.config, checkpoint.tensors
    layers = [f"model.layers.{i}." for i in range(config.num_layers)]
    parts = [[n for n in tensors if n.startswith(p)] for p in layers] + [[EMBEDDING], [HEAD, "model.norm.weight"]]
    sizes = [sum(tensors[n].numel() for n in part) * 8 for part in parts]
    return max(sizes)


def test_holds_one_layer_at_a_time(checkpoint: Checkpoint, forced: Forced) -> None:
    """Casts never take more than the largest layer in float64, under a quarter of the model, and no expert twice."""
    casts = Watched(checkpoint)
    for _ in streamed_logits(casts, oracle_recipe(checkpoint.config), forced.prompts, forced.continuations):
        pass
    assert largest_part(checkpoint) / 2 < casts.peak <= largest_part(checkpoint)
    assert casts.peak < sum(t.numel() for t in checkpoint.tensors.values()) * 8 / 4
    assert casts.nbytes == 0
    assert casts.left[:-1] == [0] * (checkpoint.config.num_layers + 1)  # the head stands until the last row is told


def test_leads_ranks_and_gaps_follow_from_logprobs(oracle: Oracle, forced: Forced) -> None:
    """Each figure equals the plain definition over all logprobs; places past a row's end hold nothing."""
    assert oracle.logprobs is not None
    for place in np.argwhere(forced.tokens >= 0):
        n, t = (int(i) for i in place)
        row, token = oracle.logprobs[n, t], int(forced.tokens[n, t])
        assert np.exp(row).sum() == pytest.approx(1.0, abs=1e-12)
        assert oracle.token_logprobs[n, t] == row[token]
        assert oracle.leads[n, t] == row[token] - np.delete(row, token).max()
        assert oracle.ranks[n, t] == 1 + np.count_nonzero(row > row[token])
        assert oracle.gaps[n, t] == np.sort(row)[-1] - np.sort(row)[-2]
    past = forced.tokens < 0
    assert past.sum() == 8
    assert (oracle.ranks[past] == 0).all()
    assert np.isnan(oracle.leads[past]).all()
    assert (oracle.top_ids[past] == -1).all()


def test_ties_rank_by_id() -> None:
    """Of two equal logits the lower id stands first, and its lead is zero."""
    table = module._Table(Forced(prompts=((1,),), tokens=np.array([[2, 1]], np.int32)), vocab=4)
    for t in range(2):
        table.put((0, t), np.array([0.0, 5.0, 5.0, 1.0]))
    assert table.arrays["ranks"].tolist() == [[2, 1]]
    assert table.arrays["leads"].tolist() == [[0.0, 0.0]]
    assert table.arrays["top_ids"][0, 0].tolist() == [1, 2, 3, 0]


def test_margin_of_any_pair(oracle: Oracle) -> None:
    """A margin is a difference of logprobs, in either order, and of the forced token over the second its lead."""
    first, second = (int(i) for i in oracle.top_ids[0, 0, :2])
    assert oracle.margin((0, 0), first, second) == oracle.gaps[0, 0]
    assert oracle.margin((0, 0), 7, 3000) == -oracle.margin((0, 0), 3000, 7)


def test_large_battery_answers_alike(
    checkpoint: Checkpoint, forced: Forced, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where logprobs are not all kept, a token outside the kept ones costs a run of its row and is the same."""
    monkeypatch.setattr(module, "FULL_BYTES", 0)
    monkeypatch.setattr(module, "KEPT", 4)
    small = consult(checkpoint, forced)
    assert small.logprobs is None
    assert small.top_ids.shape[-1] == 4
    kept, far = int(oracle.top_ids[1, 1, 3]), int(oracle.top_ids[1, 1, 200])
    assert small.margin((1, 1), kept, far) == pytest.approx(oracle.margin((1, 1), kept, far), abs=SAME_FUNCTION)
    monkeypatch.setattr(module, "streamed_logits", _must_not_run)
    assert small.logprob((1, 0), far) == pytest.approx(oracle.logprob((1, 0), far), abs=SAME_FUNCTION)
    assert small.logprob((0, 0), kept_at(small, (0, 0))) == small.top_logprobs[0, 0, 2]
    assert small.logprob((0, 4), int(forced.tokens[0, 4])) == small.token_logprobs[0, 4]


def kept_at(oracle: Oracle, place: tuple[int, int]) -> int:
    return int(oracle.top_ids[place][2])


def _must_not_run(*_: object, **__: object) -> Iterator[None]:
    raise AssertionError("the model was run")


def test_cache_answers_without_the_model(
    checkpoint: Checkpoint, forced: Forced, oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second answer comes from disk, bit for bit; one file is there and no temporary one."""
    consult(checkpoint, forced, cache=tmp_path)
    monkeypatch.setattr(module, "streamed_logits", _must_not_run)
    again = consult(checkpoint, forced, cache=tmp_path)
    for name in ("token_logprobs", "leads", "ranks", "top_ids", "top_logprobs", "log_normalizers", "logprobs"):
        assert np.array_equal(getattr(again, name), getattr(oracle, name), equal_nan=True)
    assert [p.suffix for p in tmp_path.iterdir()] == [".oracle"]


@pytest.mark.parametrize("at", [3, 40, 100, -1000])
def test_damaged_cache_is_not_believed(
    checkpoint: Checkpoint, forced: Forced, oracle: Oracle, tmp_path: Path, at: int
) -> None:
    """One changed byte anywhere is warned of, and the answer computed and written again."""
    consult(checkpoint, forced, cache=tmp_path)
    (path,) = tmp_path.iterdir()
    sound = path.read_bytes()
    damaged = bytearray(sound)
    damaged[at] ^= 1
    path.write_bytes(bytes(damaged))
    with pytest.warns(UserWarning, match="does not have the hash"):
        again = consult(checkpoint, forced, cache=tmp_path)
    assert np.array_equal(again.leads, oracle.leads, equal_nan=True)
    assert consult(checkpoint, forced, cache=tmp_path).leads.tobytes() == again.leads.tobytes()


def test_key_is_all_that_an_answer_depends_on(checkpoint: Checkpoint, forced: Forced) -> None:
    """Other weights, config, prompts, tokens or semantics are other keys; the same question is the same key."""
    recipe = oracle_recipe(checkpoint.config)
    tokens = forced.tokens.copy()
    tokens[0, 4] += 1
    questions = [
        (checkpoint, forced, recipe),
        (replace(checkpoint, sha256="0" * 64), forced, recipe),
        (replace(checkpoint, config=replace(checkpoint.config, rms_norm_eps=1e-6)), forced, recipe),
        (checkpoint, replace(forced, prompts=((9,), *forced.prompts[1:])), recipe),
        (checkpoint, replace(forced, tokens=tokens), recipe),
        (checkpoint, forced, oracle_recipe(checkpoint.config, KV_EPS)),
    ]
    assert len({module._key(*q) for q in questions}) == len(questions)
    assert module._key(*questions[0]) == module._key(checkpoint, replace(forced), recipe)


def test_semantics_are_said_and_used(checkpoint: Checkpoint, forced: Forced, oracle: Oracle) -> None:
    """An oracle of declared semantics answers for that function and says which it is."""
    declared = consult(checkpoint, forced, semantics=KV_EPS)
    assert declared.semantics["kv_a_layernorm_eps"] == 1e-6
    assert oracle.semantics["kv_a_layernorm_eps"] is None
    assert not np.array_equal(declared.leads, oracle.leads, equal_nan=True)


def test_refuses_what_it_cannot_judge(checkpoint: Checkpoint, forced: Forced, oracle: Oracle) -> None:
    """No token, a token of another vocabulary, a place that was not asked about: InputError with the reason."""
    with pytest.raises(InputError, match="no token to judge"):
        consult(checkpoint, replace(forced, tokens=np.full((3, 5), -1, np.int32)))
    with pytest.raises(InputError, match="5000 is outside the model's vocabulary of 4096"):
        consult(checkpoint, replace(forced, tokens=np.full((3, 5), 5000, np.int32)))
    with pytest.raises(InputError, match="prompt 1, position 2"):
        oracle.logprob((1, 2), 7)
    with pytest.raises(InputError, match="prompt 0, position 5"):
        oracle.logprob((0, 5), 7)
    with pytest.raises(InputError, match="4096 is outside"):
        oracle.margin((0, 0), 7, 4096)


def test_refuses_logits_that_are_not_finite(checkpoint: Checkpoint, forced: Forced) -> None:
    """An infinite weight is no oracle: EngineError names the first place."""
    broken = checkpoint.tensors | {"model.norm.weight": torch.full_like(checkpoint.tensors["model.norm.weight"], 1e38)}
    broken[HEAD] = torch.full_like(checkpoint.tensors[HEAD], float("inf"))
    with pytest.raises(EngineError, match="not finite at prompt 0, position 0"):
        consult(replace(checkpoint, tensors=broken), forced)


def test_golden_of_the_shipped_checkpoint(checkpoint: Checkpoint) -> None:
    """vLLM's bf16 tokens on `gate` are float64's own choice in 125 of 128 places, and close in the others."""
    judged = consult(checkpoint, Forced.of(load_golden("gate")))
    assert int((judged.ranks == 1).sum()) == 125
    assert (judged.leads > -0.06).all()
    assert (judged.ranks <= 2).all()


@pytest.mark.gpu
def test_device_says_what_the_host_says(checkpoint: Checkpoint, forced: Forced, oracle: Oracle) -> None:
    """The oracle on CUDA and on the host are one function."""
    there = consult(checkpoint, forced, device="cuda:0")
    asked = forced.tokens >= 0
    assert np.abs(there.leads - oracle.leads)[asked].max() < SAME_FUNCTION


def test_oracle_recipe_computes_in_float64_alone(checkpoint: Checkpoint) -> None:
    """No rule of the oracle's recipe names a narrower format."""
    recipe = oracle_recipe(checkpoint.config, KV_EPS)
    formats = {getattr(r, f) for r in recipe.rules.values() for f in ("input", "accum", "output", "storage")}
    assert formats <= {None, DType.f64}
