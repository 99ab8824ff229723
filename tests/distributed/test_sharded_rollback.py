"""A rollback recomputes states outside of any forward, where FSDP2 has its weights in shards."""

import pytest
import torch

from tests.distributed.sharded_rollback import CASES, after_rollback
from tests.tiny_models import own_language_model


@pytest.mark.parametrize("case", CASES)
def test_going_back_in_shards(two_processes, case):
    expected = after_rollback(own_language_model(case))
    for rank in (0, 1):
        found = torch.load(two_processes / f"rollback-{rank}.pt")[case]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
