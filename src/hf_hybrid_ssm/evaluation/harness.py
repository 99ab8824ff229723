"""lm-eval from Python, with task files in any folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

import hf_hybrid_ssm  # noqa: F401 - registers the families, which lm-eval's `hf` model then knows
from hf_hybrid_ssm.evaluation.recall_tasks import RECALL_FOLDER, with_tag
from hf_hybrid_ssm.extras import install_command
from hf_hybrid_ssm.hub.delta_files import is_delta


def evaluate(
    model: str | Any,
    tasks: Sequence[str],
    *,
    include_path: str | Path | None = None,
    data_folder: str | Path | None = None,
    batch_size: int = 8,
    teacher: str | Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Score a model by lm-eval's own `hf` model and tasks.

    Args:
        model: folder or Hub name of a checkpoint, or a loaded model (its tokenizer is then found by
            `options["model_args"]`, as lm-eval's documentation of `HFLM` says), or an lm-eval `LM`.
        tasks: names of lm-eval's tasks, of those in `include_path`, or of `RECALL_TASKS`, which take their lengths
            from `options["metadata"]` (see `recall_tasks.documents.documents_of`).
        include_path: folder of further task files (YAML).
        data_folder: what relative `data_files` of these task files are relative to; lm-eval itself takes them from
            the current directory.
        batch_size: requests scored at a time.
        teacher: where the teacher of a delta is, if `model` is the folder of one.
        options: further arguments of `lm_eval.simple_evaluate` (`limit`, `num_fewshot`, `device`, ...).

    Returns:
        What lm-eval returns, with the metrics of each task under `["results"][task]`.

    Raises:
        ImportError: lm-eval is not installed.
        ValueError: a task is not known.
    """
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ImportError(f"lm-eval is needed: {install_command('eval')}") from error

    ask_git_only_within_a_repository()
    tasks = with_tag(tasks)
    if isinstance(model, str):
        options["model_args"] = _model_args(model, teacher) | dict(options.get("model_args") or {})
        model = "hf"
    metadata = _of_model(model, options.get("model_args")) | dict(options.pop("metadata", None) or {})
    folders = [str(RECALL_FOLDER), *([] if include_path is None else [str(include_path)])]
    manager = TaskManager(include_path=folders, include_defaults=False, metadata=metadata)
    if not set(tasks) <= set(manager.all_subtasks):
        # lm-eval's own 14,000 task files take 20 seconds to read, so only where one of them is asked for
        manager = TaskManager(include_path=folders, metadata=metadata)
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        raise ValueError(f"tasks={unknown} are not known to lm-eval; is include_path={include_path!r} their folder?")
    wanted: list[Any] = list(tasks)
    if data_folder is not None and include_path is not None:
        wanted = [_with_data(task, Path(include_path), Path(data_folder)) for task in tasks]
    return lm_eval.simple_evaluate(model, tasks=wanted, task_manager=manager, batch_size=batch_size, **options)


def ask_git_only_within_a_repository() -> None:
    """lm-eval notes the commit of the current folder in its results, by a process whose complaint reaches the user
    ("fatal: not a git repository"). Outside of a repository it is not asked.
    """
    from lm_eval import evaluator

    here = Path.cwd()
    if not any((folder / ".git").exists() for folder in (here, *here.parents)):
        evaluator.get_git_commit_hash = lambda: None


def _model_args(model: str, teacher: str | Path | None) -> dict[str, Any]:
    if not is_delta(model):
        return {"pretrained": model} | ({} if teacher is None else {"teacher": teacher})
    from hf_hybrid_ssm.upcycle.delta import tokenizer_of

    return {"pretrained": model, "teacher": teacher, "tokenizer": tokenizer_of(model, teacher)}


def _of_model(model: Any, model_args: Any) -> dict[str, Any]:
    """What tasks that make their own documents want to know of a model: its tokenizer, and how much it reads."""
    of_model = (
        {} if isinstance(model, str) else {name: getattr(model, name, None) for name in ("tokenizer", "max_length")}
    )
    return {name: value for name, value in of_model.items() if value is not None} | dict(model_args or {})


class _AnyTag(yaml.SafeLoader):
    """Reads task files without running what their `!function` tags name."""


_AnyTag.add_multi_constructor("!", lambda loader, suffix, node: None)


def _with_data(task: str, folder: Path, data_folder: Path) -> str | dict[str, Any]:
    """The task with absolute data files: within a group, given keys are merged into the registered task."""
    for path in folder.rglob("*.yaml"):
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_AnyTag)  # a SafeLoader  # noqa: S506 - `_AnyTag` is a SafeLoader
        if isinstance(content, dict) and content.get("task") == task:
            files = (content.get("dataset_kwargs") or {}).get("data_files")
            if not files:
                return task
            absolute = {split: str(data_folder / name) for split, name in files.items()}
            merged = {"task": task, "dataset_kwargs": {"data_files": absolute}}
            return {"group": f"{task}_here", "task": [merged]}
    return task
