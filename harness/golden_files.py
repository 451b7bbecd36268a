"""A golden of files that hold prompts and tokens together: one file a run of the reference, in any format of a run."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from harness.golden_data import ENDED, Golden
from harness.golden_folder import import_doubts
from harness.row_ends import cut_after
from harness.sampling import normalize_sampling
from harness.token_run import TokenRun, is_token_file, read_run
from variants.errors import InputError, UsageError


def run_files(path: Path) -> list[Path]:
    """The file, or those of a folder in the order of their names; none where there is no run in it."""
    if path.is_dir():
        return sorted(p for p in path.iterdir() if is_token_file(p) and p.suffix not in (".npy", ".i32"))
    return [path] if is_token_file(path) else []


def import_files(path: Path, *, greedy: bool, eos: int | None = None) -> Golden:
    """The golden of K files, one run each, of the same prompts; logprobs are those of the first.

    greedy: whether the user says that every token is the argmax, which no such file does. eos: what follows this id in
    a row is padding. Raises UsageError without `greedy`, InputError for files that hold no prompts or other ones.
    """
    if not greedy:
        raise UsageError(
            f"{path}: a file does not say how its tokens were chosen; if each is the argmax (temperature 0, no "
            "penalty), say so: --greedy"
        )
    runs = [read_run(file) for file in run_files(path)]
    prompts = runs[0].prompts
    if prompts is None or runs[0].tokens.ndim != 2:
        raise InputError(f"{runs[0].name}: holds no prompt_ids; a golden needs the prompts that its tokens answer")
    for run in runs[1:]:
        if run.prompts != prompts:
            raise InputError(f"{run.name}: its prompts are not those of {runs[0].name}; runs answer the same prompts")
    tokens = _stacked(runs)
    tokens = tokens if eos is None else cut_after(tokens, eos)
    rule = "stop" if (tokens == ENDED).any() else "unknown"
    golden = Golden(
        name=path.stem,
        prompts=prompts,
        tokens=tokens,
        top_ids=runs[0].top_ids,
        top_logprobs=runs[0].top_logprobs,
        provenance={"imported_from": f"{len(runs)} files, a run each" if len(runs) > 1 else "a file of one run"},
        sampling=normalize_sampling({"temperature": 0.0, "eos": rule, "stated_by": "--greedy"}),
    )
    notes = import_doubts(golden)
    return replace(golden, provenance=golden.provenance | ({"import_notes": notes} if notes else {}))


def _stacked(runs: list[TokenRun]) -> np.ndarray:
    """int32 [K, N, T], rows of a shorter run padded."""
    longest = max(run.tokens.shape[1] for run in runs)
    return np.stack(
        [np.pad(run.tokens, ((0, 0), (0, longest - run.tokens.shape[1])), constant_values=ENDED) for run in runs]
    )
