"""Whether models that are compared are of one size."""

from collections.abc import Mapping

from transformers import AutoModelForCausalLM, PreTrainedConfig

from hf_hybrid_ssm.hub.configurations import without_memory

LARGEST_RATIO = 1.5


def size_of(config: PreTrainedConfig) -> int:
    """The parameters of its language model beside the embeddings and the head; no memory is taken for them."""
    model = without_memory(lambda: AutoModelForCausalLM.from_config(config))
    tables = [table for table in (model.get_input_embeddings(), model.get_output_embeddings()) if table is not None]
    left_out = {id(weight) for table in tables for weight in table.parameters()}
    return sum(weight.numel() for weight in model.parameters() if id(weight) not in left_out)


def difference_in_size(sizes: Mapping[str, int]) -> str | None:
    """One line about models of which the largest has over 1.5 times the parameters of the smallest; None if none has.

    Args:
        sizes: name → parameters.
    """
    small, large = min(sizes, key=lambda name: sizes[name]), max(sizes, key=lambda name: sizes[name])
    if sizes[large] <= LARGEST_RATIO * sizes[small]:
        return None
    return (
        f"not a comparison of models of one size: {large} has {sizes[large]:,} parameters beside the vocabulary's "
        f"tables, {sizes[large] / sizes[small]:.1f} times those of {small} ({sizes[small]:,})."
    )
