"""What a score says: agreement with a golden, prompt by prompt, and each prompt's first divergence."""

from dataclasses import asdict, dataclass
from typing import Any

from harness.golden_data import Bar
from harness.loops import RowLoop


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first place of a prompt that does not agree; None stands for unknown, never for zero.

    kind: "token", "ended" (just one of the two ended here) or "non-finite". ids: -1 = ended. golden_gap and
    candidate_gap: top-1 minus top-2 of either, the candidate's on the same prefix. golden_margin_nats: the golden's
    logprob of its own token minus its logprob of the candidate's token; where that token is outside the golden's list
    it is None, and golden_margin_at_least_nats is what it must exceed. ULPs are of the logits' dtype at the larger of
    the two logits: unknown where only logprobs are known, but 0 for an exact tie.
    """

    prompt: int
    position: int
    kind: str
    golden_id: int
    candidate_id: int
    golden_text: str | None = None
    candidate_text: str | None = None
    golden_gap_nats: float | None = None
    golden_gap_ulp: float | None = None
    golden_margin_nats: float | None = None
    golden_margin_at_least_nats: float | None = None
    candidate_gap_nats: float | None = None
    candidate_gap_ulp: float | None = None


@dataclass(frozen=True, kw_only=True)
class PromptAgreement:
    """One prompt: places that agree, places counted, tokens before the first divergence, and that divergence."""

    prompt: int
    matched: int
    total: int
    prefix: int
    divergence: Divergence | None

    @property
    def exact(self) -> bool:
        """Every counted place agrees; a prompt where nothing was counted is not exact."""
        return self.total > 0 and self.matched == self.total


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """A candidate against a golden. members: places within the set of K runs, of all N x T. bar_met: None = K was 1."""

    per_prompt: tuple[PromptAgreement, ...]
    bar: Bar
    bar_met: bool | None
    members: int
    non_finite: tuple[tuple[int, int], ...]
    loops: tuple[RowLoop, ...]

    @property
    def matched(self) -> int:
        return sum(p.matched for p in self.per_prompt)

    @property
    def total(self) -> int:
        return sum(p.total for p in self.per_prompt)

    @property
    def exact_prompts(self) -> int:
        return sum(p.exact for p in self.per_prompt)

    @property
    def prompts(self) -> int:
        return len(self.per_prompt)

    @property
    def first_divergence(self) -> tuple[Divergence, ...]:
        """One entry for each prompt that diverges, in order of prompt."""
        return tuple(p.divergence for p in self.per_prompt if p.divergence is not None)

    @property
    def messages(self) -> tuple[str, ...]:
        """What a reader must be told beside the count: non-finite logits, repeat loops."""
        said = [f"prompt {prompt}: non-finite logits at step {step}" for prompt, step in self.non_finite]
        return (*said, *(str(loop) for loop in self.loops))

    @property
    def not_finite(self) -> str | None:
        """Where the first logits that were not finite lie, in words; None where all were."""
        if not self.non_finite:
            return None
        prompt, step = self.non_finite[0]
        return f"non-finite logits, first at prompt {prompt}, step {step}"

    def record(self) -> dict[str, Any]:
        """The ledger's `agreement`, JSON-plain: matched, total, exact_prompts, prompts, first_divergence and more."""
        return {
            "matched": self.matched,
            "total": self.total,
            "exact_prompts": self.exact_prompts,
            "prompts": self.prompts,
            "first_divergence": [asdict(d) for d in self.first_divergence],
            "per_prompt": [
                {"matched": p.matched, "total": p.total, "prefix": p.prefix, "exact": p.exact} for p in self.per_prompt
            ],
            "bar": self.bar.value,
            "bar_met": self.bar_met,
            "members": self.members,
            "non_finite": [{"prompt": prompt, "step": step} for prompt, step in self.non_finite],
            "loops": [asdict(loop) for loop in self.loops],
        }
