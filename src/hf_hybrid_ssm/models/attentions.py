"""`output_attentions`, where no weights can be given."""

from transformers import PreTrainedConfig


def refuse_attentions(config: PreTrainedConfig, asked: bool | None, reason: str) -> None:
    """Refuse to answer `output_attentions=True` with nothing.

    Args:
        asked: the argument of the forward; `None` leaves it to `config.output_attentions`.
        reason: why there are no weights.

    Raises:
        ValueError: the weights were asked for.
    """
    if config.output_attentions if asked is None else asked:
        raise ValueError(f"output_attentions=True cannot be answered by a {config.model_type!r} model: {reason}.")


IN_BLOCKS = "attention is computed in blocks, which never form a matrix of weights"
