"""Turn a pretrained transformer into a student.

Its cache stops growing, or grows in few layers; then it may be trained.

    python recipes/upcycle.py recipes/configs/upcycle/books_cpu.yaml [key=value ...]

Of a decoder of transformers with rotary positions, `keep` says which layers still see all tokens; the others see a
`window`. `memory=longhorn` or `memory=context` puts a state-space layer beside the windows of `memory_layers`, with
`instead=true` in the place of attention. Stages, each optional and resumable: `align` (every memory imitates the
teacher's attention, given the teacher's own input to it), `distil` (the student imitates the teacher's distribution of
the next token) and `finetune` (next token, on text). Before anything is trained, what is new beside the teacher's
weights is listed. Writes to `output_dir` the student with tokenizer, code and card (or with delta=true what it has
beyond its teacher), results.json, and gap.png: the way to the teacher's loss.
"""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from _lib.checks import check_least, check_output, check_vocabulary, clear_checkpoints
from _lib.documents import DataArguments, check_ends, get_tokenizer, load_documents
from _lib.entry import start
from _lib.provenance import to_json
from _lib.recall_rows import with_recall_rows
from _lib.rows import RowStream, packed_rows, split_rows
from _lib.stages import Stage, StageTrainer, TeacherStates
from _lib.sweeps import settings_of
from _lib.training import checkpoint_to_resume, perplexity, plot_loss, say, say_figures, write_json

import torch
from transformers import PreTrainedModel, TrainingArguments, default_data_collator, set_seed

from hf_hybrid_ssm.cli.progress import progress
from hf_hybrid_ssm.hub import card_of_folder
from hf_hybrid_ssm.hub.delta_files import replacing
from hf_hybrid_ssm.hub.reading import read_json
from hf_hybrid_ssm.hub.whole_models import load_whole
from hf_hybrid_ssm.hub.writing import write_whole
from hf_hybrid_ssm.students.configuration import teacher_attention
from hf_hybrid_ssm.upcycle import Keep, Teacher, choose_layers, save_delta, upcycle
from hf_hybrid_ssm.upcycle.early import refuse_own_folder
from hf_hybrid_ssm.upcycle.loading import open_teacher
from hf_hybrid_ssm.upcycle.student import config_of, constant_sinks, new_modules

STAGES = ("align", "distil", "finetune")
BEGUN = "settings.json"
ASIDE = (*STAGES, "delta", "resume", "teacher_device_map", "teacher_states", "run_name", "use_cpu", "disable_tqdm")
UNSEEN: tuple[str, ...] = (
    "logging_",
    "save_",
    "eval_",
    "report_",
    "dataloader_",
    "hub_",
    "push_",
    "per_device_eval_",
    "load_best_",
)
UNSEEN += (
    "activation_checkpointing",
    "gradient_checkpointing",
    "torch_compile",
    "torch_empty_cache",
    "preprocessing_",
)
"""Settings of a stage that change nothing of what it learns, and beginnings of their names."""
EVALUATION = "evaluation"
TRAINED = ("all", "new")


@dataclass
class UpcycleArguments:
    """Which teacher, what remains of it, and how the student learns."""

    teacher: str = field(metadata={"help": "a checkpoint: folder, Hub name or GGUF file"})
    keep: Any = field(
        default=0.2,
        metadata={
            "help": "layers that still see all tokens: how many (6), which share (0.25), or a list of layers or, as "
            "[[layer, group], ...], of key/value groups"
        },
    )
    keep_by: str | None = field(
        default=None,
        metadata={
            "help": "with a count or share: recall (even, if the teacher has none), group_recall (of groups), "
            "kl, sensitivity or even"
        },
    )
    window: int = field(default=256, metadata={"help": "tokens that a token sees before its own, in the other layers"})
    memory: str | None = field(default=None, metadata={"help": "beside the windows: longhorn or context"})
    instead: bool = field(default=False, metadata={"help": "the memory (longhorn) takes the place of attention"})
    memory_layers: list[int] | None = field(
        default=None, metadata={"help": "those of the other layers that have it; all by default"}
    )
    config: dict[str, Any] = field(
        default_factory=dict,
        metadata={
            "help": "more of upcycle(): sink, attn_scale, window_dropout, and fields of the memory's configuration"
        },
    )
    init: str = field(default="projections", metadata={"help": "of a memory: projections or random"})
    align: dict[str, Any] | None = field(default=None, metadata={"help": "settings of this stage's training"})
    distil: dict[str, Any] | None = field(default=None, metadata={"help": "the same"})
    finetune: dict[str, Any] | None = field(default=None, metadata={"help": "the same"})
    temperature: float = field(default=1.0, metadata={"help": "of the distributions in distil"})
    lora_rank: int | None = field(
        default=None, metadata={"help": "in distil and finetune: train what is new, and LoRA on all else"}
    )
    trained: str = field(
        default="all", metadata={"help": "in distil and finetune: all weights, or only what is new, sinks included"}
    )
    within_weight: float = field(
        default=1.0, metadata={"help": "of tokens that a window still shows, in align and distil; others have 1"}
    )
    recall_share: float = field(
        default=0.0, metadata={"help": "of the training rows: copies and values of keys, from beyond the window"}
    )
    teacher_states: str | None = field(
        default=None, metadata={"help": "a folder to keep the teacher's last hidden states in, for distil"}
    )
    delta: bool = field(default=False, metadata={"help": "save what the student has beyond its teacher, not all"})
    teacher_device_map: str | None = field(
        default=None, metadata={"help": 'where the teacher lies: "auto", "cuda:1", ...'}
    )
    resume: bool = field(default=True, metadata={"help": "go on where a killed run stopped"})
    overwrite: bool = field(default=False, metadata={"help": "start again in an output_dir that is not empty"})

    def __post_init__(self):
        if self.keep_by is not None and not isinstance(self.keep, int | float):
            raise ValueError(f"keep_by={self.keep_by!r} chooses a count or share of layers, got keep={self.keep!r}.")
        student_settings(self.student())
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature} must be positive.")
        if self.trained not in TRAINED:
            raise ValueError(f"trained={self.trained!r} must be one of {', '.join(map(repr, TRAINED))}.")
        if self.trained == "new" and self.lora_rank is not None:
            raise ValueError(f"lora_rank={self.lora_rank} trains more than trained='new' does: give one of them.")
        trains_all = self.trained == "all" and self.lora_rank is None
        if self.delta and trains_all and not (self.distil is None and self.finetune is None):
            raise ValueError(
                "delta=True leaves out what is as the teacher has it, and nothing will be: give trained='new', "
                "lora_rank or delta=False."
            )
        check_least(self, 1, "lora_rank")
        if not 0 < self.within_weight <= 1:
            raise ValueError(f"within_weight={self.within_weight} must lie above 0 and at most at 1.")
        if not 0 <= self.recall_share < 1:
            raise ValueError(f"recall_share={self.recall_share} must be at least 0 and below 1.")
        if self.teacher_states is not None and self.distil is None:
            raise ValueError(f"teacher_states={self.teacher_states!r} are for distil, which has no settings.")

    def student(self) -> dict[str, Any]:
        """Settings as of `student_settings`."""
        own = ("keep", "keep_by", "window", "memory", "instead", "memory_layers", "init")
        return self.config | {name: getattr(self, name) for name in own}


def student_settings(given: dict[str, Any], window: int = 256) -> tuple[Keep, dict[str, Any]]:
    """What a student of such settings keeps, and the other arguments of `upcycle`.

    Args:
        given: such as {keep: 6, keep_by: recall, memory: longhorn}.
        window: where none is given.
    """
    options = dict(given)
    keep = Keep(options.pop("keep", 0.2), options.pop("keep_by", None), options.pop("window", window))
    return keep, options


def planned(teacher: Any, given: dict[str, Any], window: int = 256) -> Any:
    """The configuration of a student, from its teacher's: refuses what cannot be, before any weight is read."""
    keep, options = student_settings(given, window)
    return config_of(teacher, keep, **{name: value for name, value in options.items() if name != "init"})


def stage_arguments(training: TrainingArguments, stage: str, settings: dict[str, Any]) -> TrainingArguments:
    """The shared settings, with those of the stage, in a folder of its own."""
    return replace(training, output_dir=str(Path(training.output_dir) / stage), **settings)


def learnt_by(
    arguments: UpcycleArguments, data: DataArguments, settings: TrainingArguments, stage: str
) -> dict[str, Any]:
    """What a stage and those before it learn from: a run that goes on has the same."""
    found = settings_of(arguments, settings, without=ASIDE) | asdict(data)
    found |= {each: getattr(arguments, each) for each in STAGES[: STAGES.index(stage)]}
    return {name: value for name, value in found.items() if not name.startswith(UNSEEN)}


def check_begun(settings: TrainingArguments, about: dict[str, Any]) -> None:
    """What a killed run left of a stage was trained as the settings say.

    Raises:
        ValueError: by names.
    """
    begun = Path(settings.output_dir) / BEGUN
    if begun.is_file() and (before := read_json(begun)) != (now := json.loads(to_json(about))):
        names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        raise ValueError(
            f"{settings.output_dir} was begun with other settings ({', '.join(names)}): give those, another "
            "output_dir, or overwrite=true."
        )


def is_own(folder: Path) -> bool:
    """Whether an upcycling wrote the folder, killed or finished: `resume`, the default, replaces nothing else."""
    return any((folder / name).is_dir() for name in (*STAGES, EVALUATION))


def within(name: str, modules: list[str]) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def trained_alone(student: Any, stage: str) -> list[str]:
    """The modules that train while what came from the teacher stays: in align those that have a loss of their own."""
    return new_modules(student) + ([] if stage == "align" else constant_sinks(student))


def frozen_beside_the_new(student: Any, rank: int) -> Any:
    """The student with LoRA of `rank` on what came from the teacher; what is new is trained whole."""
    from peft import LoraConfig, get_peft_model

    whole = trained_alone(student, "distil")
    names = [
        name
        for name, module in student.named_modules()
        if isinstance(module, torch.nn.Linear)
        and not within(name, whole)
        and module is not student.get_output_embeddings()
    ]
    return get_peft_model(student, LoraConfig(r=rank, target_modules=names, modules_to_save=whole or None))


def upcycle_model(arguments: UpcycleArguments, data: DataArguments, training: TrainingArguments) -> dict[str, Any]:
    """Make, train, evaluate and save the student; returns what is written to results.json."""
    folder = Path(training.output_dir)
    refuse_own_folder(folder, arguments.teacher)
    check_output(training.output_dir, arguments.overwrite, "auto" if is_own(folder) and arguments.resume else None)
    stages = {
        stage: stage_arguments(training, stage, getattr(arguments, stage))
        for stage in STAGES
        if getattr(arguments, stage) is not None
    }
    about = {stage: learnt_by(arguments, data, settings, stage) for stage, settings in stages.items()}
    if arguments.resume and not arguments.overwrite:
        for stage, settings in stages.items():
            check_begun(settings, about[stage])
    if "align" in stages and training.world_size > 1:
        raise ValueError(f"align runs in one process, this is one of {training.world_size}: leave it out here.")
    set_seed(training.seed)
    files = open_teacher(arguments.teacher)
    window = checked_window(arguments, data, planned(files.config, arguments.student()), stages)
    own_tokenizer = files.load_tokenizer() if data.tokenizer is None else None
    place = {} if arguments.teacher_device_map is None else {"device_map": arguments.teacher_device_map}
    model = files.load_model(torch.float32, **place).requires_grad_(False)
    if not place:
        model.to(training.device)
    with training.main_process_first(desc="data"):
        texts, validation_texts = load_documents(data)
        tokenizer = own_tokenizer or get_tokenizer(data, texts)
        check_ends(tokenizer, data.tokenizer or arguments.teacher)
        check_vocabulary(model, tokenizer)
        train = packed_rows(texts, tokenizer, data, training.seed)
        validation = None if validation_texts is None else packed_rows(validation_texts, tokenizer, data)
    train, validation = split_rows(train, validation, data)

    teacher = Teacher(model, tokenizer, files.source)
    keep, options = student_settings(arguments.student())
    choice = choose_layers(teacher, keep, lambda steps: progress(steps, "texts"))
    student, report = upcycle(teacher, choice, **options)
    say(report)
    train = with_recall_rows(train, tokenizer, arguments.recall_share, arguments.window, training.seed)
    states = None
    if arguments.teacher_states is not None:
        states = TeacherStates(arguments.teacher_states, model, train, rows_read(stages["distil"]))
        assert not isinstance(train, RowStream)  # `TeacherStates` refuses one
        train = train.add_column("row", list(range(len(train))))

    def trainer_of(trained: Any, name: str, settings: TrainingArguments) -> StageTrainer:
        stage = Stage(name, teacher, arguments.temperature, window, arguments.within_weight, states)
        return StageTrainer(
            model=trained, args=settings, train_dataset=train, eval_dataset=validation, processing_class=tokenizer,
            data_collator=default_data_collator, stage=stage,
        )  # fmt: skip

    (folder / EVALUATION).mkdir(parents=True, exist_ok=True)  # by which a later run knows the folder
    judge = replace(training, output_dir=str(folder / EVALUATION))
    teacher_loss = trainer_of(model, "finetune", judge).evaluate()["eval_loss"]
    results: dict[str, Any] = {
        "teacher": Path(arguments.teacher).name,
        "teacher_loss": teacher_loss,
        **layers_of(student.config),
        "init": arguments.init,
        "parameters": student.num_parameters(),
        "loss_before_training": trainer_of(student, "finetune", judge).evaluate()["eval_loss"],
    }
    history: list[dict[str, float]] = []
    steps = tokens = 0
    for stage, settings in stages.items():
        done = Path(settings.output_dir) / "stage.json"
        if done.is_file() and arguments.resume and not arguments.overwrite:
            student = load_whole(type(student), settings.output_dir, dtype=torch.float32)
            record = read_json(done)
        else:
            write_json(Path(settings.output_dir) / BEGUN, about[stage])
            record, student = run_stage(arguments, stage, settings, student, trainer_of)
            student.save_pretrained(settings.output_dir)
            write_json(done, record)
        history += [entry | {"step": entry["step"] + steps} for entry in record["history"]]
        steps += record["steps"]
        tokens += (
            record["steps"]
            * data.sequence_length
            * settings.train_batch_size
            * (settings.gradient_accumulation_steps * settings.world_size)
        )
        results[f"loss_after_{stage}"] = record["loss"]
    loss = next((results[f"loss_after_{stage}"] for stage in reversed(stages)), results["loss_before_training"])
    results |= {
        "steps": steps,
        "tokens": tokens,
        "validation_loss": loss,
        "validation_perplexity": perplexity(loss),
        "perplexity_over_teachers": perplexity(loss - teacher_loss),
    }
    save(student, tokenizer, folder, results, arguments, training)
    plot_loss([entry for entry in history if "eval_loss" in entry], folder / "gap.png", {"teacher": teacher_loss})
    say_figures(results)
    return results


def checked_window(
    arguments: UpcycleArguments, data: DataArguments, config: Any, stages: dict[str, TrainingArguments]
) -> int | None:
    """The window of the layers that saw all tokens, if a student of this configuration has one.

    Raises:
        ValueError: nothing new is there to train, or rows or weights of tokens do not fit the window.
    """
    plan = config.plan.layers
    has_memory = any(layer.memory for layer in plan)
    if "align" in stages and not has_memory:
        raise ValueError("align has nothing to train: it teaches a memory, and memory is null. Leave it out.")
    if arguments.trained == "new" and not has_memory and not any(layer.sink for layer in plan):
        raise ValueError("trained='new' has nothing to train: the student has no memory and no sinks. Leave it out.")
    if not any(layer.is_windowed and kind == "full" for layer, (kind, _) in zip(plan, teacher_attention(config))):
        if arguments.within_weight != 1:
            raise ValueError(
                f"within_weight={arguments.within_weight} is for students with windows, and this has none: leave it "
                "out."
            )
        return None
    if stages and data.sequence_length < 2 * arguments.window:
        raise ValueError(
            f"sequence_length={data.sequence_length} must be at least {2 * arguments.window}, twice the window of "
            f"{arguments.window} tokens: within it the student has nothing to learn."
        )
    return arguments.window


def rows_read(settings: TrainingArguments) -> int | None:
    """How many rows a stage reads at most; None where it goes by passes over all of them."""
    rows = settings.train_batch_size * settings.gradient_accumulation_steps * settings.world_size
    return settings.max_steps * rows if settings.max_steps > 0 else None


def layers_of(config: Any) -> dict[str, Any]:
    """What became of the teacher's attention, for results.json."""
    layers = list(enumerate(config.plan.layers))
    found: dict[str, Any] = {"kept_attention_layers": [index for index, layer in layers if layer.attention == "full"]}
    if groups := [[index, group] for index, layer in layers for group in layer.groups]:
        found["kept_key_value_groups"] = groups
    if memories := [index for index, layer in layers if layer.memory]:
        found |= {"memory": layers[memories[0]][1].memory, "layers_with_memory": memories}
    return found


def run_stage(
    arguments: UpcycleArguments, stage: str, settings: TrainingArguments, student: Any, trainer_of: Any
) -> tuple[dict[str, Any], Any]:
    """Train one stage; what to remember of it, and the student after it."""
    model: Any = student
    if stage == "align" or arguments.trained == "new":  # an optimizer need not hold the rest
        new = trained_alone(student, stage)
        for name, parameter in student.named_parameters():
            parameter.requires_grad_(within(name, new))
    elif arguments.lora_rank is not None:
        model = frozen_beside_the_new(student, arguments.lora_rank)
    trainer = trainer_of(model, stage, settings)
    resume = "auto" if arguments.resume and not arguments.overwrite else None
    clear_checkpoints(settings.output_dir, arguments.overwrite)
    trainer.train(resume_from_checkpoint=checkpoint_to_resume(resume, settings.output_dir))
    loss = trainer.evaluate()["eval_loss"]
    student = model if model is student else model.merge_and_unload()
    student.requires_grad_(True)
    student.config.use_cache = True
    kept = ("step", "loss", "eval_loss", "learning_rate")
    history = [{key: entry[key] for key in kept if key in entry} for entry in trainer.state.log_history]
    return {"stage": stage, "steps": trainer.state.global_step, "loss": loss, "history": history}, student


def save(
    student: PreTrainedModel,
    tokenizer: Any,
    folder: Path,
    results: dict[str, Any],
    arguments: UpcycleArguments,
    training: TrainingArguments,
) -> None:
    """An ordinary checkpoint, or a delta, whose card names the teacher and the gap."""
    if not training.should_save:
        return
    student.config.use_cache = True  # a Trainer that only evaluates turns it off
    if arguments.delta:
        save_delta(student, folder, arguments.teacher, tokenizer=tokenizer, overwrite=True)
    else:
        with replacing(folder) as beside:
            student.save_pretrained(beside, export_code=True)
            tokenizer.save_pretrained(beside)
    write_json(folder / "results.json", results)
    card = card_of_folder(folder, recipe=f"python recipes/upcycle.py CONFIG.yaml teacher={results['teacher']}")
    if (folder / "README.md").exists() and not arguments.overwrite:
        say(f"{folder / 'README.md'} stays as it is; hf-hybrid-ssm card {folder} --overwrite replaces it.")
    else:
        write_whole(folder / "README.md", card)


if __name__ == "__main__":
    start("upcycle.py", upcycle_model, UpcycleArguments, DataArguments, TrainingArguments)
