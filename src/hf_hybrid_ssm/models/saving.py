"""`save_pretrained` and `push_to_hub` that can add the code to a checkpoint."""

import os
from typing import Any

from transformers import PreTrainedModel


class SavesCode(PreTrainedModel):
    """What every family's `PreTrainedModel` adds to transformers' saving.

    `export_code=True` adds what `trust_remote_code=True` loads without this package, `False` leaves it out. By
    default a model keeps what it came with: whoever could load it can load what becomes of it. The configuration,
    saved with every model, does the work.
    """

    def save_pretrained(
        self, save_directory: str | os.PathLike, *args: Any, export_code: bool | None = None, **kwargs: Any
    ) -> None:
        """As in transformers; for `export_code` see the class."""
        self._set_code(export_code, save_directory)
        super().save_pretrained(save_directory, *args, **kwargs)

    def push_to_hub(self, repo_id: str, *args: Any, export_code: bool | None = None, **kwargs: Any) -> str:
        """As in transformers; for `export_code` see the class."""
        self._set_code(export_code)
        return super().push_to_hub(repo_id, *args, **kwargs)

    def _set_code(self, export_code: bool | None, folder: str | os.PathLike | None = None) -> None:
        exporter = None if export_code is None else self.config.code_exporter
        if exporter is not None and export_code:
            exporter.check_exportable(self.config.model_type, self, folder)
            self.config.auto_map = exporter.auto_map_of(self.config.model_type)
        elif exporter is not None and hasattr(self.config, "auto_map"):
            del self.config.auto_map
