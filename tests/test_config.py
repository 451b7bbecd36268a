"""Settings compose, wrong ones are refused in one line, and values come through as they were typed."""

import csv
from pathlib import Path

import pytest

from experiments import cross
from harness.compose import as_plain, choice_summary, groups, load, named_variant, quote
from harness.config import Config
from harness.overrides import jobs
from variants.axes import SiteOverride, Store, Variant
from variants.errors import UsageError

PUBLISHED = Path(__file__).parents[1] / "results" / "published.csv"
# Rows of the published campaign that the axes of today cannot express.
NOT_EXPRESSED = {"vllm"}
AWKWARD = [
    "a,b",
    "/models/a/b",
    "x=1",
    "two words",
    "it's",
    "back\\slash",
    "trail\\",
    "(1)",
    "[1]",
    "{a: 1}",
    "'q'",
    "#x",
]


@pytest.mark.parametrize("name", groups()["variant"])
def test_every_variant_file_composes(name: str) -> None:
    """Each file in conf/variant/ is a Variant, carries its own name, and says in one line what it is."""
    config = load([f"variant={name}"])
    assert isinstance(config.variant, Variant)
    assert config.label == name
    assert 10 < len(choice_summary("variant", name)) < 100


@pytest.mark.parametrize("group", sorted(groups().keys() - {"variant"}))
def test_every_other_choice_composes(group: str) -> None:
    """Each choice of the other groups composes, given the one setting that it leaves open."""
    for name in groups()[group]:
        needed = {"folder": ["model.path=/m"], "replay": ["engine.folder=/r"], "openai": ["engine.url=http://a"]}.get(
            name, []
        )
        assert isinstance(load([f"{group}={name}", *needed]), Config)


def test_every_campaign_row_has_a_variant() -> None:
    """What the campaign ran can be named here, but for the rows that need another runner."""
    with PUBLISHED.open(encoding="utf-8") as file:
        published = {row["variant"] for row in csv.DictReader(file)}
    assert published - NOT_EXPRESSED <= set(groups()["variant"])


def test_the_default_variant_is_f64_islands() -> None:
    """The file of the campaign's baseline changes nothing, so the defaults of the axes are that baseline."""
    assert named_variant("f64_islands") == Variant()


def test_variants_differ_pairwise() -> None:
    """No two names stand for the same choice of arithmetic."""
    variants = {name: named_variant(name) for name in groups()["variant"]}
    same = [(a, b) for a in variants for b in variants if a < b and variants[a] == variants[b]]
    assert same == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["variant=f3"], "no variant 'f3'; did you mean 'f32'?"),
        (["variant.gem=f32"], "no setting 'variant.gem'; did you mean 'variant.gemm'?"),
        (["variant.gemm=f8"], "expected one of [f64, f32, f16, bf16_f32out, bf16]"),
        (["variant.kda.chunk_size=32"], "kda.chunk_size=32 has no effect"),
        (["golden=a,b"], "add -m to run each, or quote it: \"golden='a,b'\""),
        (["golden=a b=c"], "quote the value, as in \"golden='a b=c'\""),
        (["gate"], "'gate' is not an override: expected KEY=VALUE"),
        (["+new=1"], "no setting 'new'"),
        (["~variant"], "cannot be removed"),
        (["hydra.run.dir=x"], "no Hydra settings here"),
        (["limit=-1"], "limit=-1"),
        (["limit=two"], "limit=two: Value 'two' of type 'str' could not be converted to Integer"),
        (["seed=null"], "seed=null"),
        (["require=most"], "expected one of bar, strict, exact, or a number"),
        (["device.index=1"], "the cpu has no index"),
        (["engine.dtype=bf16"], "engine=local does not read it"),
        (["engine=replay"], "needs engine.folder=DIR"),
        (["engine=transformers", "variant=f32"], "variant=f32 has no effect with engine=transformers"),
        (["+variant.override.kda_core.outptu=bf16"], "Key 'outptu' not in 'SiteOverride'"),
    ],
)
def test_a_wrong_word_is_refused_in_one_line(words: list[str], said: str) -> None:
    """The message names what was got, is one line, and says what would do."""
    with pytest.raises(UsageError) as caught:
        load(words)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", AWKWARD)
def test_a_quoted_value_comes_through(value: str) -> None:
    """Comma, slash, equals sign, space, quotes and brackets in a quoted value neither sweep nor change."""
    word = f"golden={quote(value)}"
    assert load([word]).golden == value
    assert jobs([word, "variant=f32,oracle"]) == [[word, "variant=f32"], [word, "variant=oracle"]]


def test_a_model_folder_needs_no_quotes_and_no_group(tmp_path: Path) -> None:
    """model=DIR is short for the choice `folder` with that path, whatever is in its name, and pins no hash."""
    folder = tmp_path / "a=b, c"
    folder.mkdir()
    config = load([f"model={quote(str(folder))}"])
    assert (config.model.path, config.model.sha256) == (str(folder), None)


def test_what_is_changed_of_a_variant_is_in_its_label() -> None:
    """A changed variant never passes for the named one."""
    assert load(["variant=f32", "variant.gemm=bf16_f32out", "variant.norm.kv_eps=eps_1e6"]).label == (
        "f32+gemm=bf16_f32out+norm.kv_eps=eps_1e6"
    )


def test_a_site_override_is_typed() -> None:
    """An override arrives as a frozen SiteOverride, its layers as a tuple."""
    config = load(["+variant.override.kda_core={output: bf16, layers: [0, 2]}"])
    assert config.variant.override == {"kda_core": SiteOverride(output=Store.bf16, layers=(0, 2))}


def test_a_site_override_merges_across_files_and_words() -> None:
    """A later word changes one field of an override and leaves the other."""
    words = ["+variant.override.q_proj={input: bf16, layers: [1]}", "+variant.override.q_proj.output=f16"]
    assert load(words).variant.override["q_proj"] == SiteOverride(input=Store.bf16, output=Store.f16, layers=(1,))


def test_a_config_is_plain_data_for_a_record() -> None:
    """Enums are recorded by name and nothing else than JSON's own types is left."""
    import json

    plain = as_plain(load(["variant=oracle"]))
    assert json.loads(json.dumps(plain)) == plain
    assert plain["variant"]["gemm"] == "f64"  # pyright: ignore[reportIndexIssue]


def test_jobs_are_the_product_in_order() -> None:
    """The first sweep is the slowest; ranges and choices are Hydra's own."""
    assert jobs(["variant=f32,oracle", "limit=range(1,3)"]) == [
        ["variant=f32", "limit=1"],
        ["variant=f32", "limit=2"],
        ["variant=oracle", "limit=1"],
        ["variant=oracle", "limit=2"],
    ]


def test_a_single_word_for_a_list_is_told_how_lists_are_written() -> None:
    with pytest.raises(UsageError, match=r"expected a list in brackets, engines=\[f32\]"):
        load(["engines=f32"], root=cross.Settings)
