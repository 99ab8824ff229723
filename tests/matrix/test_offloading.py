"""Offloading

A model that fits neither memory nor one device has the same logits from CPU and disk (to 1e-6: weights mapped from
files lie at other addresses), and generation does not depend on the cache. The automatic device map gets memory for a
part of the weights and a folder for the rest; disk and CPU offload leave no weight in its module.
"""

import tempfile

import torch
from accelerate import cpu_offload, disk_offload

from tests.matrix.checks import assert_near, check_generation, logits_of, rows, saved
from tests.tiny_models import own_language_model


@rows("encoder-decoder")
def test_automatic_device_map(row):
    model = own_language_model(row)
    expected = logits_of(model, row)
    # accelerate keeps room for the largest block, to bring it in from disk
    memory = {"cpu": int(0.9 * sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())))}
    with saved(model) as folder, tempfile.TemporaryDirectory() as shelf:
        options = {"device_map": "auto", "max_memory": memory, "offload_folder": shelf}
        offloaded = type(model).from_pretrained(folder, **options).eval()
        places = set(offloaded.hf_device_map.values())
        assert places == {"cpu", "disk"}, f"nothing was divided: {places}"
        assert any(parameter.is_meta for parameter in offloaded.parameters()), "every weight is in memory"
        assert_near(logits_of(offloaded, row), expected, 1e-6, "the offloaded model")
        check_generation(offloaded, row)


@rows("longhorn", "bst mf unstructured", "lmu-isa", "spade s4 window", "spade hyena full")
def test_disk_offload(row, tmp_path):
    model = own_language_model(row)
    _check(row, logits_of(model, row), disk_offload(model, tmp_path, execution_device=torch.device("cpu")))


@rows()
def test_cpu_offload(row):
    model = own_language_model(row)
    _check(row, logits_of(model, row), cpu_offload(model, execution_device=torch.device("cpu")))


def _check(row, expected, offloaded):
    """Every module fetches its own parameters before it runs."""
    assert all(parameter.is_meta for parameter in offloaded.parameters()), "a weight stayed in place"
    assert_near(logits_of(offloaded, row), expected, 1e-6, "the offloaded model")
    check_generation(offloaded, row)
