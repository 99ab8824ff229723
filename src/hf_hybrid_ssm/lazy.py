"""Public names that are imported on first use, so that importing a package costs nothing."""

import importlib
from collections.abc import Callable
from typing import Any


def attach(package: str, names: dict[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Module-level `__getattr__`, `__dir__` and `__all__` for `package`.

    Args:
        package: the package's `__name__`.
        names: public name → absolute name of the module that defines it.
    """

    def __getattr__(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(names[name]), name)

    def __dir__() -> list[str]:
        return sorted(names)

    return __getattr__, __dir__, sorted(names)
