"""What an engine that shows its logprobs alone may mean otherwise: each known departure tried on the float64 oracle.

The engine's logprobs stay; the oracle beside them gets another meaning (an eps, a parameter rounded when it was
loaded). A departure explains where with it the error is that of the recipe's members again.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from harness.envelope import Envelope
from harness.forced_errors import Battery
from harness.hypotheses import LATENT_EPS
from harness.inspect import make_oracle
from variants.decode import single_pass
from variants.dtypes import DType, dtype_of
from variants.recipe import Recipe, Semantics
from variants.rounding import NoProbe
from variants.weights import Casts

LEFT = 0.35  # ln over the members' level that may be left; correct runs stay within 0.25
LEAST = 0.3  # ln that a departure must take off, else it explains nothing
PARAMETERS = ("A_log", "dt_bias", "e_score_correction_bias")


def departures(declared: Recipe, casts: Casts) -> Iterator[tuple[str, Semantics]]:
    """Other meanings in words, each one change away from what is declared."""
    known, own = declared.semantics, casts.checkpoint.config.rms_norm_eps
    for kv_eps in {None, LATENT_EPS} - {known.kv_eps, own}:
        yield f"kv_a_norm eps {kv_eps or own:.0e}", replace(known, kv_eps=kv_eps)
    for l2_eps in {None, own} - {known.l2_eps}:
        yield f"L2 norm of q and k with eps {l2_eps or 1e-6:.0e}", replace(known, l2_eps=l2_eps)
    stored = {name.rpartition(".")[2]: dtype_of(t) for name, t in casts.checkpoint.tensors.items()}
    for name in PARAMETERS:
        if name not in known.bf16_params and stored[name].precision > DType.bf16.precision:
            rounded = known.bf16_params | {name}
            yield f"{name} rounded to bf16 when loaded", replace(known, bf16_params=rounded)


def explained_by(
    meanings: Mapping[str, np.ndarray],
    own: Envelope,
    deviations: np.ndarray,
    level: Callable[[np.ndarray], tuple[float, float]],
) -> str | None:
    """The departure that takes the most of an error away, as "explained by ..."; None where none takes it all.

    meanings: of `other_meanings`. deviations: the engine's logprobs minus the oracle's, [P, W] as in `own`, NaN for
    unknown. level(deviations): the mean ln error over what is known, and the members' over the same.
    """
    before, _ = level(deviations)
    found: list[tuple[float, float, str]] = []
    for text, other in meanings.items():
        after, members = level(deviations + own.table.oracle_logprobs - other)
        found.append((after, members, text))
    after, members, text = min(found)
    if after - members > LEFT or before - after < LEAST:
        return None
    return f"explained by {text} (then e^{after - members:+.2f})"


def other_meanings(declared: Recipe, casts: Casts, battery: Battery, own: Envelope) -> dict[str, np.ndarray]:
    """The oracle's logprobs of the watched tokens under each departure, [P, W] as in `own`, by what it is called."""
    return {text: _logprobs(declared, casts, battery, own, meant) for text, meant in departures(declared, casts)}


def _logprobs(declared: Recipe, casts: Casts, battery: Battery, own: Envelope, semantics: Semantics) -> np.ndarray:
    """The oracle's logprobs of the watched tokens under another meaning, [P, W]."""
    model, found = make_oracle(casts, declared, semantics=semantics)(NoProbe()), []
    for n, (prompt, forced) in enumerate(zip(battery.prompts, battery.continuations, strict=True)):
        (logits,) = single_pass(model, [list(prompt)], [list(forced)])
        rows = logits.double().log_softmax(-1).cpu().numpy()
        here = own.table.positions[:, 0] == n
        found.append(np.take_along_axis(rows, own.table.ids[here].clip(0), 1))
    return np.concatenate(found)
