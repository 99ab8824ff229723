"""LoRA on a text of your own, merged and saved with its code: the folder then loads without PEFT and this package.

python examples/lora.py TEXT.txt OUT --model checkpoints/longhorn-books
"""

import argparse
import subprocess
import sys

from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    set_seed,
)

import hf_hybrid_ssm  # noqa: F401  registers the families

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("text")
parser.add_argument("out")
parser.add_argument("--model", required=True)
parser.add_argument("--steps", type=int, default=200)
args = parser.parse_args()

set_seed(0)
tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32")
adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
adapted.print_trainable_parameters()

text = load_dataset("text", data_files=args.text, sample_by="paragraph", split="train")
data = text.map(
    lambda batch: tokenizer(batch["text"], truncation=True, max_length=256), batched=True, remove_columns="text"
).filter(lambda row: len(row["input_ids"]) > 1)
arguments = TrainingArguments(
    f"{args.out}/adapters",
    max_steps=args.steps,
    learning_rate=1e-3,
    per_device_train_batch_size=4,
    save_strategy="no",
    report_to="none",
)
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)  # pads, and leaves padding out of the loss
Trainer(adapted, arguments, train_dataset=data, data_collator=collator).train()
adapted.save_pretrained(f"{args.out}/adapters")  # the adapters alone: kilobytes to share

merged = adapted.merge_and_unload()
merged.save_pretrained(f"{args.out}/merged", export_code=True)
tokenizer.save_pretrained(f"{args.out}/merged")

elsewhere = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], config=model.config)
inputs = tokenizer("The old man", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20, do_sample=False)[0]))
assert "hf_hybrid_ssm" not in sys.modules
"""
subprocess.run([sys.executable, "-c", elsewhere, f"{args.out}/merged"], check=True)
