"""Score checkpoints with lm-eval, in one table.

The Longhorn paper's eight tasks, LAMBADA and WikiText, in the layout of its table.

    python recipes/lm_eval_table.py recipes/configs/lm_eval/local.yaml models.NAME=FOLDER [models.OTHER=FOLDER ...]

With `data_folder` the task files in DATA_FOLDER/lm_eval_tasks are used and nothing is fetched; without, lm-eval's own.
Writes results.json (every measure with its standard error) and results.md to `output_dir` after every model;
with `resume=true`, finished tasks are not run again.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _lib.checks import check_checkpoint, check_known, check_least, check_output
from _lib.entry import start
from _lib.training import write_figures, write_json

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_hybrid_ssm.evaluation import evaluate

# task: column of the table, measure (table 4 of arXiv 2407.14207, and two more), and whether it is a share
COLUMNS: dict[str, tuple[tuple[str, str, bool], ...]] = {
    "piqa": (("PIQA", "acc", True),),
    "hellaswag": (("Hella", "acc_norm", True),),
    "winogrande": (("Wino", "acc", True),),
    "arc_easy": (("ARC-e", "acc", True),),
    "arc_challenge": (("ARC-c", "acc_norm", True),),
    "openbookqa": (("OBQA", "acc", True),),
    "social_iqa": (("SIQA", "acc", True),),
    "boolq": (("BoolQ", "acc", True),),
    "lambada_openai": (("LAMBADA", "acc", True), ("LAMBADA ppl", "perplexity", False)),
    "wikitext": (("WikiText ppl", "word_perplexity", False),),
}
AVERAGED = list(COLUMNS)[:8]


SCORED = "models.json"
"""Of `output_dir`: which checkpoint has which name."""


@dataclass
class TableArguments:
    """Which checkpoints, which tasks."""

    models: dict[str, str] = field(default_factory=dict, metadata={"help": "name: checkpoint, a row each"})
    tasks: list[str] = field(default_factory=lambda: list(COLUMNS))
    data_folder: str | None = field(default=None, metadata={"help": "with lm_eval_tasks/ and lm_eval/; else the Hub"})
    limit: int | None = field(default=None, metadata={"help": "only the first documents of each task, for a trial"})
    num_fewshot: int | None = None
    batch_size: int = 8
    max_length: int | None = field(default=None, metadata={"help": "longest context; by default the model's own"})
    device: str | None = None
    dtype: str = "auto"
    output_dir: str = "runs/lm-eval"
    resume: bool = False
    overwrite: bool = False
    results: str | None = field(default=None, metadata={"help": "another file for the figures"})

    def __post_init__(self):
        check_known("tasks", self.tasks, COLUMNS)
        check_least(self, 1, "batch_size", "limit")
        if self.data_folder is not None and not (Path(self.data_folder) / "lm_eval_tasks").is_dir():
            raise FileNotFoundError(f"data_folder={self.data_folder!r} holds no folder lm_eval_tasks.")


def check_models(models: dict[str, str]) -> None:
    """Every checkpoint is a language model and knows its tokenizer's tokens, before the first one is scored."""
    if not models:
        raise ValueError("give at least one model: models.NAME=FOLDER.")
    for name, checkpoint in models.items():
        config = check_checkpoint(checkpoint, f"models.{name}", AutoModelForCausalLM)
        tokens = len(AutoTokenizer.from_pretrained(checkpoint))
        if config.vocab_size < tokens:
            raise ValueError(
                f"models.{name}: vocab_size={config.vocab_size} is below the tokenizer's {tokens} tokens."
            )


def score(lm: Any, tasks: list[str], arguments: TableArguments) -> dict[str, dict[str, Any]]:
    """lm-eval's measures of each task: name → value, and `NAME_stderr` where it has one."""
    options: dict[str, Any] = {"limit": arguments.limit, "num_fewshot": arguments.num_fewshot, "bootstrap_iters": 100}
    suffix = ""
    if arguments.data_folder is not None:
        suffix, data = "_local", Path(arguments.data_folder).resolve()
        options |= {"include_path": data / "lm_eval_tasks", "data_folder": data}
    found = evaluate(lm, [task + suffix for task in tasks], batch_size=arguments.batch_size, **options)["results"]
    return {task: measures_of(found[task + suffix]) for task in tasks}


def measures_of(found: dict[str, Any]) -> dict[str, Any]:
    names = {key: key.replace(",none", "") for key, value in found.items() if isinstance(value, int | float)}
    return {name: found[key] for key, name in names.items() if key.endswith(",none")} | {
        "documents": found.get("sample_len")
    }


def lm_eval_table(arguments: TableArguments) -> dict[str, Any]:
    """All tasks of all models; returns what is written to results.json."""
    from lm_eval.models.huggingface import HFLM

    done = Path(arguments.output_dir) / "results.json"
    check_output(arguments.output_dir, arguments.overwrite, resume="auto" if arguments.resume else None)
    check_models(arguments.models)
    limits = {name: getattr(arguments, name) for name in ("limit", "num_fewshot", "max_length", "dtype")}
    limits["data"] = "the Hub" if arguments.data_folder is None else "local"
    scored = Path(arguments.output_dir) / SCORED
    checkpoints = arguments.models
    figures: dict[str, Any] = {"settings": limits, "models": {}}
    if arguments.resume and done.is_file():
        figures = json.loads(done.read_text(encoding="utf-8"))
        if figures["settings"] != limits:
            raise ValueError(f"{done} was made with {figures['settings']}, the settings say {limits}.")
        before = json.loads(scored.read_text(encoding="utf-8"))
        if other := sorted(name for name in before.keys() & checkpoints if before[name] != checkpoints[name]):
            raise ValueError(f"models.{other[0]}: {done} has the scores of {before[other[0]]}; give it another name.")
        checkpoints = before | checkpoints
    write_json(scored, checkpoints)
    for name, checkpoint in arguments.models.items():
        row = figures["models"].setdefault(name, {"tasks": {}})
        missing = [task for task in arguments.tasks if task not in row["tasks"]]
        if not missing:
            continue
        options = {"device": arguments.device, "max_length": arguments.max_length, "dtype": arguments.dtype}
        lm = HFLM(pretrained=checkpoint, batch_size=arguments.batch_size, **options)
        row |= {"model_type": lm.model.config.model_type, "parameters": lm.model.num_parameters()}
        row["tasks"] |= score(lm, missing, arguments)
        scores = [row["tasks"][each][COLUMNS[each][0][1]] for each in AVERAGED if each in row["tasks"]]
        row["average"] = sum(scores) / len(scores) if len(scores) == len(AVERAGED) else None
        write_figures(figures, arguments.output_dir, arguments.results)
        (Path(arguments.output_dir) / "results.md").write_text(table_of(figures), encoding="utf-8")
    print(table_of(figures))
    return figures


def table_of(figures: dict[str, Any]) -> str:
    """Models down, tasks across, shares in percent, the average of the eight before what the paper does not have."""
    rows: list[list[str]] = []
    for name, row in figures["models"].items():
        cells = [name, f"{row['parameters']:,}"]
        for task, columns in COLUMNS.items():
            measures = row["tasks"].get(task, {})
            values = [(measures.get(measure), 100 if is_share else 1) for _, measure, is_share in columns]
            cells += ["" if value is None else f"{factor * value:.2f}" for value, factor in values]
            if task == AVERAGED[-1]:
                cells.append("" if row["average"] is None else f"{100 * row['average']:.2f}")
        rows.append(cells)
    names = [label for task in AVERAGED for label, _, _ in COLUMNS[task]]
    others = [label for task in COLUMNS if task not in AVERAGED for label, _, _ in COLUMNS[task]]
    head = ["model", "parameters", *names, "avg.", *others]
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    start("lm_eval_table.py", lm_eval_table, TableArguments)
