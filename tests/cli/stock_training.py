"""Fine-tune a causal language model on a text file, in the way of transformers' examples; it knows of no family in
particular.

Run by the tests of `hf-hybrid-ssm run`.
"""

import logging
import math
from dataclasses import dataclass, field
from itertools import chain

from datasets import load_dataset
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

logger = logging.getLogger(__name__)
MODEL_TYPES = tuple(config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING)


@dataclass
class ModelArguments:
    model_name_or_path: str | None = None
    model_type: str | None = field(default=None, metadata={"help": f"from scratch: one of {', '.join(MODEL_TYPES)}"})
    config_overrides: str | None = None
    tokenizer_name: str | None = None


@dataclass
class DataTrainingArguments:
    train_file: str = ""
    block_size: int = 16


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    if model_args.model_name_or_path:
        config = AutoConfig.from_pretrained(model_args.model_name_or_path)
    else:
        config = CONFIG_MAPPING[model_args.model_type]()
        config.update_from_string(model_args.config_overrides)
    tokenizer = AutoTokenizer.from_pretrained(model_args.tokenizer_name or model_args.model_name_or_path)
    if model_args.model_name_or_path:
        model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, config=config)
    else:
        model = AutoModelForCausalLM.from_config(config)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))

    texts = load_dataset("text", data_files={"train": data_args.train_file}, split="train")
    tokens = texts.map(lambda rows: tokenizer(rows["text"]), batched=True, remove_columns=["text"])

    def group(rows):
        ids = list(chain(*rows["input_ids"]))
        size = data_args.block_size
        blocks = [ids[start : start + size] for start in range(0, len(ids) // size * size, size)]
        return {"input_ids": blocks, "labels": [list(block) for block in blocks]}

    blocks = tokens.map(group, batched=True, remove_columns=tokens.column_names)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=blocks,
        eval_dataset=blocks,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    result = trainer.train()
    trainer.save_model()
    trainer.save_metrics("train", result.metrics)
    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
