"""Summarize texts by a CSV of your own, with columns `document` and `summary`; ROUGE while it trains.

python examples/summarize.py TRAIN.csv OUT --model checkpoints/spade-seq2seq-books
"""

import argparse

import numpy as np
from datasets import load_dataset
from rouge_score.rouge_scorer import RougeScorer
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

import hf_hybrid_ssm  # noqa: F401  registers the families

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("table")
parser.add_argument("out")
parser.add_argument("--model", required=True)
parser.add_argument("--epochs", type=float, default=5)
parser.add_argument("--tokens", type=int, default=64, help="of a summary, at most")
args = parser.parse_args()

set_seed(0)
tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForSeq2SeqLM.from_pretrained(args.model, dtype="float32")
model.generation_config.update(max_length=args.tokens, num_beams=4)  # saved, and used wherever it writes


def tokenized(batch):
    labels = tokenizer(text_target=batch["summary"], truncation=True, max_length=args.tokens)  # the end included
    return {**tokenizer(batch["document"], truncation=True, max_length=2048), "labels": labels["input_ids"]}


table = load_dataset("csv", data_files=args.table, split="train").train_test_split(0.1, seed=0)
data = table.map(tokenized, batched=True, remove_columns=table["train"].column_names)
scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)


def rouge(found):
    texts = (np.where(ids < 0, tokenizer.pad_token_id, ids) for ids in (found.label_ids, found.predictions))
    pairs = zip(*(tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in texts))
    scores = [scorer.score(summary, written) for summary, written in pairs]
    return {name: 100 * np.mean([score[name].fmeasure for score in scores]) for name in scores[0]}


arguments = Seq2SeqTrainingArguments(
    args.out,
    num_train_epochs=args.epochs,
    learning_rate=1e-3,
    per_device_train_batch_size=8,
    eval_strategy="epoch",
    predict_with_generate=True,
    report_to="none",
)
trainer = Seq2SeqTrainer(
    model,
    arguments,
    train_dataset=data["train"],
    eval_dataset=data["test"],
    data_collator=DataCollatorForSeq2Seq(tokenizer, model),
    processing_class=tokenizer,
    compute_metrics=rouge,
)
trainer.train()
trainer.save_model()
inputs = tokenizer(table["test"]["document"][:1], truncation=True, max_length=2048, return_tensors="pt")
written = model.generate(**inputs.to(model.device))
print(tokenizer.batch_decode(written, skip_special_tokens=True)[0])
