"""Classify texts by a CSV of your own, with columns `text` and `label`, whose labels are words.

Rare classes weigh more, training ends when F1 no longer rises, and the best weights are kept.

python examples/classify_csv.py TRAIN.csv OUT --model checkpoints/spade-encoder-books
"""

import argparse

import torch
from datasets import load_dataset
from sklearn.metrics import accuracy_score, f1_score
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
    pipeline,
    set_seed,
)

import hf_hybrid_ssm  # noqa: F401  registers the families

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("table")
parser.add_argument("out")
parser.add_argument("--model", required=True)
parser.add_argument("--epochs", type=float, default=10)
args = parser.parse_args()

set_seed(0)
tokenizer = AutoTokenizer.from_pretrained(args.model)
data = load_dataset("csv", data_files=args.table, split="train").class_encode_column("label")
names = data.features["label"].names
words = {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}
data = data.map(lambda batch: tokenizer(batch["text"], truncation=True, max_length=512), batched=True)
data = data.train_test_split(0.2, stratify_by_column="label", seed=0)
# float32: small steps of fine-tuning are lost in 16 bits
model = AutoModelForSequenceClassification.from_pretrained(args.model, dtype="float32", pooling="mean", **words)

counts = torch.bincount(torch.tensor(data["train"]["label"]), minlength=len(names))
weights = counts.sum() / (len(names) * counts)


def loss(outputs, labels, **kwargs):
    return torch.nn.functional.cross_entropy(outputs.logits, labels, weights.to(outputs.logits))


def measures(found):
    guesses, labels = found.predictions.argmax(-1), found.label_ids
    return {"accuracy": accuracy_score(labels, guesses), "f1": f1_score(labels, guesses, average="macro")}


arguments = TrainingArguments(
    args.out,
    num_train_epochs=args.epochs,
    learning_rate=3e-4,
    per_device_train_batch_size=16,
    eval_strategy="epoch",
    save_strategy="epoch",
    save_total_limit=1,
    load_best_model_at_end=True,
    metric_for_best_model="f1",
    report_to="none",
)
trainer = Trainer(
    model,
    arguments,
    train_dataset=data["train"],
    eval_dataset=data["test"],
    processing_class=tokenizer,
    compute_loss_func=loss,
    compute_metrics=measures,
    callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
)
trainer.train()
print(trainer.evaluate())
trainer.save_model()
print(pipeline("text-classification", args.out, device="cpu")(data["test"]["text"][:3]))
