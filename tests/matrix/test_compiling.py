"""torch.compile

`torch.compile(model, fullgraph=True)`, with the backend `aot_eager` (one graph, forward and backward) where the column
does not say inductor. Training: the loss to 1e-4 and every gradient to 1e-3 of eager ones. Prefill: the logits to 1e-4
of the largest. Compiled decoding is in tests/models. Packed rows are those of models whose graph may hold several
documents: an encoder-decoder takes none, and LMU-ISA takes them apart by the values of `seq_idx`, outside of a graph.
"""

import copy

import torch

from tests.matrix.checks import EVERY_FAMILY, assert_near, cells, logits_of, rows, without_dropout
from tests.tiny_models import ROWS, batch_of, compiles, shallow_language_model

pytestmark = compiles
# traces forward and backward into graphs of ATen operations, as the default backend does, and runs them as they are;
# inductor then takes up to minutes for each of these models on a CPU, hence its one column
TRACED = "aot_eager"
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 9, [0] * 14])


@rows(*EVERY_FAMILY)
def test_training_step(row):
    _check_training(row)


@rows(
    "bst sh s4d",
    "bst mf unstructured",
    every=[row for row in ROWS if not row.startswith(("lmu-isa", "encoder-decoder"))],
)
def test_packed_training_step(row):
    _check_training(row, seq_idx=DOCUMENTS)


def _check_training(row, **packing):
    model, compiled_model = (without_dropout(copy.deepcopy(shallow_language_model(row)).train()) for _ in range(2))
    compiled = torch.compile(compiled_model, fullgraph=True, backend=TRACED)
    losses = [step(**batch_of(row), **packing, use_cache=False).loss for step in (model, compiled)]
    for loss in losses:
        loss.backward()
    assert_near(losses[1].detach(), losses[0].detach(), 1e-4, "loss")
    for (name, parameter), other in zip(model.named_parameters(), compiled_model.parameters()):
        if parameter.requires_grad and parameter.grad is not None:
            size = parameter.grad.abs().max()
            torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-3, atol=1e-3 * float(size) + 1e-6, msg=name)


# `make test` has the prefill of every family in test_fresh_process.py; the families of SPADE share their layers
@cells({"prefill": ("lmu-isa",), "prefill, inductor": EVERY_FAMILY[:-1]})
def test_prefill(column, row):
    model, backend = shallow_language_model(row), "inductor" if "inductor" in column else TRACED
    with torch.no_grad():
        got = torch.compile(model, fullgraph=True, backend=backend)(**batch_of(row), use_cache=False).logits
    assert_near(got, logits_of(model, row), 1e-4, "logits")
