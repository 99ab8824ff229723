"""Model cards: what a checkpoint is, how it was trained, its metrics and how to load it, from its own files."""

import itertools
import json
import math
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_hybrid_ssm.hub.configurations import config_of_folder, without_memory
from hf_hybrid_ssm.hub.delta_files import Delta, is_delta, read_delta
from hf_hybrid_ssm.hub.export import auto_class_of
from hf_hybrid_ssm.hub.markdown import code_span, escaped
from hf_hybrid_ssm.hub.reading import read_json
from hf_hybrid_ssm.hub.tables import tables_of
from hf_hybrid_ssm.hub.verify_files import check_folder
from hf_hybrid_ssm.models.configuration import STATE_LAYER_TYPES
from hf_hybrid_ssm.models.families import family_of
from hf_hybrid_ssm.models.family import CardText, Family
from hf_hybrid_ssm.students.family import WITHOUT_ATTENTION

ON_HUB = re.compile(r"[\w.-]+/[\w.-]+")
# bookkeeping, and what the table of layers says
HIDDEN_FIELDS = {"architectures", "layer_types", "ssm_layers"}
HIDDEN_FIELDS |= {"student", "transformers_version"}
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
FULL_ATTENTION = "full attention"
MIXED_ATTENTION = "full attention in some heads, window attention in the others"
ATTENTION = {"window attention", "chunk attention", MIXED_ATTENTION, FULL_ATTENTION, WITHOUT_ATTENTION}
"""Kinds of layers, as families name them, that have no state of this package but the keys and values of tokens."""
PAPER_OF_MEMORY = {"longhorn": "longhorn", "context": "bst"}
SINKS = {
    "constant": "a key and a value of the layer's own stand for the first token",
    "first_token": "the first token's key and value stay in the cache",
}
TASKS = {
    "MODEL_FOR_CAUSAL_LM": "text-generation",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM": "text-generation",
    "MODEL_FOR_MASKED_LM": "fill-mask",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION": "text-classification",
    "MODEL_FOR_TOKEN_CLASSIFICATION": "token-classification",
    "MODEL_FOR_QUESTION_ANSWERING": "question-answering",
}
METRICS = {
    "validation_loss": ("loss", "cross-entropy, nats per token"),
    "validation_perplexity": ("perplexity", "perplexity"),
    "accuracy": ("accuracy", "accuracy"),
}


def model_card(
    config: PreTrainedConfig,
    *,
    name: str,
    class_name: str | None = None,
    results: Mapping[str, Any] | None = None,
    dataset: str | None = None,
    recipe: str | None = None,
    trained: bool = False,
    exported: bool = False,
    delta: Delta | None = None,
    license: str | None = None,
    base_model: str | None = None,
) -> str:
    """A card in Markdown with the Hub's metadata in front.

    Args:
        config: of a family of this package.
        name: what the model is called; "FOLDER" in the code that loads it is replaced by it.
        class_name: the class of its weights; by default the language model, or the classifier of a configuration that
            is only for classification.
        results: metrics as the recipes write them to results.json; `tables` (`hub.tables`) are shown as such.
        dataset: what it was trained and validated on.
        recipe: the command that trains it.
        trained: there are weights to load; with results there always are.
        exported: it carries its code, and loads without this package.
        delta: the folder holds what a student has beyond its teacher.
        license: of the weights, as the Hub calls it ("apache-2.0"); without it the card does not say one, unless
            there are no weights.
        base_model: what the weights come from, such as an upcycled model's teacher; a name on the Hub ("owner/name")
            is also put into the metadata.

    What comes from the configuration, `results`, `name`, `delta` and `base_model` is escaped; `dataset` and `recipe`
    are yours, and may hold Markdown.

    Raises:
        ValueError: the configuration is not of a family of this package, or the family has no such class.
    """
    family = family_of(config.model_type)
    class_name = class_name or family.main_class(config)
    if class_name not in family.heads.values():
        known = ", ".join(family.heads.values())
        raise ValueError(f"class_name={class_name!r} is not among the models of {config.model_type}: {known}.")
    model = without_memory(lambda: family.load(class_name)(config))
    table = next(table for table, name in family.heads.items() if name == class_name)
    task, text = TASKS.get(table), _paper_of(family, config)
    has_weights = trained or results is not None
    teacher = _teacher_of(results, delta)
    if base_model is None:
        base_model = teacher
    tables = [] if results is None else tables_of(results)
    kinds = family.layer_kinds(config)
    has_state = text is not None and not set(kinds) <= ATTENTION
    data = ModelCardData(
        license=license if has_weights else "apache-2.0",  # of the code, and of this card
        library_name="transformers",
        pipeline_tag=task,
        tags=[config.model_type, *(["state-space-model"] if has_state else []), "hf-hybrid-ssm"]
        + ([f"arxiv:{text.arxiv}"] if text and has_state else []),
        base_model=base_model if base_model and ON_HUB.fullmatch(base_model) else None,
        **_metrics(name, task, results, dataset),
    )
    sections = [
        f"---\n{data.to_yaml().strip()}\n---",
        f"# {escaped(name)}",
        _what_it_is(config, text, kinds),
        "## Architecture",
        _architecture(config, model, kinds),
        "## Training",
        _training(results, dataset, recipe, trained, teacher),
        *(["## Measured", *map(str, tables)] if tables else []),
        *(["## Teacher", _teacher(name, delta)] if delta is not None else []),
        *(["## Use", _use(name, auto_class_of(table), exported, delta)] if has_weights else []),
        "## Limits",
        _limits(text, kinds, teacher),
        *(["## Citation", f"```bibtex\n{text.citation}\n```"] if text and has_weights and has_state else []),
        *([_licences(license, base_model)] if has_weights else []),
    ]
    return "\n\n".join(sections) + "\n"


def card_of_folder(folder: str | os.PathLike, **options: Any) -> str:
    """The card of a saved model; metrics are those that a recipe left in results.json, options as in `model_card`.

    Raises:
        ValueError: the folder is damaged or foreign (see `check_folder`), or its configuration holds what it may not.
    """
    where = Path(folder)
    check_folder(where)
    saved = read_json(where / "config.json")
    config = config_of_folder(where)
    results = read_json(where / "results.json") if (where / "results.json").is_file() else None
    facts: dict[str, Any] = {
        "name": where.name,
        "class_name": next(iter(saved.get("architectures") or []), None),
        "results": results,
        "trained": True,
        "exported": "auto_map" in saved,
        "delta": read_delta(where) if is_delta(where) else None,
    }
    return model_card(config, **(facts | options))


def _licences(license: str | None, base_model: str | None) -> str:
    if license is not None:
        weights = f"Licence of the weights: {escaped(license)}."
    elif base_model is not None:
        weights = f"The weights come from {escaped(base_model)}, whose licence holds for them."
    else:
        weights = "Licence of the weights: unknown."
    return f"Licence of code and card: Apache-2.0. {weights}"


def _teacher_of(results: Mapping[str, Any] | None, delta: Delta | None) -> str | None:
    """The name of a student's teacher, which a delta and the results of upcycling tell."""
    if delta is not None:
        return delta.teacher
    teacher = (results or {}).get("teacher")
    return teacher if isinstance(teacher, str) else None


def _paper_of(family: Family, config: Any) -> CardText | None:
    """What is said of a model's states; a student's are those of its memory, if it has one."""
    if family.card is not None:
        return family.card
    memories = [PAPER_OF_MEMORY[layer.memory] for layer in config.plan.layers if layer.memory is not None]
    return family_of(memories[0]).card if memories else None


def _what_it_is(config: PreTrainedConfig, text: CardText | None, kinds: list[str]) -> str:
    """The paper's idea, and what the family says of its memory where no layer keeps the keys of all tokens."""
    if hasattr(config, "plan"):
        return _what_a_student_is(config, text, kinds)
    assert text is not None
    if set(kinds) <= ATTENTION:
        return f"A transformer in the classes of {text.name}, without that family's own layers: it is attention alone."
    grows = MIXED_ATTENTION in kinds or any(kind not in STATE_LAYER_TYPES for kind in config.layer_types)
    memory = f" {text.memory}" if text.memory and not grows else ""
    return f"{text.name} ([arXiv {text.arxiv}](https://arxiv.org/abs/{text.arxiv})). {text.idea}{memory}"


def _what_a_student_is(config: Any, text: CardText | None, kinds: list[str]) -> str:
    """Windows and full layers, or a hybrid with a memory, in a teacher's class."""
    plan, of_teacher = config.plan, f"a {code_span(config.teacher_type)} model in the classes of transformers"
    windows = [layer for layer in plan.layers if layer.is_windowed]
    sizes = " or ".join(f"{size:,}" for size in sorted({layer.window for layer in windows}))
    heads = ", but for some heads, which see all" if any(layer.groups for layer in windows) else ""
    sinks = "".join(f"; {SINKS[kind]}" for kind in sorted({layer.sink for layer in windows} - {None}))
    sees = f" In {len(windows)} of {len(kinds)} layers a token sees the {sizes} tokens before its own{heads}{sinks}."
    if text is not None:
        named = f"{text.name} ([arXiv {text.arxiv}](https://arxiv.org/abs/{text.arxiv}))"
        first = f"A hybrid of attention and the memory of {named}: {of_teacher}, with other attention."
        return f"{first}{sees if windows else ''} {text.idea}"
    has_full = any(layer.attention == "full" or layer.groups for layer in plan.layers)
    parts = " and ".join([*(["windows"] if windows else []), *(["full layers"] if has_full else [])])
    return f"A transformer of {parts}: {of_teacher}{f', with other attention.{sees}' if windows else '.'}"


def _limits(text: CardText | None, kinds: list[str], teacher: str | None) -> str:
    forgets = _forgets(kinds) or (text.limits if text is not None else "")
    if teacher is not None:
        return f"{forgets} Its other limits are those of its teacher, {escaped(teacher)}."
    return (
        f"{forgets} A model trained by these recipes was not taught to be helpful or harmless; it repeats what is in "
        "its training data, with the errors and prejudices there."
    )


def _forgets(kinds: list[str]) -> str | None:
    """What a model of attention alone forgets; None of a model with a state, of which the family speaks."""
    if not set(kinds) <= ATTENTION:
        return None
    if FULL_ATTENTION in kinds:
        return "Only the layers with full attention see what the others' windows have left."
    if MIXED_ATTENTION in kinds:
        return "Only the heads with full attention see what the others' windows have left."
    return "The model forgets what its windows have left."


def _metrics(name: str, task: str | None, results: Mapping[str, Any] | None, dataset: str | None) -> dict[str, Any]:
    """The Hub asks for the data set of every metric; without its name they are only in the text."""
    figures = {key: value for key in METRICS if isinstance(value := (results or {}).get(key), int | float)}
    metrics = [(*METRICS[key], value) for key, value in figures.items() if math.isfinite(value)]
    if dataset is None or not metrics:
        return {}
    values = [
        EvalResult(
            task_type=task or "text-generation", dataset_type=dataset, dataset_name=dataset,
            metric_type=kind, metric_name=text, metric_value=value,
        )
        for kind, text, value in metrics
    ]  # fmt: skip
    return {"model_name": name, "eval_results": values}


def _architecture(config: PreTrainedConfig, model: PreTrainedModel, kinds: list[str]) -> str:
    total, inner = model.num_parameters(), model.num_parameters(exclude_embeddings=True)
    if not isinstance(embeddings := model.get_input_embeddings(), nn.Embedding):  # adaptive: transformers counts it in
        inner -= sum(parameter.numel() for parameter in embeddings.parameters())
    counted = f"{total:,} parameters, {inner:,} of them non-embedding"
    defaults = type(config)().to_dict()
    shown = {key: getattr(config, key) for key in SIZES if hasattr(config, key)}
    shown |= {
        key: value
        for key, value in config.to_dict().items()
        # a name that begins with _ holds where the model was loaded from
        if _plain(value) and key not in HIDDEN_FIELDS and key[0] != "_" and value != defaults.get(key)
        if key.isidentifier()
    }
    fields = ", ".join(f"`{key}` {escaped(value)}" for key, value in shown.items())
    return (
        f"`{type(model).__name__}`: {counted}. {_layers(kinds)}\n\n"
        f"{fields}; all other fields of `{type(config).__name__}` have their defaults."
    )


def _plain(value: Any) -> bool:
    """Whether a value is one, or a short list of such: no table, which is shown as one."""
    if isinstance(value, list):
        return len(value) < 9 and all(map(_plain, value))
    return isinstance(value, bool | int | float | str)


def _layers(kinds: list[str]) -> str:
    """Consecutive layers of one kind are named together."""
    parts, start = [], 0
    for kind, group in itertools.groupby(kinds):
        end = start + len(list(group)) - 1
        parts.append(f"layer {start}: {kind}" if start == end else f"layers {start} to {end}: {kind}")
        start = end + 1
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _training(
    results: Mapping[str, Any] | None, dataset: str | None, recipe: str | None, trained: bool, teacher: str | None
) -> str:
    lines = [f"Data: {dataset}."] if dataset else []
    if recipe:
        lines.append(f"Command: `{recipe}`.")
    if results:
        if teacher is not None and not results.get("steps"):
            lines.append(f"Nothing was trained; the weights come from {escaped(teacher)}.")
        told = {escaped(key.replace("_", " ")): value for key, value in results.items() if _plain(value)}
        rows = [f"| {key} | {_number(value)} |" for key, value in told.items()]
        if told.keys() - {"teacher"}:
            lines.append("\n\n| metric | value |\n| --- | ---: |\n" + "\n".join(rows))
    elif not trained:
        lines.insert(0, "No trained weights are published yet.")
        if not recipe:
            lines.append(
                "The package has no recipe of this size. `docs/reproducing.md` has the paper's other experiments."
            )
    elif not lines:
        lines.append("The folder holds no record of the training.")
    return " ".join(lines).replace(" \n", "\n")


def _number(value: Any) -> str:
    if isinstance(value, bool | str | list):
        return escaped(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _teacher(name: str, delta: Delta) -> str:
    place = "on the Hub" if delta.is_on_hub else "a folder or file"
    command = f"hf-hybrid-ssm export {shlex.quote(name)} --full OUT --teacher TEACHER"
    return (
        f"This is a delta: it holds what the student has beyond its teacher, {code_span(delta.teacher)} ({place}). "
        "All other tensors are the teacher's of the same name. It loads where that teacher is at hand, whose weights "
        f"have the fingerprint {code_span(delta.fingerprint)}. {code_span(command)} writes the whole model."
    )


def _use(name: str, auto: str, exported: bool, delta: Delta | None) -> str:
    # without its configuration, AutoTokenizer asks whether to run the code that config.json names
    trust, config = (", trust_remote_code=True", ", config=model.config") if exported else ("", "")
    if delta is not None:
        teacher = json.dumps(delta.teacher)
        return (
            f"```python\nfrom transformers import {auto}\n\n"
            "from hf_hybrid_ssm.upcycle import tokenizer_of  # installed from its source\n\n"
            f"model = {auto}.from_pretrained({json.dumps(name)}, teacher={teacher})\n"
            f"tokenizer = tokenizer_of({json.dumps(name)}, {teacher})\n```"
        )
    first = "" if exported else "import hf_hybrid_ssm  # installed from its source\n"
    code = (
        f"{first}from transformers import AutoTokenizer, {auto}\n\n"
        f"model = {auto}.from_pretrained({json.dumps(name)}{trust})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(name)}{config})\n"
    )
    note = "\n\nOnce `hf_hybrid_ssm` is imported, its own classes load it, with their kernels; trust is not needed."
    return f"```python\n{code}```{note if exported else ''}"
