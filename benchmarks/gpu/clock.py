"""How the minutes for which a machine is lent are spent, by this package's own account: starts, calls, pauses."""

import json
import time
from pathlib import Path

from benchmarks.gpu.plan import BUDGET, FIRST_CALL, PAUSE, START

EVERY = 5  # seconds between two notes


class Clock:
    """The calls so far and this one, on record in a folder that a machine keeps between calls.

    Where the folder holds none, the machine is fresh: its start counts as `START` seconds, whatever it took.

    Args:
        file: of the record.
        begin: of this call, in seconds since the epoch.
    """

    def __init__(self, file: Path, begin: float):
        self.file = file
        self.begin = begin
        self.earlier: list[dict[str, float]] = []
        self.start: float = START
        self._noted = 0.0
        if file.is_file():
            self.earlier = json.loads(file.read_text(encoding="utf-8"))
            self.start = max(0.0, begin - self.earlier[-1]["end"])  # the pause

    def resume(self, text: str) -> None:
        """Calls on a machine that was given back, unless this one's record holds them."""
        self.earlier = self.earlier or json.loads(text)

    @property
    def calls(self) -> list[dict[str, float]]:
        """Of each call, seconds of the start or pause before it and of itself, and when it ended."""
        now = time.time()
        this = {"before": round(self.start, 1), "seconds": round(now - self.begin, 1), "end": round(now, 1)}
        return [*self.earlier, this]

    @property
    def spent(self) -> float:
        return sum(call["before"] + call["seconds"] for call in self.calls)

    @property
    def left(self) -> float:
        """Seconds that a call which begins now may take; a machine that is there for longer is nobody's loan."""
        left = BUDGET - PAUSE - self.spent
        return min(FIRST_CALL, left) if left > PAUSE else FIRST_CALL

    def note(self) -> None:
        if time.time() - self._noted > EVERY:
            self.write()

    def write(self) -> None:
        self._noted = time.time()
        draft = self.file.with_suffix(".draft")
        draft.write_text(json.dumps(self.calls) + "\n", encoding="utf-8")
        draft.replace(self.file)

    def account(self) -> str:
        """One line."""
        calls = ", ".join(f"{call['before']:.0f} s + {call['seconds']:.0f} s" for call in self.calls)
        return f"Start or pause + call: {calls}; {self.spent:.0f} s of {BUDGET} s."
