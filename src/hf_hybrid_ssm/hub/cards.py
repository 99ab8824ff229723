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

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_hybrid_ssm.hub.configurations import config_of_folder, without_memory
from hf_hybrid_ssm.hub.delta_files import Delta, is_delta, read_delta
from hf_hybrid_ssm.hub.export import auto_class_of
from hf_hybrid_ssm.hub.markdown import code_span, escaped
from hf_hybrid_ssm.hub.reading import read_json
from hf_hybrid_ssm.hub.tables import tables_of
from hf_hybrid_ssm.hub.verify_files import check_folder
from hf_hybrid_ssm.models import family_of
from hf_hybrid_ssm.models.configuration import STATE_LAYER_TYPES
from hf_hybrid_ssm.models.family import CardText, Family
from hf_hybrid_ssm.students.family import WITHOUT_ATTENTION

ON_HUB = re.compile(r"[\w.-]+/[\w.-]+")
# bookkeeping, and what the table of layers says
HIDDEN_FIELDS = {"architectures", "block_types", "layer_types", "ssm_layers"}
HIDDEN_FIELDS |= {"student", "transformers_version"}
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
FULL_ATTENTION = "full attention"
MIXED_ATTENTION = "full attention in some heads, window attention in the others"
ATTENTION = {"window attention", "chunk attention", MIXED_ATTENTION, FULL_ATTENTION, WITHOUT_ATTENTION}
"""Kinds of layers, as families name them, that have no state of this package but the keys and values of tokens."""
PAPER_OF_MEMORY = {"longhorn": "longhorn", "context": "bst"}
TEMPLATE = Path(__file__).with_name("card.md.jinja")
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
    base_model = teacher if base_model is None else base_model
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
    total, inner = _parameters(model)
    layer_types = getattr(config, "layer_types", ())  # a student says it by its plan
    card = ModelCard.from_template(
        data, str(TEMPLATE), escaped=escaped, code_span=code_span, dumps=json.dumps, quote=shlex.quote,
        name=name, config=config, class_name=class_name, config_class=type(config).__name__, text=text, kinds=kinds,
        has_state=has_state, grows=MIXED_ATTENTION in kinds or not set(layer_types) <= {*STATE_LAYER_TYPES},
        full_attention=FULL_ATTENTION, mixed_attention=MIXED_ATTENTION, parameters=total, inner_parameters=inner,
        layers=_layers(kinds), fields=_fields(config), results=results, dataset=dataset, recipe=recipe,
        trained=trained, exported=exported, has_weights=has_weights, auto=auto_class_of(table), delta=delta,
        figures=_figures(results), tables=[] if results is None else tables_of(results), teacher=teacher,
        license=license, base_model=base_model,
    )  # fmt: skip
    return f"{card}\n"


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


def _parameters(model: PreTrainedModel) -> tuple[int, int]:
    """All parameters, and those that are no embeddings."""
    total, inner = model.num_parameters(), model.num_parameters(exclude_embeddings=True)
    if not isinstance(embeddings := model.get_input_embeddings(), nn.Embedding):  # adaptive: transformers counts it in
        inner -= sum(parameter.numel() for parameter in embeddings.parameters())
    return total, inner


def _fields(config: PreTrainedConfig) -> str:
    """Sizes, and fields that have not their defaults."""
    defaults = type(config)().to_dict()
    shown = {key: getattr(config, key) for key in SIZES if hasattr(config, key)}
    shown |= {
        key: value
        for key, value in config.to_dict().items()
        # a name that begins with _ holds where the model was loaded from
        if _plain(value) and key not in HIDDEN_FIELDS and key[0] != "_" and value != defaults.get(key)
        if key.isidentifier()
    }
    return ", ".join(f"`{key}` {escaped(value)}" for key, value in shown.items())


def _figures(results: Mapping[str, Any] | None) -> dict[str, str]:
    """What results.json says in single values and short lists, escaped."""
    plain = ((key, value) for key, value in (results or {}).items() if _plain(value))
    return {escaped(key.replace("_", " ")): _number(value) for key, value in plain}


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


def _number(value: Any) -> str:
    if isinstance(value, bool | str | list):
        return escaped(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
