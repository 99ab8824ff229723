"""What other libraries cannot do yet, by the error they say it with: the reason behind a cell that is not "yes".

An error that none of these explains is ours until shown otherwise, and `report.py` ends with an error then.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Limit:
    """One limit.

    Args:
        library: the distribution that has it.
        error: regular expression found in the error's line.
        reason: what it cannot do, in a sentence or two.
    """

    library: str
    error: str
    reason: str


LIMITS: tuple[Limit, ...] = ()


def limit_behind(error: str) -> Limit | None:
    """The limit that explains an error; None where nothing does."""
    return next((limit for limit in LIMITS if re.search(limit.error, error)), None)
