"""Pretrain a small Longhorn on a text of your own: resumed where it was stopped, with its loss as a picture.

python examples/pretrain.py TEXT.txt OUT --tokenizer checkpoints/longhorn-books
hf-hybrid-ssm generate OUT "Once"
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
from datasets import load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

import hf_hybrid_ssm  # noqa: F401  registers the families

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("text")
parser.add_argument("out")
parser.add_argument("--tokenizer", required=True)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--length", type=int, default=256)
args = parser.parse_args()

set_seed(0)
tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
sizes = {"vocab_size": len(tokenizer), "hidden_size": 256, "num_hidden_layers": 6}
config = AutoConfig.for_model("longhorn", **sizes, **special)  # or spade, bst, lmu_isa
model = AutoModelForCausalLM.from_config(config)


def rows(batch):
    """Paragraphs, each with an end, one after the other, in rows of one length."""
    ids = [i for paragraph in tokenizer(batch["text"])["input_ids"] for i in [*paragraph, tokenizer.eos_token_id]]
    cut = [ids[begin : begin + args.length] for begin in range(0, len(ids) - args.length + 1, args.length)]
    return {"input_ids": cut, "labels": cut}


text = load_dataset("text", data_files=args.text, sample_by="paragraph", split="train")
data = text.map(rows, batched=True, remove_columns="text").train_test_split(0.1, seed=0)
often = max(args.steps // 10, 1)
arguments = TrainingArguments(
    args.out,
    max_steps=args.steps,
    learning_rate=3e-3,
    warmup_steps=often,
    lr_scheduler_type="cosine",
    per_device_train_batch_size=8,
    eval_strategy="steps",
    eval_steps=often,
    save_steps=often,
    save_total_limit=2,
    logging_steps=often,
    report_to="none",  # or trackio, wandb, tensorboard
)
trainer = Trainer(model, arguments, train_dataset=data["train"], eval_dataset=data["test"], processing_class=tokenizer)
trainer.train(resume_from_checkpoint=get_last_checkpoint(args.out) if Path(args.out).is_dir() else None)
trainer.save_model()

for key in ("loss", "eval_loss"):
    log = [entry for entry in trainer.state.log_history if key in entry]
    plt.plot([entry["step"] for entry in log], [entry[key] for entry in log], label=key)
plt.xlabel("steps")
plt.ylabel("nats per token")
plt.legend()
plt.savefig(Path(args.out) / "loss.png")
