"""Which stack a checkpoint holds, where one configuration has a causal model and an encoder."""

import copy
import sys
from typing import Any, ClassVar

from transformers import PreTrainedConfig, PreTrainedModel

ENCODER_HEADS = (
    "EncoderModel",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
)


class BaseOfCheckpoint(PreTrainedModel):
    """The base model that `AutoModel` builds for a configuration: the encoder instead of this class where
    `config.architectures` names an encoder, or a head over one.

    `AutoModel` always passes the configuration. Loaded by its own name without one, the class is kept.
    """

    encoder_architectures: ClassVar[tuple[str, ...]]  # the encoder first, which is in the module of the class

    @classmethod
    def _class_for(cls, config: PreTrainedConfig | None) -> type[PreTrainedModel]:
        architectures = set(getattr(config, "architectures", None) or ())
        if getattr(config, "causal_classifier", None) or architectures.isdisjoint(cls.encoder_architectures):
            return cls
        encoder = getattr(sys.modules[cls.__module__], cls.encoder_architectures[0])
        if cls._auto_class is not None:  # a folder's own code, which is saved with the model again
            encoder.register_for_auto_class(cls._auto_class)
        return encoder

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args: Any, **kwargs: Any):
        chosen = cls._class_for(kwargs.get("config"))
        load = super().from_pretrained if chosen is cls else chosen.from_pretrained
        return load(pretrained_model_name_or_path, *args, **kwargs)

    @classmethod
    def _from_config(cls, config: PreTrainedConfig, **kwargs: Any):
        chosen = cls._class_for(config)
        build = super()._from_config if chosen is cls else chosen._from_config
        return build(config, **kwargs)


class StackOfCheckpoint(PreTrainedModel):
    """A classifier over the stack that its checkpoint holds: loaded from a causal language model it is causal.
    `causal_classifier=False` asks for an encoder all the same, whose layers are then newly initialised.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args: Any, **kwargs: Any):
        config = kwargs.get("config")
        if config is None:
            options = {name: value for name, value in kwargs.items() if name != "state_dict"}
            saved = cls.config_class.get_config_dict(pretrained_model_name_or_path, **options)[0]
            if saved.get("causal_classifier") is None and _is_causal(saved.get("architectures")):
                kwargs.setdefault("causal_classifier", True)
        elif getattr(config, "causal_classifier", False) is None and _is_causal(config.architectures):
            kwargs["config"] = copy.deepcopy(config)
            kwargs["config"].causal_classifier = True
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    def _refuse_to_be_new(self, source: Any, info: dict[str, Any]) -> None:
        """As for any model, except where an encoder was asked for, of whatever checkpoint."""
        if getattr(self.config, "causal_classifier", None) is not False:
            super()._refuse_to_be_new(source, info)


def _is_causal(architectures: list[str] | None) -> bool:
    return not {"SpadeForCausalLM", "SpadeModel"}.isdisjoint(architectures or ())
