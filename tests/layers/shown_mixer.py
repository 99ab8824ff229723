"""The mixer that docs/extending.md shows, as a class."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/extending.md"
SOURCE = re.search(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[1]  # type: ignore[index]

# as in tests/test_documentation.py: the same class may be registered again, one of another module may not
_names: dict = {"__name__": "documentation"}
exec(compile(SOURCE, str(PAGE), "exec"), _names)
LeakyAverage = _names["LeakyAverage"]
