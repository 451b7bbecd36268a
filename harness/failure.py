"""An exception as a record keeps it: one line, and a traceback without the places of one's own machine."""

import re
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINE_CHARS = 500
INTERRUPTIONS = (KeyboardInterrupt, SystemExit, GeneratorExit)


def one_line(error: BaseException) -> str:
    """`Class: message` on one line of at most 500 characters; an interruption says that it is one."""
    text = " ".join(impersonal(str(error)).split())
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return (f"interrupted ({line})" if isinstance(error, INTERRUPTIONS) else line)[:LINE_CHARS]


def traceback_text(error: BaseException) -> str:
    """The traceback with causes and contexts; files are named from the repository or the library they belong to."""
    return impersonal("".join(traceback.format_exception(error)))


def impersonal(text: str) -> str:
    """`text` with paths cut to start at the repository, the Python library or the home folder, and valid UTF-8."""
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    text = re.sub(r"[^\s\"']*/(?:site|dist)-packages/", "", text)
    text = re.sub(r"[^\s\"']*/lib/python3\.\d+/", "", text)
    text = text.replace(f"{ROOT}/", "")
    text = re.sub(r'File "/[^"]*/([^"/]+)"', r'File "\1"', text)
    home = str(Path.home())
    return text if home == "/" else text.replace(home, "~")
