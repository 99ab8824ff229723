"""What a model returns besides its logits, where its class was never built: sent to another process, or renamed by
FSDP2."""

import sys

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.processes import run
from tests.tiny_models import ROWS, ids_of, inputs_for, own_language_model

SENT = """
import sys, torch, hf_hybrid_ssm
for path in sys.argv[1:]:
    model, inputs = torch.load(path, weights_only=False)
    output = model(**inputs, output_hidden_states=True)
    print(*(len(output[name]) for name in output if name.endswith("hidden_states") and name[0] != "e"))
"""


def hidden_states(output):
    return [output[name] for name in output if name.endswith("hidden_states") and name[0] != "e"]


@pytest.mark.timeout(120)
def test_a_model_that_was_sent_to_another_process_returns_hidden_states(tmp_path):
    wanted = []
    for number, variant in enumerate(ROWS):
        model = own_language_model(variant)
        inputs = inputs_for(model)
        torch.save((model, inputs), tmp_path / f"{number:02}.pt")  # before transformers' hooks are there
        wanted.append(" ".join(str(len(each)) for each in hidden_states(model(**inputs, output_hidden_states=True))))
    done = run([sys.executable, "-c", SENT, *map(str, sorted(tmp_path.glob("*.pt")))])
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[:-1] == wanted and all(int(each) > 1 for each in wanted)


@pytest.fixture
def mesh(tmp_path):
    options = {"init_method": f"file://{tmp_path / 'meeting'}", "rank": 0, "world_size": 1}
    torch.distributed.init_process_group("gloo", **options)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("variant", [row for row in ROWS if row != "encoder-decoder"])
def test_a_base_model_in_shards_returns_hidden_states(variant, mesh):
    model, ids = own_language_model(variant).model, ids_of(2, 12)
    wanted = model(ids, output_hidden_states=True).hidden_states
    found = fully_shard(model, mesh=mesh)(ids, output_hidden_states=True).hidden_states
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
