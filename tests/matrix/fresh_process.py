"""Export and compile a prefill of each family where nothing ran before: constants and caches are empty.

Prints the rows that worked. (`test_fresh_process.py` runs this.)
"""

import tempfile
from pathlib import Path

import torch

from tests.matrix.checks import EVERY_FAMILY, assert_near, logits_of
from tests.matrix.test_exporting import test_prefill
from tests.tiny_models import batch_of, shallow_language_model


def main() -> None:
    for row in EVERY_FAMILY:
        with tempfile.TemporaryDirectory() as folder:
            test_prefill("export: prefill", row, Path(folder))
        print("exported", row)
        torch._dynamo.reset()
        model = shallow_language_model(row)
        with torch.no_grad():
            got = torch.compile(model, fullgraph=True, backend="aot_eager")(**batch_of(row), use_cache=False).logits
        assert_near(got, logits_of(model, row), 1e-4, "logits")
        print("compiled", row)


if __name__ == "__main__":
    main()
