"""Offloading

A model that fits neither memory nor one device has the same logits from CPU and disk (to 1e-6: weights mapped from
files lie at other addresses), and generation does not depend on the cache. The automatic device map gets memory for a
part of the weights and a folder for the rest; disk and CPU offload leave no weight in its module.
"""

import torch
from accelerate import cpu_offload, disk_offload

from tests.matrix.checks import EVERY_FAMILY, assert_near, cells, check_generation, logits_of
from tests.models.invariances import check_rollback
from tests.tiny_models import batch_of, own_language_model

QUICK = {
    "automatic device map": ("encoder-decoder",),
    "disk offload": (*EVERY_FAMILY, "student with a mixer", "bst mf unstructured", "spade hyena full"),
    "cpu offload": EVERY_FAMILY,
}


def _automatically(model, folder):
    # accelerate keeps room for the largest block, to bring it in from disk
    memory = {"cpu": int(0.9 * sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())))}
    model.save_pretrained(folder / "model")
    options = {"device_map": "auto", "max_memory": memory, "offload_folder": folder / "rest"}
    offloaded = type(model).from_pretrained(folder / "model", **options).eval()
    assert set(offloaded.hf_device_map.values()) == {"cpu", "disk"}, "nothing was divided"
    return offloaded


@cells(QUICK)
def test_offloaded(column, row, tmp_path):
    """Every module fetches its own parameters before it runs."""
    model, device = own_language_model(row), torch.device("cpu")
    expected = logits_of(model, row)
    if column == "automatic device map":
        offloaded = _automatically(model, tmp_path)
    elif column == "disk offload":
        offloaded = disk_offload(model, tmp_path, execution_device=device)
    else:
        offloaded = cpu_offload(model, execution_device=device)
    weights = [parameter.is_meta for parameter in offloaded.parameters()]
    assert all(weights) or (column == "automatic device map" and any(weights)), "a weight stayed in place"
    assert_near(logits_of(offloaded, row), expected, 1e-6, "the offloaded model")
    check_generation(offloaded, row)
    if not offloaded.config.is_encoder_decoder:  # a rollback recomputes outside of the modules' forward
        check_rollback(offloaded, batch_of(row)["input_ids"], cuts=[6], removed=3)
