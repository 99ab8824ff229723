"""The table of families, and their registration with transformers' Auto classes.

transformers finds its own families by name and imports a family's code when it is first asked for. Ours enter the same
tables in the same form, so that `import hf_hybrid_ssm` imports neither torch nor any modeling file, and so that the
places which read the tables of class names (label smoothing in `Trainer`, lm-eval) know our classes.
"""

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Family:
    """One model family.

    Args:
        model_type: the name in `config.json`.
        config: name of the configuration class.
        heads: name of transformers' table (without the suffix `_MAPPING`) → name of our class.
        folder: below `hf_hybrid_ssm.models`, where it is not the model type.
    """

    model_type: str
    config: str
    heads: dict[str, str]
    folder: str | None = None

    @property
    def package(self) -> str:
        return f"hf_hybrid_ssm.models.{self.folder or self.model_type}"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.config, *self.heads.values())))


FAMILIES = (
    Family(
        "longhorn",
        "LonghornConfig",
        {
            "MODEL": "LonghornModel",
            "MODEL_FOR_CAUSAL_LM": "LonghornForCausalLM",
            "MODEL_FOR_SEQUENCE_CLASSIFICATION": "LonghornForSequenceClassification",
            "MODEL_FOR_TOKEN_CLASSIFICATION": "LonghornForTokenClassification",
            "MODEL_FOR_QUESTION_ANSWERING": "LonghornForQuestionAnswering",
        },
    ),
    Family(
        "bst",
        "BstConfig",
        {
            "MODEL": "BstModel",
            "MODEL_FOR_CAUSAL_LM": "BstForCausalLM",
            "MODEL_FOR_SEQUENCE_CLASSIFICATION": "BstForSequenceClassification",
            "MODEL_FOR_TOKEN_CLASSIFICATION": "BstForTokenClassification",
            "MODEL_FOR_QUESTION_ANSWERING": "BstForQuestionAnswering",
        },
    ),
    Family(
        "lmu_isa",
        "LmuIsaConfig",
        {
            "MODEL": "LmuIsaModel",
            "MODEL_FOR_CAUSAL_LM": "LmuIsaForCausalLM",
            "MODEL_FOR_SEQUENCE_CLASSIFICATION": "LmuIsaForSequenceClassification",
            "MODEL_FOR_TOKEN_CLASSIFICATION": "LmuIsaForTokenClassification",
            "MODEL_FOR_QUESTION_ANSWERING": "LmuIsaForQuestionAnswering",
        },
    ),
    Family(
        "spade",
        "SpadeConfig",
        {
            "MODEL": "SpadeModel",
            "MODEL_FOR_CAUSAL_LM": "SpadeForCausalLM",
            "MODEL_FOR_SEQUENCE_CLASSIFICATION": "SpadeForSequenceClassification",
            "MODEL_FOR_TOKEN_CLASSIFICATION": "SpadeForTokenClassification",
            "MODEL_FOR_QUESTION_ANSWERING": "SpadeForQuestionAnswering",
            "MODEL_FOR_TEXT_ENCODING": "SpadeEncoderModel",
        },
    ),
    Family(
        "spade_seq2seq",
        "SpadeSeq2SeqConfig",
        {
            "MODEL": "SpadeSeq2SeqModel",
            "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM": "SpadeForConditionalGeneration",
            "MODEL_FOR_SEQUENCE_CLASSIFICATION": "SpadeSeq2SeqForSequenceClassification",
            "MODEL_FOR_TOKEN_CLASSIFICATION": "SpadeSeq2SeqForTokenClassification",
            "MODEL_FOR_QUESTION_ANSWERING": "SpadeSeq2SeqForQuestionAnswering",
            "MODEL_FOR_TEXT_ENCODING": "SpadeSeq2SeqEncoderModel",
        },
        folder="spade",
    ),
)


def owner_of(family: Family) -> str | None:
    """The configuration class of transformers' own that has the family's model type; None where the name is ours."""
    configuration_auto = importlib.import_module("transformers.models.auto.configuration_auto")
    registered = configuration_auto.CONFIG_MAPPING._modules.get(family.model_type)
    is_ours = getattr(registered, "__name__", None) == family.package
    return None if is_ours else configuration_auto.CONFIG_MAPPING_NAMES.get(family.model_type)


def _free_families() -> Iterator[Family]:
    for family in FAMILIES:
        owner = owner_of(family)
        if owner is None:
            yield family
        else:
            logger.warning(
                "transformers has a model type %r of its own (%s); it is kept, and the classes of %s are only "
                "reachable by importing them.",
                family.model_type,
                owner,
                family.package,
            )


def _register_configs(configuration_auto: ModuleType) -> None:
    for family in _free_families():
        configuration_auto.CONFIG_MAPPING._modules[family.model_type] = importlib.import_module(family.package)
        configuration_auto.CONFIG_MAPPING_NAMES[family.model_type] = family.config


def _register_models(modeling_auto: ModuleType) -> None:
    for family in _free_families():
        for table, class_name in family.heads.items():
            mapping = getattr(modeling_auto, f"{table}_MAPPING")
            mapping._modules[family.model_type] = importlib.import_module(family.package)
            mapping._reverse_config_mapping[family.config] = family.model_type
            getattr(modeling_auto, f"{table}_MAPPING_NAMES")[family.model_type] = class_name


def _register_cache_layers(_: ModuleType) -> None:
    """A cache may be made from a configuration alone, before any model is imported."""
    importlib.import_module("hf_hybrid_ssm.models.cache")


def _register_peft_targets(constants: ModuleType) -> None:
    importlib.import_module("hf_hybrid_ssm.peft_targets").register(constants)


_REGISTRATIONS: dict[str, Callable[[ModuleType], None]] = {
    "peft.utils.constants": _register_peft_targets,
    "transformers.cache_utils": _register_cache_layers,
    "transformers.models.auto.configuration_auto": _register_configs,
    "transformers.models.auto.modeling_auto": _register_models,
}


class _RegisteringLoader(Loader):
    """Runs the module's own loader, then our registration."""

    def __init__(self, loader: Loader):
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        _REGISTRATIONS[module.__name__](module)


class _RegisteringFinder(MetaPathFinder):
    """Waits for the tables of Auto classes and of PEFT to be imported; does nothing else, finds nothing itself."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname not in _REGISTRATIONS:
            return None
        sys.meta_path.remove(self)  # or the search below would end here again
        try:
            spec = find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


def register() -> None:
    """Make every family known to `AutoConfig`, `AutoModel` and the heads; called when the package is imported.

    Calling it again changes nothing. A model type that transformers itself owns is never taken over.
    """
    for name, registration in _REGISTRATIONS.items():
        if name in sys.modules:
            registration(sys.modules[name])
    if not any(isinstance(finder, _RegisteringFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegisteringFinder())
