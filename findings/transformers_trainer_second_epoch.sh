#!/usr/bin/env bash
# A Trainer that is resumed in the second epoch of a streamed data set (datasets.IterableDataset) begins that
# epoch anew, and so trains on its first rows twice; a table (datasets.Dataset) continues where it was. Streams
# for which the Trainer sees one endless epoch are resumed rightly.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile 'torch==2.13.0' 'transformers==5.24.0' 'accelerate==1.15.0' 'datasets==5.2.0'
cd "$folder"
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python - <<'PYTHON'
import torch
import transformers
from datasets import Dataset, IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

print("torch", torch.__version__, "transformers", transformers.__version__)
seen = []


class Model(LlamaForCausalLM):
    def forward(self, input_ids=None, **options):
        seen.append(input_ids[:, 0].tolist())
        return super().forward(input_ids=input_ids, **options)


class StopAfterEight(TrainerCallback):
    def on_step_end(self, args, state, control, **options):
        if state.global_step == 8:
            control.should_training_stop = control.should_save = True


def rows():
    for row in range(3, 15):
        yield {"input_ids": [row] * 4, "labels": [row] * 4}


def batches(data, folder, resume=None, callbacks=()):
    seen.clear()
    torch.manual_seed(0)
    sizes = dict(vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    options = dict(per_device_train_batch_size=2, max_steps=14, save_steps=100, report_to=[], use_cpu=True, seed=0)
    options |= dict(disable_tqdm=True, logging_strategy="no", remove_unused_columns=False)
    trainer = Trainer(
        Model(LlamaConfig(**sizes)), TrainingArguments(folder, **options), train_dataset=data, callbacks=list(callbacks)
    )
    trainer.train(resume_from_checkpoint=resume)
    return list(seen)


print("expected: six batches an epoch; stopped after the eighth, a run goes on with the ninth, as one that was not")
results = {}
for name, make in (("table", Dataset.from_generator), ("stream", IterableDataset.from_generator)):
    whole = batches(make(rows), f"{name}/whole")
    batches(make(rows), f"{name}/part", callbacks=[StopAfterEight()])
    resumed = batches(make(rows), f"{name}/part", resume=f"{name}/part/checkpoint-8")
    print(f"seen: {name}: whole run {whole[8:11]}, resumed {resumed[:3]}")
    results[name] = (whole, resumed)
whole, resumed = results["table"]
assert resumed == whole[8:]
whole, resumed = results["stream"]
assert resumed[:2] == whole[6:8] and resumed != whole[8:]
PYTHON
