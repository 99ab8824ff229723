"""What the recipes that train one model share: where it starts, and what they leave at the end."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _lib.checks import check_checkpoint, check_config, check_either, check_output, clear_checkpoints, clear_weights
from _lib.training import checkpoint_to_resume, plot_loss, say_figures, write_figures, write_json

import torch
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import TrainOutput

from hf_hybrid_ssm.hub.configurations import check_fields
from hf_hybrid_ssm.layers.plain_tensors import whole_shape
from hf_hybrid_ssm.training.optim import has_muon


@dataclass
class StartArguments:
    """Which model to train, and from where."""

    model_type: str | None = field(default=None, metadata={"help": "longhorn, llama, t5, ...: from scratch"})
    preset: str | None = field(default=None, metadata={"help": "a size of this package's families, such as 125m"})
    config: dict[str, Any] = field(default_factory=dict, metadata={"help": "fields of the configuration"})
    model_name_or_path: str | None = field(default=None, metadata={"help": "start from these weights instead"})
    embeddings_from: str | None = field(
        default=None, metadata={"help": "start with the token embeddings of this model, e.g. gpt2, of the same width"}
    )
    resume: str | None = field(
        default=None, metadata={"help": "a checkpoint folder, or auto for the newest complete one"}
    )
    overwrite: bool = field(default=False, metadata={"help": "start again in an output_dir that is not empty"})
    muon: bool = field(default=False, metadata={"help": "Muon for hidden matrices, AdamW for the rest"})

    def __post_init__(self):
        check_either(self, "model_type", "model_name_or_path")
        check_config(self.model_type, self.config, self.preset)

    def begin(self, training: TrainingArguments, auto_class: Any) -> None:
        """Check the folder, and that `auto_class` loads what `model_name_or_path` names; set the seeds."""
        check_output(training.output_dir, self.overwrite, self.resume)
        if self.muon and (training.optim.value not in ("adamw_torch", "adamw_torch_fused") or training.optim_args):
            chosen = f"optim={training.optim.value}, optim_args={training.optim_args}"
            raise ValueError(f"muon=True and {chosen} exclude each other.")
        if self.muon and not has_muon():
            raise ValueError(f"muon=True needs torch 2.9, this is torch {torch.__version__}.")
        if self.model_name_or_path is not None:
            check_checkpoint(self.model_name_or_path, "model_name_or_path", auto_class)
        set_seed(training.seed)


@dataclass(kw_only=True)
class FineTuneArguments:
    """The model that is fine-tuned, and from where."""

    model_name_or_path: str | None = None
    model_type: str | None = field(
        default=None, metadata={"help": "from scratch instead, with a tokenizer of its own"}
    )
    config: dict[str, Any] = field(default_factory=dict, metadata={"help": "fields of its configuration"})
    from_scratch: bool = field(
        default=False,
        metadata={"help": "new weights in the configuration of model_name_or_path, to compare with"},
    )
    max_train_rows: int | None = None
    results: str | None = field(default=None, metadata={"help": "another file for the figures"})
    overwrite: bool = False

    def __post_init__(self):
        check_either(self, "model_type", "model_name_or_path")
        check_config(self.model_type or None, self.config if self.model_type else {})
        if self.from_scratch and self.model_name_or_path is None:
            raise ValueError("from_scratch=True needs model_name_or_path, whose configuration and tokenizer it takes.")

    def check_checkpoint(self, auto_class: Any) -> None:
        """`auto_class` loads what `model_name_or_path` names, and its configuration has the fields of `config`."""
        if self.model_name_or_path is not None:
            known = check_checkpoint(self.model_name_or_path, "model_name_or_path", auto_class)
            check_fields(type(known), self.config)


def seed_of_data(training: TrainingArguments) -> int:
    """The seed of the rows' order."""
    return training.seed if training.data_seed is None else training.data_seed


def train_and_save(trainer: Trainer, arguments: Any) -> TrainOutput:
    """Train, from a checkpoint if `arguments.resume` says so, and save. Checkpoints of an earlier run go first if
    `arguments.overwrite` says so: all that could be wrong has been read."""
    folder = trainer.args.output_dir
    clear_checkpoints(folder, arguments.overwrite, arguments.resume)
    trainer.muon = getattr(arguments, "muon", False)
    run = trainer.train(resume_from_checkpoint=checkpoint_to_resume(arguments.resume, folder))
    clear_weights(folder, arguments.overwrite)
    trainer.model.config.use_cache = True  # of what is saved: the Trainer lets no state be kept while it trains
    trainer.save_model()
    trainer.model.config.use_cache = False
    trainer.accelerator.wait_for_everyone()  # any process may load what the first one saves
    return run


def parameters_of(model: nn.Module, *, beside_embeddings: bool = False, trained: bool = False) -> int:
    """How many numbers, as `num_parameters` counts; of whole ones where DeepSpeed has a part of each here (ZeRO-3)."""
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding) and beside_embeddings]
    left_out = {id(weight) for weight in tables}
    counted = (part for part in model.parameters() if id(part) not in left_out and (part.requires_grad or not trained))
    return sum(whole_shape(part).numel() for part in counted)


def figures_of(trainer: Trainer, run: TrainOutput) -> dict[str, Any]:
    """What every run tells in results.json."""
    return {
        "model_type": trainer.model.config.model_type,
        "parameters": parameters_of(trainer.model),
        "steps": trainer.state.global_step,
        "train_loss": run.training_loss,
        "seconds": run.metrics["train_runtime"],
        "torch": torch.__version__,
    } | ({"muon": True} if getattr(trainer, "muon", False) else {})


def tokens_of(trainer: Trainer, length: int) -> int:
    """The tokens of all steps, in rows of `length`."""
    training = trainer.args
    rows = training.train_batch_size * training.gradient_accumulation_steps * training.world_size
    return trainer.state.global_step * rows * length


def write_run(trainer: Trainer, results: dict[str, Any], path: str | None = None) -> dict[str, Any]:
    """Write results.json, and a copy to `path`, history.json and loss.png, and print the results, which are returned;
    once for all processes."""
    folder, history = Path(trainer.args.output_dir), trainer.state.log_history
    write_json(folder / "history.json", history)
    write_figures(results, folder, path)
    if any("loss" in entry or "eval_loss" in entry for entry in history):
        plot_loss(history, folder / "loss.png")
    say_figures(results)
    return results
