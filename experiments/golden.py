"""`neartie golden`: list, show, verify, import and export golden tokens."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

from experiments.words import Flags
from harness.config import Config
from harness.golden import (
    export_golden,
    golden_names,
    import_folder,
    load_golden,
    show_golden,
    verify_golden,
    write_golden,
)
from harness.golden_files import import_files, run_files
from harness.golden_folder import is_token_folder
from harness.text_table import text_table
from variants.errors import InputError, UsageError

Document = dict[str, object]


def run(config: Config, flags: Flags) -> int:
    """Do what the action says; `verify` exits 3 where a golden cannot be trusted."""
    given = {name: flags.values[name] for name in ("eos", "greedy") if name in flags.values}
    if given and flags.action != "import":
        raise UsageError(f"--{next(iter(given))} has no effect with golden {flags.action}: it is said of an import")
    document, text, code = ACTIONS[flags.action](*flags.words, **given)
    print(json.dumps(document) if flags.json else text)
    return code


def _list() -> tuple[Document, str, int]:
    shown = [show_golden(load_golden(name)) for name in golden_names()]
    columns = ("name", "bar", "runs", "prompts", "tokens_per_prompt", "exact_ties")
    return {"goldens": shown}, text_table(columns, [[golden[c] for c in columns] for golden in shown]), 0


def _show(name: str) -> tuple[Document, str, int]:
    shown = show_golden(load_golden(name))
    return shown, "\n".join(_lines(shown)), 0


def _lines(document: Document, indent: str = "") -> list[str]:
    lines: list[str] = []
    for key, value in document.items():
        if isinstance(value, dict) and value:
            lines += [f"{indent}{key}:", *_lines(value, indent + "  ")]
        else:
            lines.append(f"{indent}{key}: {value if isinstance(value, str) else json.dumps(value)}")
    return lines


def _verify(name: str) -> tuple[Document, str, int]:
    problems = verify_golden(name)
    text = "\n".join(f"{name}: {problem}" for problem in problems) or f"{name}: sound"
    return {"golden": name, "problems": problems}, text, InputError.exit_code if problems else 0


def _import(source: str, out: str, *, eos: str | None = None, greedy: str | None = None) -> tuple[Document, str, int]:
    if eos is not None and not eos.isdigit():
        raise UsageError(f"--eos={eos}: expected the id of the end of sequence")
    path, end = Path(source), None if eos is None else int(eos)
    if not is_token_folder(path) and run_files(path):
        golden = import_files(path, greedy=greedy is not None, eos=end)
    elif greedy is not None:
        raise UsageError(f"--greedy has no effect: {source} is greedy by its layout, or holds no file of a run")
    else:
        golden = import_folder(path, eos=end)
    golden = write_golden(golden, out)
    shown = show_golden(golden)
    k, n, t = golden.tokens.shape
    first = f"{golden.path}: {n} prompts x {t} tokens, K = {k}, bar {golden.bar.name}"
    return shown, "\n  ".join([first, *golden.provenance.get("import_notes", [])]), 0


def _export(name: str, folder: str) -> tuple[Document, str, int]:
    left_out = list(export_golden(load_golden(name), folder))
    text = f"{folder}: written; this layout cannot hold {', '.join(left_out) or 'less'}"
    return {"golden": name, "folder": folder, "left_out": left_out}, text, 0


ACTIONS: dict[str, Callable[..., tuple[Document, str, int]]] = {
    "list": _list,
    "show": _show,
    "verify": _verify,
    "import": _import,
    "export": _export,
}


if __name__ == "__main__":
    from experiments.cli import main

    sys.exit(main(["golden", *sys.argv[1:]]))
