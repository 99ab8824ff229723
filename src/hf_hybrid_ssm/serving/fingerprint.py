"""What a context depends on: the weights of the model that read it, and the fields of its configuration."""

import dataclasses
import json
from typing import Any

from transformers import PreTrainedConfig

from hf_hybrid_ssm.hub.fingerprint import fingerprint_of

# they change neither a state nor what follows from it
WITHOUT_EFFECT = ("dropout", "_token_id", "use_cache", "use_linear_cross_entropy", "initializer_range")


def weights_fingerprint(model: Any) -> str:
    """`fingerprint_of` everything that the decoder saves; its head takes no part.

    Raises:
        ValueError: weights are on the meta device (offloaded, or never loaded).
    """
    return fingerprint_of(model.get_decoder().state_dict())


def architecture(config: Any) -> dict[str, Any]:
    """The fields of a family's configuration that a state depends on, as JSON gives them back."""
    usual = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    own = (field.name for field in dataclasses.fields(config) if field.name not in usual)
    values = {name: getattr(config, name, None) for name in own if not any(part in name for part in WITHOUT_EFFECT)}
    return json.loads(json.dumps(values))
