"""tokenizer.json made of tiktoken's ranks gives tiktoken's ids, and adds nothing of its own."""

import base64
import json
from pathlib import Path

import pytest

from harness.tokenizer_json import KIMI_PATTERN, byte_letters, kimi_tokenizer, read_ranks
from variants.errors import InputError

tokenizers = pytest.importorskip("tokenizers", reason="pip install 'neartie[transformers]'")

TEXTS = (
    "To be or not to be, that is",
    "中文和Latin混合 text，第12345章\r\n\r\n  下一行",
    "  def f(x):\n\treturn x's y'LL   \n",
    "naïve café ２３ Ünïcödé 🙂🙃 ﷺ",
    "漢字かな交じり文 and 한국어",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All bytes, then the shipped merges and some Han characters, as a file of ranks; special tokens as Kimi has."""
    made = tmp_path_factory.mktemp("kimi")
    merges = json.loads(Path("assets/kimi-linear-12m/tokenizer.json").read_text())["model"]["merges"]
    byte_of = {letter: bytes([b]) for b, letter in enumerate(byte_letters())}
    tokens = [bytes([b]) for b in range(256)]
    tokens += [b"".join(byte_of[c] for c in a + b) for a, b in merges[:1500]]
    for text in ("中文", "漢字"):
        raw = [c.encode() for c in text]
        tokens += [raw[0][:2], raw[0], raw[1][:2], raw[1], raw[0] + raw[1]]
    ordered = list(dict.fromkeys(tokens))
    lines = [base64.b64encode(token) + b" " + str(rank).encode() for rank, token in enumerate(ordered)]
    (made / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    named = {str(len(ordered)): {"content": "[BOS]"}, str(len(ordered) + 1): {"content": "[EOS]"}}
    (made / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": named}))
    return made


def test_ids_are_those_of_tiktoken(folder: Path) -> None:
    """Han, Latin, digits, blanks and emoji are cut and merged as tiktoken does it, and decode to themselves."""
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is the reference here")
    ranks = read_ranks(folder / "tiktoken.model")
    reference = tiktoken.Encoding("kimi", pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens={})
    ours = tokenizers.Tokenizer.from_str(json.dumps(kimi_tokenizer(folder)))
    for text in TEXTS:
        ids = ours.encode(text).ids
        assert ids == reference.encode(text), text
        assert ours.decode(ids) == text


def test_special_tokens_are_known_and_none_is_added(folder: Path) -> None:
    """BOS in a text is one id; a text without it gets none; reserved ids have a text."""
    ours = tokenizers.Tokenizer.from_str(json.dumps(kimi_tokenizer(folder)))
    first = ours.token_to_id("[BOS]")
    assert ours.encode("[BOS]to be").ids == [first, *ours.encode("to be").ids]
    assert first not in ours.encode("to be").ids
    assert ours.token_to_id(f"<|reserved_token_{first + 200}|>") == first + 200


def test_broken_ranks_are_refused(tmp_path: Path) -> None:
    """A line that is none, a rank that is missing and a token that no pair makes each name the file."""
    file = tmp_path / "tiktoken.model"
    for content, message in (
        (b"YQ== 0\n?? 1\n", "line 2 is not"),
        (b"YQ== 0\nYg== 2\n", "ranks are not 0 to 1"),
        (b"YQ== 0\nYg== 1\nYWJhYg== 2\n", "is no pair of tokens of lower rank"),
    ):
        file.write_bytes(content)
        with pytest.raises(InputError, match=message):
            kimi_tokenizer(tmp_path)
