"""Which base model a checkpoint holds, where one configuration has a causal model and an encoder."""

import sys
from typing import Any, ClassVar

from transformers import PreTrainedConfig, PreTrainedModel

ENCODER_HEADS = ("EncoderModel", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
ENCODER_HEADS += ("ForQuestionAnswering",)


class BaseOfCheckpoint(PreTrainedModel):
    """The class that `AutoModel` knows for a configuration, and that gives way to the encoder where the checkpoint is
    one of an encoder or of a head over it, as `config.architectures` says.

    `AutoModel` always hands over the configuration. Loaded by its own name without one, the class is itself.
    """

    encoder_architectures: ClassVar[tuple[str, ...]]  # the encoder first, which is in the module of the class

    @classmethod
    def _class_for(cls, config: PreTrainedConfig | None) -> type[PreTrainedModel]:
        if set(getattr(config, "architectures", None) or ()).isdisjoint(cls.encoder_architectures):
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
