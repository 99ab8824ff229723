"""The declaration of a family, in the `__init__.py` of its folder: all that the rest of the package knows about it.

A declaration names classes and computes nothing, so reading one imports neither torch nor transformers.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class PeftTargets:
    """Which modules PEFT adapts when its configuration names none, as endings of module names.

    They are the maps into and out of attention, those around the recurrence, and the feed-forward layers. What makes
    the recurrence itself (time steps, decay, state matrices, filters, the memory's coefficients) is in no list:
    adapting it changes how long a model remembers.

    Args:
        lora: for LoRA and the methods that PEFT treats like it.
        ia3: modules whose output (for `ia3_feed_forward`: whose input) IA3 scales.
    """

    lora: tuple[str, ...]
    ia3: tuple[str, ...]
    ia3_feed_forward: tuple[str, ...]


@dataclass(frozen=True)
class CardText:
    """The family in words, for its model cards."""

    name: str
    idea: str
    limits: str
    arxiv: str
    title: str
    authors: str
    year: int
    venue: str | None = None  # the proceedings, where the paper has appeared in some
    memory: str | None = None  # said of configurations of which no layer keeps the keys of all tokens

    @property
    def citation(self) -> str:
        """BibTeX."""
        key = f"{self.authors.split(',')[0].lower()}{self.year}"
        fields = {"title": self.title, "author": self.authors.replace("; ", " and "), "booktitle": self.venue}
        fields |= {"year": str(self.year), "eprint": self.arxiv, "archivePrefix": "arXiv"}
        lines = [f"  {name} = {{{value}}}" for name, value in fields.items() if value is not None]
        kind = "misc" if self.venue is None else "inproceedings"
        return "\n".join([f"@{kind}{{{key},", ",\n".join(lines), "}"])


@dataclass(frozen=True)
class Family:
    """One model type: models that share a configuration class.

    Args:
        model_type: the name in `config.json`.
        package: the module whose attributes the classes are. A family of this package is a folder below `models/`,
            with its configuration in `configuration_{model_type}.py` and its models in `modeling_{model_type}.py`.
        config: name of the configuration class.
        base: name of the class that all models derive from; in this package, in `modeling_{folder}.py`.
        heads: transformers' Auto mapping (without the suffix `_MAPPING`) → name of our class.
        peft: PEFT's defaults.
        card: what model cards say; None of students, of whom their cards say more.
        layer_kinds: configuration → what each layer is, in a few words.
        is_classifier: configuration → whether it is only for classification: it pools all tokens, or sees those that
            follow.
        modules: names of the modules with the configuration and with the models, where they are others.
        recurrent_states: configuration → the shape, for one row, of each state of a recurrent layer, where these are
            all that the layer keeps of the tokens before: sequence parallelism sends them. None where it keeps more.
    """

    model_type: str
    package: str
    config: str
    base: str
    heads: dict[str, str]
    peft: PeftTargets
    card: CardText | None
    layer_kinds: Callable[[Any], list[str]]
    is_classifier: Callable[[Any], bool] = lambda config: False
    recurrent_states: Callable[[Any], Shapes] | None = None
    modules: tuple[str, str] | None = None

    @property
    def folder(self) -> str:
        """The last part of `package`."""
        return self.package.rpartition(".")[2]

    @property
    def is_ours(self) -> bool:
        """Whether it is one of this package's, and not registered from outside."""
        return self.package.startswith("hf_hybrid_ssm.")

    def load(self, name: str) -> Any:
        """The class of that name."""
        return getattr(importlib.import_module(self.package), name)

    @property
    def names(self) -> tuple[str, ...]:
        """The configuration class and the models."""
        return (self.config, *self.heads.values())

    @property
    def module_of(self) -> dict[str, str]:
        """Public name → the module that defines it, of a family of this package."""
        usual = (f"configuration_{self.model_type}", f"modeling_{self.model_type}")
        configuration, modeling = (f"{self.package}.{name}" for name in self.modules or usual)
        base = modeling if self.modules else f"{self.package}.modeling_{self.folder}"
        return {self.config: configuration, self.base: base} | dict.fromkeys(self.heads.values(), modeling)

    def main_class(self, config: Any) -> str:
        """The name of the class that a configuration is for: the one it was saved with if that is of this family, else
        a classifier, an encoder-decoder or a language model."""
        saved: str = next(iter(config.architectures or ()), "")
        if saved in self.heads.values():
            return saved
        if self.is_classifier(config):
            return self.heads["MODEL_FOR_SEQUENCE_CLASSIFICATION"]
        return self.heads.get("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM") or self.heads["MODEL_FOR_CAUSAL_LM"]


def usual_heads(prefix: str, **others: str) -> dict[str, str]:
    """`Family.heads` of a decoder-only family: base model, language model, classifiers; in transformers' names."""
    classifiers = ("SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING", "MULTIPLE_CHOICE")
    heads = {"MODEL": f"{prefix}Model", "MODEL_FOR_CAUSAL_LM": f"{prefix}ForCausalLM"}
    heads |= {f"MODEL_FOR_{task}": f"{prefix}For{task.title().replace('_', '')}" for task in classifiers}
    return heads | others
