"""What the levels above models add to loading and saving, filled in when the package is imported.

Models import nothing from above. A copy of this file in exported code stays empty, for a folder's code runs alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass
class Connections:
    """
    Args:
        code_exporter: configuration class → the module that writes its code beside a checkpoint, with `auto_map_of`,
            `check_exportable` and `write_code`; None for a class whose code is not exported.
        check_weight_files: raises a ValueError if the weight files of a folder are incomplete.
        delta_arguments: folder, teacher and the keywords of `from_pretrained` → the keywords that load a delta with
            its teacher; None if the folder holds no delta.
        prefix_cache_of_process: the cache of states by prefix that `generate` uses where it is given none; None if
            this process has none.
    """

    code_exporter: Callable[[type], ModuleType | None] | None = None
    check_weight_files: Callable[[Any], None] | None = None
    delta_arguments: Callable[[Any, Any, dict[str, Any]], dict[str, Any] | None] | None = None
    prefix_cache_of_process: Callable[[], Any] | None = None


CONNECTIONS = Connections()
