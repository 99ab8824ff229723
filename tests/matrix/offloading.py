"""accelerate: does a model that fits neither memory nor one device give the same bits from CPU and disk?"""

import tempfile

import torch
from accelerate import cpu_offload, disk_offload

from tests.matrix.columns import Column, Group
from tests.matrix.rows import assert_near, check_generation, logits_of, model_of, saved


def cpu_and_disk(row: str) -> None:
    """`device_map="auto"` with memory for a part of the weights: the rest stays on disk and comes when its turn is."""
    model = model_of(row)
    expected = logits_of(model, row)
    # accelerate keeps room for the largest block, to bring it in from disk
    memory = int(0.9 * sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())))
    with saved(model) as folder, tempfile.TemporaryDirectory() as shelf:
        offloaded = (
            type(model)
            .from_pretrained(folder, device_map="auto", max_memory={"cpu": memory}, offload_folder=shelf)
            .eval()
        )
        places = set(offloaded.hf_device_map.values())
        assert places == {"cpu", "disk"}, f"nothing was divided: {places}"
        assert any(parameter.is_meta for parameter in offloaded.parameters()), "every weight is in memory"
        assert_near(logits_of(offloaded, row), expected, 1e-6, "the offloaded model")
        check_generation(offloaded, row)


def everything_on_disk(row: str) -> None:
    """Every module fetches its own parameters from files before it runs."""
    model = model_of(row)
    expected = logits_of(model, row)
    with tempfile.TemporaryDirectory() as shelf:
        offloaded = disk_offload(model, shelf, execution_device=torch.device("cpu"))
        assert all(parameter.is_meta for parameter in offloaded.parameters()), "a weight stayed in memory"
        assert_near(logits_of(offloaded, row), expected, 1e-6, "the offloaded model")
        check_generation(offloaded, row)


def everything_in_memory_by_hooks(row: str) -> None:
    """`cpu_offload`: the same hooks over a state dictionary."""
    model = model_of(row)
    expected = logits_of(model, row)
    offloaded = cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in offloaded.parameters()), "a weight stayed in place"
    assert_near(logits_of(offloaded, row), expected, 1e-6, "the offloaded model")
    check_generation(offloaded, row)


GROUP = Group(
    "Offloading",
    "The logits are as before (to 1e-6: weights mapped from files lie at other addresses), and generation does not "
    'depend on the cache. `device_map="auto"` gets memory for a part of the weights and '
    "a folder for the rest; `disk_offload` and `cpu_offload` leave no weight in "
    "its module.",
    (
        Column('device_map="auto", CPU and disk', cpu_and_disk, "accelerate"),
        Column("disk_offload", everything_on_disk, "accelerate"),
        Column("cpu_offload", everything_in_memory_by_hooks, "accelerate"),
    ),
)
