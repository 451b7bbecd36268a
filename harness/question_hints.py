"""What wrong tokens look like when it is the question that differs and not the arithmetic: said beside a verdict.

Nothing here decides; it tells a reader where to look first. Both signs need most of a battery, since a few places look
like anything.
"""

from harness.agreement import Agreement
from harness.golden_data import ENDED, Golden

FEWEST = 4  # first divergences from which on a pattern in them is told
MOST = 0.75  # share of them; without a penalty at most half were seen to avoid a repeat


def hint(golden: Golden, agreement: Agreement) -> str:
    """A clause that begins with "; ", or nothing."""
    return _from_the_first_token(agreement) or _never_twice(golden, agreement)


def _from_the_first_token(agreement: Agreement) -> str:
    """Rounding and most defects take a while to turn a token; another prompt does not."""
    at_once = sum(d.position == 0 for d in agreement.first_divergence)
    if agreement.prompts < FEWEST or 2 * at_once <= agreement.prompts:
        return ""
    said = f"{at_once} of {agreement.prompts} prompts differ in their first token"
    return f"; {said}, as with another prompt (BOS, template, a token cut off) or another checkpoint"


def _never_twice(golden: Golden, agreement: Agreement) -> str:
    """Where the golden repeats a token that its row has had, the candidate takes one that it has not."""
    found = [d for d in agreement.first_divergence if ENDED not in (d.golden_id, d.candidate_id)]
    avoided = 0
    for d in found:
        had = {*golden.prompts[d.prompt], *golden.tokens[0, d.prompt, : d.position].tolist()}
        avoided += d.golden_id in had and d.candidate_id not in had
    if len(found) < FEWEST or avoided < MOST * len(found):
        return ""
    said = f"{avoided} of {len(found)} first divergences avoid a token that came before"
    return f"; {said}, as a repetition penalty does"
