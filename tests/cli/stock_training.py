"""Fine-tune a causal language model on a text file, in the way of transformers' examples; it knows of no family in
particular.

Run by the tests of `hf-hybrid-ssm run`.
"""

from dataclasses import dataclass

from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class Arguments:
    train_file: str
    model_name_or_path: str | None = None
    model_type: str | None = None
    config_overrides: str | None = None
    tokenizer_name: str | None = None


def main():
    given, training = HfArgumentParser((Arguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training.seed)
    tokenizer = AutoTokenizer.from_pretrained(given.tokenizer_name or given.model_name_or_path)
    if given.model_name_or_path:
        config = AutoConfig.from_pretrained(given.model_name_or_path)
        model = AutoModelForCausalLM.from_pretrained(given.model_name_or_path, config=config)
    else:
        config = CONFIG_MAPPING[given.model_type]()
        config.update_from_string(given.config_overrides)
        model = AutoModelForCausalLM.from_config(config)
    with open(given.train_file, encoding="utf-8") as lines:
        rows = [tokenizer(line) for line in lines]
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = Trainer(model, training, collator, rows, rows, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    trainer.save_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
