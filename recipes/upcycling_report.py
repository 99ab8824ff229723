"""Measure recall, loss and cache of students.

Most of their layers see a window only.

    python recipes/upcycling_report.py recipes/configs/upcycle/report_cpu.yaml teacher=FOLDER_OR_GGUF [key=value ...]

Judges a teacher; in `windowed` the teacher itself with windows in all layers that `choose_layers` does not keep (by
its attention masks, the first token in sight); and in `students` checkpoints, or what `upcycle()` makes of it. Nothing
is trained. Recall is that of lm-eval's recall tasks, at several windows, with Wilson's intervals; loss is that of
`files` between `edges`; with `written_tokens` students also write, and the teacher scores it. Writes results.json to
`output_dir`, and to `results`. A report that was stopped goes on with what it lacks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from _lib.checks import check_checkpoint
from _lib.documents import documents_of_files, token_ids
from _lib.entry import start
from _lib.sweeps import check_claim, claim, once
from _lib.training import say, write_figures

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

import hf_hybrid_ssm  # noqa: F401 - registers the families
from hf_hybrid_ssm.evaluation import (
    RECALL_TASKS,
    evaluate,
    loss_by_position,
    mean_by_position,
    teacher_scored_generation,
    wilson_interval,
)
from hf_hybrid_ssm.hub.delta_files import is_delta
from hf_hybrid_ssm.hub.whole_models import load_whole
from hf_hybrid_ssm.planning import Setup, plan
from hf_hybrid_ssm.upcycle import TEACHERS, choose_layers, load_teacher, student_config, upcycle, windowed_layers
from hf_hybrid_ssm.upcycle.layer_ranking import number_kept

TEACHER = "teacher"


@dataclass
class ReportArguments:
    """Whom to judge, and by what."""

    teacher: str = field(metadata={"help": "a checkpoint: folder, Hub name or .gguf file"})
    windowed: dict[str, dict[str, Any]] = field(
        default_factory=dict, metadata={"help": "name: keep and keep_by of choose_layers; the teacher is masked so"}
    )
    students: dict[str, str | dict[str, Any]] = field(
        default_factory=dict,
        metadata={"help": "name: a checkpoint, a delta of this teacher, or the arguments of upcycle()"},
    )
    window: int = field(
        default=256,
        metadata={"help": "tokens that a windowed layer sees before its own; students say sliding_window where not"},
    )
    tasks: list[str] = field(default_factory=lambda: ["recall_needle"], metadata={"help": ", ".join(RECALL_TASKS)})
    multiples: list[int] = field(default_factory=lambda: [4, 8], metadata={"help": "lengths of texts, in windows"})
    samples: int = field(default=60, metadata={"help": "texts of each length and task"})
    text_file: str | None = field(default=None, metadata={"help": "whose sentences are the filler; made by default"})
    files: list[str] = field(default_factory=list, metadata={"help": "held-out text: txt, jsonl or parquet"})
    text_column: str = "text"
    texts: int = field(default=4, metadata={"help": "documents that are read for loss by position"})
    edges: list[int] = field(
        default_factory=lambda: [64, 256, 512, 1024, 2048],
        metadata={"help": "positions between which loss is averaged"},
    )
    written_tokens: int = field(default=0, metadata={"help": "that students write after 64 of each text; 0: none"})
    cache_lengths: list[int] = field(default_factory=lambda: [1024, 4096, 16384, 65536])
    dtype: str = field(default="float32", metadata={"help": "float32 or bfloat16, of all models"})
    seed: int = 0
    output_dir: str = "runs/upcycling-report"
    results: str | None = field(default=None, metadata={"help": "another file for the figures"})
    overwrite: bool = False

    def __post_init__(self):
        if unknown := sorted(set(self.tasks) - set(RECALL_TASKS)):
            raise ValueError(f"tasks: {unknown} are not among {', '.join(RECALL_TASKS)}.")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype={self.dtype!r} must be 'float32' or 'bfloat16'.")
        names = [TEACHER, *self.windowed, *self.students]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{twice} name more than one of teacher, windowed and students.")
        for name, given in self.windowed.items():
            if "keep" not in given or set(given) - {"keep", "keep_by"}:
                raise ValueError(f"windowed: {name!r} has {sorted(given)}; it must have keep, and may have keep_by.")
            if given.get("keep_by") == "group_recall":
                raise ValueError(f"windowed: {name!r} masks whole layers, not key/value groups: make it a student.")
        for name, student in self.students.items():
            if isinstance(student, str):
                check_checkpoint(student, f"students: {name!r}", AutoModelForCausalLM)


class Judge:
    """Everything that is asked of a model, once; answers lie in the folder.

    Args:
        texts: token ids (1, L) for loss by position.
    """

    def __init__(
        self, arguments: ReportArguments, teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list
    ):
        self.arguments, self.teacher, self.tokenizer, self.texts = arguments, teacher, tokenizer, texts
        self.folder = Path(arguments.output_dir)

    def judge(self, name: str, model: Callable[[], Any], has_cache: bool) -> dict[str, Any]:
        """`model` makes a context in which the model is what is judged; it is entered for what is lacking."""
        found: dict[str, Any] = {"recall": {}}
        for task in self.arguments.tasks:
            for multiple in self.arguments.multiples:
                each = once(self._file(name, f"{task}-{multiple}"), partial(self._recall, model, task, multiple))
                found["recall"].setdefault(task, {})[f"{multiple}x"] = each
                say(f"{name}: {task} at {multiple} windows: {each['right']} of {each['count']}, {each['interval']}")
        if self.texts:
            found["loss"] = once(self._file(name, "loss"), partial(self._loss, model, has_cache))
            say(f"{name}: loss {found['loss']['mean']}")
        if has_cache:
            found["cache_bytes"] = once(self._file(name, "cache"), partial(self._cache, model))
            if self.texts and self.arguments.written_tokens:
                found["written"] = once(self._file(name, "written"), partial(self._written, model))
        return found

    def _file(self, name: str, what: str) -> Path:
        return self.folder / f"{name}-{what}.json"

    def _recall(self, model: Callable[[], Any], task: str, multiple: int) -> dict[str, Any]:
        from lm_eval.models.huggingface import HFLM

        given = self.arguments
        metadata = {"window": given.window, "multiples": [multiple], "samples": given.samples, "seed": given.seed}
        if given.text_file is not None:
            metadata["text_file"] = given.text_file
        with model() as judged:
            length = multiple * given.window
            harness = HFLM(pretrained=judged, tokenizer=self.tokenizer, batch_size=1, max_length=length)
            templated = bool(getattr(self.tokenizer, "chat_template", None))
            options = {"metadata": metadata, "bootstrap_iters": 0, "apply_chat_template": templated}
            found = evaluate(harness, [task], batch_size=1, **options)["results"][task]
        right, count = round(found["acc,none"] * found["sample_len"]), found["sample_len"]
        return {"right": right, "count": count, "interval": [round(end, 3) for end in wilson_interval(right, count)]}

    def _loss(self, model: Callable[[], Any], has_cache: bool) -> dict[str, Any]:
        with model() as judged:
            piece = 512 if has_cache else max(text.shape[1] for text in self.texts)
            read = partial(loss_by_position, judged, piece=piece)
            each = [mean_by_position(read(text), self.arguments.edges) for text in self.texts]
        return {"mean": {part: sum(text[part] for text in each) / len(each) for part in each[0]}, "by_text": each}

    def _cache(self, model: Callable[[], Any]) -> dict[str, int]:
        with model() as judged:
            config = judged.config
        if config.model_type in TEACHERS:  # as large as that of a student that keeps all of its layers
            config = student_config(config, keep=1.0)
        setups = {length: Setup(batch=1, length=length, dtype="bfloat16") for length in self.arguments.cache_lengths}
        return {f"{length}": plan(config, setup).state for length, setup in setups.items()}

    def _written(self, model: Callable[[], Any]) -> dict[str, Any]:
        prompts = torch.cat([text[:, :64] for text in self.texts])
        with model() as judged:
            losses = teacher_scored_generation(
                judged, self.teacher, prompts, self.arguments.written_tokens, self.arguments.seed
            )
        return {"loss_by_teacher": float(losses.mean()), "tokens": losses.numel()}


def texts_of(arguments: ReportArguments, tokenizer: PreTrainedTokenizerBase) -> list[torch.Tensor]:
    """The first tokens of the first documents that are long enough, (1, last edge) each."""
    if not arguments.files:
        return []
    texts, length = [], arguments.edges[-1]
    for document in documents_of_files(arguments.files):
        ids = token_ids([document[arguments.text_column]], tokenizer)[0][:length]
        if len(ids) == length:
            texts.append(torch.tensor([ids]))
        if len(texts) == arguments.texts:
            return texts
    raise ValueError(f"texts={arguments.texts}: {len(texts)} documents of {arguments.files} have {length} tokens.")


def report(arguments: ReportArguments) -> dict[str, Any]:
    """Judge all; returns what is written to results.json."""
    folder = Path(arguments.output_dir)
    settings = {name: value for name, value in asdict(arguments).items() if name not in ("results", "overwrite")}
    check_claim(folder, settings, arguments.overwrite)
    teacher, tokenizer = load_teacher(arguments.teacher, dtype=getattr(torch, arguments.dtype))
    judge = Judge(arguments, teacher, tokenizer, texts_of(arguments, tokenizer))
    claim(folder, settings, arguments.overwrite, "*.json")
    found: dict[str, Any] = {TEACHER: judge.judge(TEACHER, lambda: nullcontext(teacher), True)}
    layers = range(teacher.config.num_hidden_layers)
    for name, given in arguments.windowed.items():
        kept = once(folder / f"{name}-layers.json", partial(_chosen, teacher, tokenizer, given, arguments))
        say(f"{name}: {kept['text']}")
        others = [layer for layer in layers if layer not in kept["layers"]]
        model = partial(_masked, teacher, others, arguments.window)
        found[name] = {"layers": kept["layers"], **judge.judge(name, model, False)}
    for name, student in arguments.students.items():
        found[name] = {}
        if not isinstance(student, str) and isinstance(student.get("keep"), int | float):  # chosen once for all judges
            kept = once(folder / f"{name}-layers.json", partial(_chosen, teacher, tokenizer, student, arguments))
            say(f"{name}: {kept['text']}")
            found[name]["layers"] = kept["layers"]
            student = {key: value for key, value in student.items() if key != "keep_by"} | {"keep": kept["layers"]}
        found[name] |= judge.judge(name, partial(_student, arguments, teacher, tokenizer, student), True)
    figures = {"settings": settings, "models": found}
    write_figures(figures, folder, arguments.results)
    return figures


def _chosen(teacher: Any, tokenizer: Any, given: dict[str, Any], arguments: ReportArguments) -> dict[str, Any]:
    """The layers that are kept. A ranking does not depend on how many they are, so it lies in the folder."""
    keep, by = given["keep"], given.get("keep_by")

    def choose() -> dict[str, Any]:
        options = {"tokenizer": tokenizer, "window": arguments.window, "seed": arguments.seed}
        choice = choose_layers(teacher, keep, by, **options)
        ranking = None if choice.ranking is None else choice.ranking.layers
        return {"layers": choice.layers, "text": str(choice), "ranking": ranking}

    if not isinstance(keep, int | float) or keep == 0 or by == "even":
        return choose()
    found = once(Path(arguments.output_dir) / f"ranking-by-{by or 'default'}.json", choose)
    if found["ranking"] is None:  # the teacher does not recall, or all is kept
        return choose()
    layers = sorted(found["ranking"][: number_kept(keep, len(found["ranking"]))])
    return {"layers": layers, "text": found["text"] if layers == found["layers"] else f"kept ({by}): {layers}"}


@contextmanager
def _masked(teacher: Any, layers: list[int], window: int) -> Iterator[Any]:
    with windowed_layers(teacher, layers, window):
        yield teacher


@contextmanager
def _student(arguments: ReportArguments, teacher: Any, tokenizer: Any, given: Any) -> Iterator[Any]:
    """Made when it is needed, and let go."""
    if isinstance(given, str):
        of_delta = {"teacher": arguments.teacher} if is_delta(given) else {}
        dtype = getattr(torch, arguments.dtype)
        yield load_whole(AutoModelForCausalLM, given, dtype=dtype, **of_delta).eval()
    else:
        keep = given.get("keep")
        of_groups = isinstance(keep, list) and any(not isinstance(part, int) for part in keep)
        windows = of_groups or "others_as" in given or given.get("family") == "bst"
        student, _ = upcycle(
            teacher, tokenizer=tokenizer, **({"sliding_window": arguments.window} if windows else {}) | given
        )
        yield student.eval()


if __name__ == "__main__":
    start("upcycling_report.py", report, ReportArguments)
