"""A named bar with the time left, for what takes long: on the error output, and only in a terminal."""

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

Step = TypeVar("Step")


def progress(steps: Iterable[Step], name: str) -> Iterator[Step]:
    """The steps, counted by a bar that is gone after the last one."""
    from tqdm import tqdm

    return iter(tqdm(steps, desc=name, file=sys.stderr, leave=False, disable=None))
