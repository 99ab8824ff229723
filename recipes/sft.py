"""Fine-tune on conversations, prompts or texts with TRL.

Supervised fine-tuning of a causal language model: conversations, prompts with completions, or texts.

    python recipes/sft.py recipes/configs/sft/local.yaml model_name_or_path=FOLDER [key=value ...]

Rows have one of these columns: `messages` (a list of {"role": ..., "content": ...}), `prompt` and `completion`, or
`text`. With `packing: true`, documents share rows without seeing each other; the loss is that of padded rows. With
`lora_rank`, adapters are trained: `output_dir` then holds them, and `output_dir`/merged the whole model.

Writes the model or the adapters, tokenizer and chat template, results.json and answers.jsonl to `output_dir`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _lib.checks import check_checkpoint, check_least, check_output, check_vocabulary, clear_checkpoints, clear_weights
from _lib.documents import documents_of_files
from _lib.entry import start
from _lib.runs import parameters_of
from _lib.training import Trainer, load_to_train, perplexity, say, say_figures, write_figures, write_lines

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, set_seed

import hf_hybrid_ssm  # noqa: F401 - registers the families
from hf_hybrid_ssm.cli.next_command import next_command, talking
from hf_hybrid_ssm.extras import install_command

try:
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer
except ImportError as error:
    raise SystemExit(f"{error.name} is needed: {install_command('train', 'sft')}") from error

FORMATS = ({"messages"}, {"prompt", "completion"}, {"text"})
MERGED = "merged"
NOT_READ = {"tools", "chat_template_kwargs", "images", "videos"}
"""Columns that TRL would read, too, and that change what a text is."""


# The end-of-text token closes each answer, so that generation stops there. What stands between the generation tags is
# what `assistant_only_loss` trains. The space is part of the answer, as byte-level vocabularies begin words with it.
PLAIN = """{% for message in messages %}
{% if message['content'] is not string or message['tool_calls'] %}
{{ raise_exception("a message's content must be text, without tool_calls: give a chat_template that knows more") }}
{% endif %}
{% if message['role'] == 'assistant' %}
Assistant:{% generation %} {{ message['content'] }}{{ eos_token }}{% endgeneration %}

{% else %}
{{ message['role'] | capitalize }}: {{ message['content'] }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
Assistant:
{%- endif %}
"""


def set_chat_template(tokenizer: PreTrainedTokenizerBase, path: str | None = None) -> None:
    """The template of a file; without one, the tokenizer keeps its own, or gets `PLAIN`.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if path is not None:
        tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
    elif tokenizer.chat_template is None:
        tokenizer.chat_template = PLAIN


class InstructionTrainer(Trainer, SFTTrainer):
    """`SFTTrainer` with this package's parameter groups."""


@dataclass
class SftArguments:
    """The model, the rows, and which weights train."""

    model_name_or_path: str = field(metadata={"help": "the language model to start from"})
    train_files: list[str] = field(metadata={"help": "jsonl or parquet"})
    validation_files: list[str] = field(default_factory=list, metadata={"help": "rows that are not trained on"})
    max_train_rows: int | None = field(default=None, metadata={"help": "the first ones; all by default"})
    chat_template: str | None = field(
        default=None, metadata={"help": "a Jinja file; by default the tokenizer's own, or a plain one if it has none"}
    )
    lora_rank: int = field(default=0, metadata={"help": "of the adapters; 0 trains all weights"})
    lora_alpha: int = field(default=16, metadata={"help": "their scale is lora_alpha / lora_rank"})
    lora_dropout: float = field(default=0.0, metadata={"help": "dropout before the adapters"})
    answers: int = field(default=4, metadata={"help": "of how many validation rows answers are generated"})
    new_tokens: int = field(default=64, metadata={"help": "length of such an answer"})
    results: str | None = field(default=None, metadata={"help": "another file for the figures"})
    overwrite: bool = field(default=False, metadata={"help": "start again in an output_dir that is not empty"})

    def __post_init__(self):
        if self.model_name_or_path is None or not self.train_files:
            raise ValueError(
                f"give model_name_or_path and train_files, got model_name_or_path={self.model_name_or_path!r} and "
                f"train_files={self.train_files}."
            )
        check_least(self, 0, "lora_rank")


def rows_of(files: list[str], limit: int | None = None) -> Dataset:
    """The rows, with the columns of their format alone.

    Raises:
        ValueError: they have the columns of none, or one that is not read and changes a text.
    """
    rows = documents_of_files(files)
    if others := sorted(NOT_READ & set(rows.column_names)):
        raise ValueError(f"{files} have the column {others[0]!r}, which is not read: write it into the messages.")
    wanted = next((columns for columns in FORMATS if columns <= set(rows.column_names)), None)
    if wanted is None:
        known = "; ".join(" and ".join(sorted(columns)) for columns in FORMATS)
        raise ValueError(f"{files} have the columns {rows.column_names}, but rows need one of: {known}.")
    rows = rows.select_columns(sorted(wanted))
    return rows if limit is None else rows.select(range(min(limit, len(rows))))


def trainer_of(
    arguments: SftArguments,
    training: SFTConfig,
    train: Dataset,
    validation: Dataset | None,
    tokenizer: PreTrainedTokenizerBase,
) -> InstructionTrainer:
    """TRL's trainer for the model, with adapters if they are asked for."""
    if arguments.lora_rank:  # under adapters the weights rest, as they are stored
        model = AutoModelForCausalLM.from_pretrained(arguments.model_name_or_path)
    else:
        model = load_to_train(AutoModelForCausalLM, arguments.model_name_or_path)
    check_vocabulary(model, tokenizer)
    adapters = None
    if arguments.lora_rank:
        adapters = LoraConfig(
            r=arguments.lora_rank,
            lora_alpha=arguments.lora_alpha,
            lora_dropout=arguments.lora_dropout,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
    return InstructionTrainer(
        model=model,
        args=training,
        train_dataset=train,
        eval_dataset=validation,
        processing_class=tokenizer,
        peft_config=adapters,
    )


def question_of(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> str:
    """What the model is asked: a conversation up to its last answer, a prompt, or the first words of a text."""
    if "text" in row:
        return " ".join(row["text"].split()[:8])
    asked = row["messages"] if "messages" in row else row["prompt"]
    if isinstance(asked, str):
        return asked
    if "messages" in row:
        asked = asked[:-1]
    return tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)


@torch.inference_mode()
def answers_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: list[str], new_tokens: int
) -> list[str]:
    """Greedy answers to all questions at once; padding on the left changes none."""
    tokenizer.padding_side = "left"
    batch = tokenizer(questions, return_tensors="pt", padding=True, return_token_type_ids=False).to(model.device)
    model.eval()
    texts = model.generate(**batch, max_new_tokens=new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return tokenizer.batch_decode(texts[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def finetune(arguments: SftArguments, training: SFTConfig) -> dict[str, Any]:
    """Train, evaluate, save; returns what is written to results.json."""
    check_output(training.output_dir, arguments.overwrite)
    check_checkpoint(arguments.model_name_or_path, "model_name_or_path", AutoModelForCausalLM)
    set_seed(training.seed)
    train = rows_of(arguments.train_files, arguments.max_train_rows)
    validation = rows_of(arguments.validation_files) if arguments.validation_files else None
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path)
    set_chat_template(tokenizer, arguments.chat_template)
    trainer = trainer_of(arguments, training, train, validation, tokenizer)
    clear_checkpoints(training.output_dir, arguments.overwrite)
    run = trainer.train()
    results: dict[str, Any] = {
        "rows": len(train),
        "steps": trainer.state.global_step,
        "trained_parameters": parameters_of(trainer.model, trained=True),
        "train_loss": run.training_loss,
        "seconds": run.metrics["train_runtime"],
    }
    if validation is not None:
        results["validation_loss"] = trainer.evaluate()["eval_loss"]
        results["validation_perplexity"] = perplexity(results["validation_loss"])
    model, folder = trainer.accelerator.unwrap_model(trainer.model), Path(training.output_dir)
    for earlier in (folder, folder / MERGED):
        clear_weights(earlier, arguments.overwrite)
    trainer.save_model()
    if arguments.lora_rank:
        folder = folder / MERGED
        model = model.merge_and_unload()
        if trainer.is_world_process_zero():
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    write_figures(results, training.output_dir, arguments.results)
    if validation is not None and arguments.answers:
        questions = [
            question_of(row, tokenizer) for row in validation.select(range(min(arguments.answers, len(validation))))
        ]
        said = answers_of(model, tokenizer, questions, arguments.new_tokens)
        lines = [{"question": question, "answer": answer} for question, answer in zip(questions, said, strict=True)]
        write_lines(Path(training.output_dir) / "answers.jsonl", lines)
    say_figures(results)
    say(f"\nThe model is in {folder}. {next_command(*talking(folder, tokenizer))}")
    return results


if __name__ == "__main__":
    start("sft.py", finetune, SftArguments, SFTConfig)
