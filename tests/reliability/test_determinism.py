"""The same seed gives the same bits: in training and in every forward pass.

Training is repeated with other numbers of loading workers and in a process with other hashes, a forward pass after
ones of other lengths, with the states kept and without. Other numbers of threads, other machines and other versions of
torch add in other orders; that is not looked at here. Sampling from a seed is in tests/models.
"""

import inspect
import os
import subprocess
import sys
import tempfile

import pytest
import torch
import transformers
from transformers import PreTrainedModel, Trainer, TrainingArguments, set_seed

from tests.reliability.bits import digest, same_bits
from tests.reporting import THOROUGH
from tests.tiny_models import (
    COMBINATIONS,
    EVERY,
    FEW,
    TOKENS,
    build,
    class_with_loss,
    classes_of,
    config_of,
    inputs_for,
    labels_for,
)

TRAINED = ["longhorn + window and full attention", "bst mh s4"]
LENGTHS = (12, 70, 300, 70, 12)  # within a block, beyond one, and back


def train(variant: str, workers: int = 0, seed: int = 3) -> str:
    """The digest of a short run of `Trainer`: initialisation, order of rows, dropout and optimizer from one seed."""
    set_seed(seed)
    config = config_of(variant)
    for field in [field for field in vars(config) if "dropout" in field]:
        setattr(config, field, 0.1)
    model = classes_of(variant)[class_with_loss(variant)](config)
    ids = torch.randint(3, TOKENS["vocab_size"], (8, 20), generator=torch.Generator().manual_seed(5))
    rows = [{"input_ids": row, "labels": label} for row, label in zip(ids, labels_for(model, ids))]
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder, max_steps=5, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1,
            dataloader_num_workers=workers, seed=seed, report_to=[], save_strategy="no", disable_tqdm=True,
            use_cpu=True,
        )  # fmt: skip
        trainer = Trainer(model=model, args=options, train_dataset=rows)
        trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return digest({**model.state_dict(), "losses": torch.tensor(losses, dtype=torch.float64)})


def train_elsewhere(variant: str, hash_seed: int) -> str:
    """The digest of `train` in a process of its own with other hashes."""
    code = f"from tests.reliability.test_determinism import train; print(train({variant!r}))"
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()[-1]


def gradients(variant: str, repetitions: int) -> set[str]:
    """Digests of the same backward pass of a model wide enough for four threads to share its work."""
    torch.manual_seed(3)
    model = classes_of(variant)[class_with_loss(variant)](config_of(variant, hidden_size=192))
    ids = torch.randint(3, TOKENS["vocab_size"], (8, 120), generator=torch.Generator().manual_seed(5))
    threads, found = torch.get_num_threads(), set()
    torch.set_num_threads(4)
    try:
        for _ in range(repetitions):
            model.zero_grad()
            torch.manual_seed(4)  # dropout
            model(input_ids=ids, labels=labels_for(model, ids)).loss.backward()
            found.add(digest({name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    finally:
        torch.set_num_threads(threads)
    return found


@torch.no_grad()
def different_forwards(model: PreTrainedModel) -> list[tuple[int, bool | None]]:
    """Lengths, and whether the states were kept, at which the same input did not give the same bits each time.

    At each of `LENGTHS` twice in a row. Without the states the filters are convolved as wholes, with them by blocks.
    """
    has_states = "use_cache" in inspect.signature(type(model).forward).parameters
    ways = (True, False) if has_states and not getattr(model.config, "bidirectional", False) else (None,)
    first: dict[tuple[int, bool | None], torch.Tensor] = {}
    different = set()
    for length in LENGTHS:
        for way in (*ways, *ways):
            options = {} if way is None else {"use_cache": way}
            output = model(**inputs_for(model, length=length), **options)[0]
            if not same_bits(first.setdefault((length, way), output), output):
                different.add((length, way))
    return sorted(different)


@pytest.mark.parametrize("variant", EVERY if THOROUGH else FEW)
def test_training_repeats(variant, record_property):
    """The losses and the weights of a few steps of `Trainer` (order of rows, dropout, AdamW) from one seed.

    In the same process, with one and two loading workers, and in a process with other hashes.
    """
    first = train(variant)
    record_property("digest", first[:12])
    assert train(variant) == first
    if THOROUGH or variant in TRAINED:
        assert train(variant, workers=1) == train(variant, workers=2) == first
        assert train(variant, seed=4) != first
    if THOROUGH or variant == TRAINED[0]:
        assert train_elsewhere(variant, hash_seed=1) == first


@pytest.mark.parametrize("variant", EVERY if THOROUGH else TRAINED)
def test_threads_do_not_change_the_order_of_sums(variant):
    assert len(gradients(variant, 10 if THOROUGH else 3)) == 1


@pytest.mark.parametrize(("variant", "name"), COMBINATIONS if THOROUGH else [(v, class_with_loss(v)) for v in FEW])
def test_forward_repeats(variant, name):
    assert different_forwards(build(variant, name)) == []
