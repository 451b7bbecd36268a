"""The errors a user can cause, one class per exit code.

Each message says what was got, what was expected and what to do; the command line prints it as one line.
"""


class NeartieError(ValueError):
    """A failure that is reported as one line; `exit_code` is what the process returns."""

    exit_code = 6


class UsageError(NeartieError):
    """A wrong command, option or configuration (exit code 2)."""

    exit_code = 2


class InputError(NeartieError):
    """A golden, checkpoint or tokenizer that cannot be used (exit code 3)."""

    exit_code = 3


class DeviceError(NeartieError):
    """The environment or the device lacks what was asked for (exit code 4)."""

    exit_code = 4


class EngineError(NeartieError):
    """An engine failed while it was running (exit code 5)."""

    exit_code = 5
