"""Rows that accelerate or DeepSpeed shares out among processes, where only keys and values are exchanged: a recurrence
or a window would begin anew in each, in silence."""

import sys
from types import SimpleNamespace

import pytest
from accelerate import big_modeling

from tests.tiny_models import HEADED, OF_FAMILIES, ROWS, own_language_model
from tests.tiny_models import inputs_for as inputs_of

DEEPSPEED = "deepspeed.runtime.sequence_parallel.parallel_state_sp"


@pytest.mark.parametrize("variant", ROWS)
def test_deepspeeds_sequence_parallelism_is_refused(variant, monkeypatch):
    model = own_language_model(variant)
    inputs = inputs_of(model)
    monkeypatch.setitem(sys.modules, DEEPSPEED, SimpleNamespace(_SEQUENCE_PARALLEL_GROUP=None))
    model(**inputs)  # imported, as with every engine of DeepSpeed
    monkeypatch.setitem(sys.modules, DEEPSPEED, SimpleNamespace(_SEQUENCE_PARALLEL_GROUP=object()))
    with pytest.raises(ValueError, match=r"^DeepSpeed's sequence parallelism \(sp_size > 1\)"):
        model(**inputs)


@pytest.mark.parametrize("variant", [name for name in HEADED if name in OF_FAMILIES])
def test_accelerates_context_parallelism_refuses_families(variant):
    """What `prepare` calls, before GPUs matter; a page says so."""
    if not hasattr(big_modeling, "_attach_context_parallel_hooks"):
        pytest.skip("an older accelerate")
    with pytest.raises(ValueError, match="Context parallelism does not support"):
        big_modeling._attach_context_parallel_hooks(own_language_model(variant))
