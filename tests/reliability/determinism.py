"""The same seed gives the same bits: in training, in sampling, and in every forward pass.

    python -m tests.reliability.determinism

Writes docs/reliability/determinism.md. Exits with 1 if a repetition came out different.

What could break it: kernels that add in an order of their own, filters remembered at another length, random numbers
drawn by loading workers, sets that are iterated in the order of the process. Hence training is repeated with other
numbers of workers and in a process with other hashes, and a forward pass after ones of other lengths.
"""

import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import torch
import transformers
from transformers import PreTrainedModel, Trainer, TrainingArguments, set_seed

from tests.reliability.bits import digest, same_bits
from tests.reliability.population import (
    COMBINATIONS,
    EVERY,
    TOKENS,
    build,
    class_with_loss,
    classes_of,
    config_of,
    inputs_for,
    labels_for,
)
from tests.reliability.reporting import table, write_page

STEPS, ROWS, LENGTH = 5, 8, 20
WORKERS = (0, 1, 2)
DROPOUT = 0.1
WIDTH, THREADS, REPETITIONS = 192, 4, 10
LENGTHS = (12, 70, 300, 70, 12)  # within a block, beyond one, and back


class Examples(torch.utils.data.Dataset):
    """Random rows with what the model's loss needs."""

    def __init__(self, model: PreTrainedModel):
        ids = torch.randint(3, TOKENS["vocab_size"], (ROWS, LENGTH), generator=torch.Generator().manual_seed(5))
        self.rows = [{"input_ids": row, "labels": label} for row, label in zip(ids, labels_for(model, ids))]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


def train(variant: str, workers: int = 0, seed: int = 3) -> str:
    """The digest of a short run of `Trainer`: initialisation, order of rows, dropout and optimizer from one seed."""
    set_seed(seed)
    config = config_of(variant)
    for field in [field for field in vars(config) if "dropout" in field]:
        setattr(config, field, DROPOUT)
    model = classes_of(variant)[class_with_loss(variant)](config)
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1,
            dataloader_num_workers=workers, seed=seed, report_to=[], save_strategy="no", disable_tqdm=True,
            use_cpu=True,
        )  # fmt: skip
        trainer = Trainer(model=model, args=options, train_dataset=Examples(model))
        trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return digest({**model.state_dict(), "losses": torch.tensor(losses, dtype=torch.float64)})


def train_elsewhere(variants: list[str], hash_seed: int) -> dict[str, str]:
    """Variant → digest, from a process of its own with other hashes."""
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    command = [sys.executable, "-m", "tests.reliability.determinism", "--train", *variants]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def gradients(variant: str, repetitions: int, threads: int) -> list[str]:
    """Digests of the same backward pass of a model wide enough for threads to share its work."""
    torch.manual_seed(3)
    model = classes_of(variant)[class_with_loss(variant)](config_of(variant, hidden_size=WIDTH))
    ids = torch.randint(3, TOKENS["vocab_size"], (8, 120), generator=torch.Generator().manual_seed(5))
    threads_before, found = torch.get_num_threads(), []
    torch.set_num_threads(threads)
    try:
        for _ in range(repetitions):
            model.zero_grad()
            torch.manual_seed(4)  # dropout
            model(input_ids=ids, labels=labels_for(model, ids)).loss.backward()
            found.append(digest({name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    finally:
        torch.set_num_threads(threads_before)
    return found


def sample(model: PreTrainedModel, seed: int, **options) -> torch.Tensor:
    torch.manual_seed(seed)
    inputs = {"input_ids": inputs_for(model)["input_ids"]}
    return model.generate(**inputs, do_sample=True, max_new_tokens=16, min_new_tokens=16, pad_token_id=0, **options)


@torch.no_grad()
def outputs_by_length(model: PreTrainedModel) -> Iterator[tuple[tuple[str, int], torch.Tensor]]:
    """((way, length), output) in the order of LENGTHS, twice in a row at each, with and without the states kept.

    Without them the filters are convolved as wholes, with them they go by blocks.
    """
    ways: dict[str, dict] = {"plain": {}}
    if "use_cache" in inspect.signature(type(model).forward).parameters and not _is_bidirectional(model):
        ways = {"with states": {"use_cache": True}, "without": {"use_cache": False}}
    for length in LENGTHS:
        for way, options in [*ways.items()] * 2:
            yield (way, length), model(**inputs_for(model, length=length), **options)[0]


def _is_bidirectional(model: PreTrainedModel) -> bool:
    return getattr(model.config, "bidirectional", False)


def different_forwards(model: PreTrainedModel) -> list[tuple[str, int]]:
    """The ways and lengths at which the same input did not give the same bits each time."""
    first: dict[tuple[str, int], torch.Tensor] = {}
    different = set()
    for key, output in outputs_by_length(model):
        if not same_bits(first.setdefault(key, output), output):
            different.add(key)
    return sorted(different)


def different_samples(model: PreTrainedModel) -> list[str]:
    """The modes of sampling whose repetition gave other tokens."""
    modes: dict[str, dict] = {"sampling": {}, "beam sampling": {"num_beams": 3}, "without cache": {"use_cache": False}}
    return [
        mode
        for mode, options in modes.items()
        if not torch.equal(sample(model, 1, **options), sample(model, 1, **options))
    ]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--train", nargs="+", metavar="VARIANT", help="only print the digests of these runs")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if variants := parser.parse_args().train:
        print(json.dumps({variant: train(variant) for variant in variants}))
        return 0
    elsewhere = train_elsewhere(list(EVERY), hash_seed=1)
    rows, faults = [], 0
    for variant in EVERY:
        runs = {f"{workers} workers": train(variant, workers) for workers in WORKERS}
        runs |= {"again": train(variant), "another process": elsewhere[variant]}
        wrong = [name for name, value in runs.items() if value != runs["0 workers"]]
        if train(variant, seed=4) == runs["0 workers"]:
            wrong.append("another seed gave the same")
        rows.append([variant, class_with_loss(variant), len(runs), runs["0 workers"][:12], ", ".join(wrong) or "none"])
        faults += len(wrong)
        print(rows[-1], flush=True)
    threaded = []
    for variant in EVERY:
        kinds = len(set(gradients(variant, REPETITIONS, THREADS)))
        faults += kinds - 1
        threaded.append([variant, REPETITIONS, kinds])
        print(*threaded[-1], flush=True)
    repeated = []
    for variant, name in COMBINATIONS:
        model = build(variant, name)
        lengths = different_forwards(model)
        tokens = different_samples(model) if model.can_generate() else None
        faults += len(lengths) + len(tokens or [])
        print(variant, name, lengths, tokens, flush=True)
        repeated.append([variant, name, lengths or "none", "no generation" if tokens is None else tokens or "none"])
    write_page(
        "determinism",
        "The same seed, the same bits",
        "`make determinism`, on CPU. Other numbers of threads, other machines and other versions of torch add in "
        "other orders and give other last bits; that is not looked at here.",
        f"**Training.** {STEPS} steps of `Trainer` from a seed (initialisation, order of the rows, dropout of "
        f"{DROPOUT}, AdamW), compared by a digest of every loss and of every bit of the trained model: with "
        f"{', '.join(map(str, WORKERS))} loading workers, again, and in another process with other hashes.",
        table(["variant", "class", "runs", "digest", "different"], rows),
        f"**Backward passes** of models {WIDTH} wide over 8 rows of 120 tokens, {REPETITIONS} times with {THREADS} "
        "threads: how many different sets of gradients there were.",
        table(["variant", "repetitions", "different gradients"], threaded),
        f"**Forward passes** in evaluation at lengths {', '.join(map(str, LENGTHS))}, twice at each: the same tokens "
        "give the same bits whatever was computed in between (filters are remembered at the greatest length), with "
        "the states kept and without. "
        "**Sampling** from a seed: plain, with beams, without a cache, each twice.",
        table(["variant", "class", "forward passes that differed", "ways of sampling that differed"], repeated),
        f"{faults} differences in all." if faults else "No difference.",
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
