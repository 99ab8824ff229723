"""`save_pretrained` and `push_to_hub` that can add the code to a checkpoint."""

import importlib
import os
from typing import Any

from transformers import PreTrainedModel

# By name: the floor of the models does not know the room that shares them, and an exported copy of this file, which
# transformers scans for imports, must not ask for this package. A model of such a copy saves its own code anyway.
EXPORTER = "hf_hybrid_ssm.hub"


class SavesCode(PreTrainedModel):
    """What every family's `PreTrainedModel` adds to transformers' saving."""

    _exports_code = False

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, export_code: bool = False, **kwargs: Any):
        """As in transformers; `export_code=True` adds what `trust_remote_code=True` loads without this package."""
        super().save_pretrained(save_directory, *args, **kwargs)
        if export_code or self._exports_code:
            importlib.import_module(EXPORTER).export_code(self, save_directory)

    def push_to_hub(self, repo_id: str, *args: Any, export_code: bool = False, **kwargs: Any) -> str:
        """As in transformers; for `export_code` see `save_pretrained`, which transformers calls from here."""
        self._exports_code = export_code
        try:
            return super().push_to_hub(repo_id, *args, **kwargs)
        finally:
            self._exports_code = False
