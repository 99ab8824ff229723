"""Several processes compute what one does, and a plan is what a model takes: every comparison, counted.

    python -m tests.reliability.scale

Writes docs/reliability/scale.md. Exits with 1 if a comparison is outside of its bound.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

from hf_hybrid_ssm.ops._core.dispatch import backend
from hf_hybrid_ssm.planning import plan
from tests import test_planning as planning
from tests.distributed import resuming, sequence_parallel, tensor_parallel
from tests.distributed.launching import in_two_processes
from tests.reliability.reporting import table, write_page
from tests.small_models import CASES, built

Values = dict[str, torch.Tensor]
BOUND = 1e-4  # float32 sums in another order, and a few steps of training on them


def main() -> int:
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for job in (tensor_parallel, resuming):
            job.prepare(folder)
        in_two_processes(folder)
        found = [comparison(*row) for row in (*spread(folder), *cut(folder), *resumed(folder))]
    ratios = list(planned())
    within = [row[-2] <= row[-1] for row in found] + [row[-1][0] <= row[2] <= row[3] <= row[-1][1] for row in ratios]
    write_page(
        "scale",
        "Several processes, and plans",
        "`python -m tests.reliability.scale` runs small models in two processes (gloo, on a CPU) and in one, and "
        "compares every number.",
        table(("two processes equal one", "runs", "tensors", "numbers", "largest difference", "bound"), shown(found)),
        "A difference is absolute, and relative to the tensor's largest number where that exceeds 1. Tensor parallel: "
        "logits with and without gradients, and the gradient of every parameter, on both processes. Pipeline "
        "parallel: logits and generated text. Rows cut: logits, the sum of the losses, the gradient of every "
        "parameter, in float64. Training: the losses of all steps, and the weights at the end.",
        "## Plans",
        f"What `hf_hybrid_ssm.planning` says, divided by what a small model of each of {len(CASES)} configurations "
        "keeps or computes in plain torch.",
        table(("planned / measured", "models", "smallest", "largest", "bounds"), [row[:-1] for row in ratios]),
        "Not covered: GPUs; FSDP2 through the Trainer, which makes no FSDP run on CPUs; pipeline parallelism of "
        "encoder-decoders, which transformers does not have. In a tensor-parallel model the "
        "scans, memories and attention with learned biases run whole on every process; only weights of products are "
        "split.",
    )
    print(f"{within.count(False)} of {len(within)} rows outside of their bounds")
    return 0 if all(within) else 1


def shown(rows: list[tuple]) -> Iterator[tuple]:
    for name, runs, tensors, numbers, largest, bound in rows:
        yield name, runs, tensors, f"{numbers:,}", f"{largest:.1e}", f"{bound:.0e}"


def comparison(name: str, pairs: list[tuple[Values, Values]]) -> tuple:
    """One row: how much was compared, and how far apart it is at most."""
    tensors = numbers = 0
    largest = 0.0
    for values, expected in pairs:
        if values.keys() != expected.keys():
            largest = float("inf")
        for key in values.keys() & expected.keys():
            expects = expected[key].double()
            difference = (values[key].double() - expects).abs().max() / expects.abs().max().clamp(min=1)
            tensors, numbers = tensors + 1, numbers + expects.numel()
            largest = max(largest, float(difference))
    return name, len(pairs), tensors, numbers, largest, BOUND


def spread(folder: Path) -> Iterator[tuple[str, list[tuple[Values, Values]]]]:
    """Layers over the processes."""
    ranks = [torch.load(folder / f"parallel-{rank}.pt") for rank in (0, 1)]
    expected = {case: tensor_parallel.answers(built(case)) for case in tensor_parallel.TENSOR}
    yield "tensor parallel", [(rank["tensor", case][0], expected[case]) for case in expected for rank in ranks]
    expected = {case: tensor_parallel.text(built(case, use_cache=True)) for case in tensor_parallel.PIPELINE}
    yield "pipeline parallel", [(rank["pipeline", case][0], expected[case]) for case in expected for rank in ranks]


def cut(folder: Path) -> Iterator[tuple[str, list[tuple[Values, Values]]]]:
    """Rows over the processes."""
    ranks = [torch.load(folder / f"sequence-{rank}.pt") for rank in (0, 1)]
    pairs = []
    for case, given in sequence_parallel.cases().items():
        model = sequence_parallel.longhorn()
        outputs = model(**given)
        outputs.loss.backward()
        pieces = [rank[case] for rank in ranks]
        together = {"logits": torch.cat([piece["logits"] for piece in pieces], 1)}
        together["loss"] = sum(piece["loss"] for piece in pieces)
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        whole = {"logits": outputs.logits.detach(), "loss": outputs.loss.detach()} | gradients
        pairs += [(together | piece["gradients"], whole) for piece in pieces]
    yield "rows cut between processes", pairs


def resumed(folder: Path) -> Iterator[tuple[str, list[tuple[Values, Values]]]]:
    """Training in shards and in copies."""
    alone, together = torch.load(folder / "alone.pt"), torch.load(folder / "together.pt")
    half = resuming.HALF

    def values(losses: list[float], weights: Values) -> Values:
        return {"losses": torch.tensor(losses), **weights}

    taken_up = []
    for case, (losses, weights) in alone.items():
        model = resuming.spoilt(resuming.model_of(case))
        optimizer = resuming.optimizer_of(model)
        resuming.resume(model, optimizer, folder / "two" / case)
        again = resuming.train(model, optimizer, half, resuming.STEPS)
        taken_up.append((values(again, resuming.whole(model)), values(losses[half:], weights)))
    yield "saved in shards by two, taken up by one", taken_up
    for name, key, first in (
        ("saved by one, taken up in shards by two", "second half, from one to two processes", half),
        ("activation checkpointing in two copies", "checkpointing, two processes", 0),
    ):
        pairs = [(values(*together[case][key]), values(losses[first:], w)) for case, (losses, w) in alone.items()]
        yield name, pairs


def planned() -> Iterator[tuple]:
    """Ratios of a plan to what is measured."""
    kept, again, flops = [], [], []
    for case in CASES:
        model = built(case)
        given, setup = planning.batch_for(model), planning.setup_for
        tokens = planning.BATCH * planning.LENGTH
        logits = planning.log_softmax_bytes(model)
        with backend("torch"):
            measured = planning.bytes_kept(model, given) - logits
        kept.append(plan(model.config, setup(kernels="torch")).memory["activations"] / measured)
        found = plan(model.config, setup())
        unseen = 3 * found.flops_per_token["recurrence"] * tokens
        flops.append((found.flops_per_step - unseen) / planning.counted_flops(model, backward=True))
        model.gradient_checkpointing_enable({"use_reentrant": False})
        with backend("torch"):
            measured = planning.bytes_kept(model, given) - logits
        again.append(plan(model.config, setup(kernels="torch", checkpointing=True)).memory["activations"] / measured)
    bounds = (round(1 / planning.WITHIN, 2), planning.WITHIN)
    rows = (("activations", kept, bounds), ("activations with checkpointing", again, bounds))
    for name, found, limits in (*rows, ("matrix products of a step", flops, (0.97, 1.03))):
        low, high = limits
        yield name, len(found), round(min(found), 3), round(max(found), 3), f"{low} to {high}", limits


if __name__ == "__main__":
    sys.exit(main())
