"""What a command says when it cannot go on: one line, and the exit status.

`HF_HYBRID_SSM_TRACEBACK=1` shows where an error comes from instead.
"""

import os
import sys
from collections.abc import Callable

from hf_hybrid_ssm.hub.one_line import in_one_line

TRACEBACK = "HF_HYBRID_SSM_TRACEBACK"
EXPECTED = (ValueError, OSError, ImportError)
"""What input raises; every other error is a defect, and shows its traceback."""
INTERRUPTED = 130  # 128 and the number of SIGINT, as shells count


def status_of(name: str, run: Callable[[], int], expected: tuple[type[BaseException], ...] = EXPECTED) -> int:
    """The exit status of `run`: its own; 1 after an expected error, which is printed in one line; 130 after Ctrl-C."""
    try:
        return run()
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # of `... | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except expected as error:
        if os.environ.get(TRACEBACK):
            raise
        print(f"{name}: {one_line(error)}", file=sys.stderr)
        return 1


def one_line(error: BaseException) -> str:
    """What an error says (see `in_one_line`), and then what it came from, unless it says that itself."""
    message = in_one_line(error)
    cause = error.__cause__
    while cause is not None and cause.__cause__ is not None:
        cause = cause.__cause__
    reason = in_one_line(cause) if cause is not None else ""
    return message if not reason or reason in message else f"{message} ({reason})"


def print_what_can_be_shown() -> None:
    """Replace characters that the output's encoding lacks (in a C locale) by `?` instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
