"""Token embeddings of a trained model, such as GPT-2 or T5, as initialisation of a new one with the same tokenizer."""

import os
from collections.abc import Collection

import torch
from transformers import AutoModel, PreTrainedModel

from hf_hybrid_ssm.layers.plain_tensors import check_whole


def copy_embeddings(model: PreTrainedModel, source: PreTrainedModel | str | os.PathLike) -> int:
    """Set `model`'s token embeddings (and the output weights tied to them) to those of `source`, bit for bit.

    Rows that only `model` has (a vocabulary that was padded, say) keep their initial values.

    Args:
        source: a model, or a folder or Hub name that `AutoModel` loads.

    Returns:
        How many rows were set.

    Raises:
        ValueError: widths differ, `source` has more rows, its checkpoint has no embeddings, `model` has no single
            table (an adaptive vocabulary), or DeepSpeed has partitioned one of them.
    """
    made_up: Collection[str] = ()
    if not isinstance(source, PreTrainedModel):
        place = source
        source, report = AutoModel.from_pretrained(place, output_loading_info=True)
        made_up = report["missing_keys"]
    check_whole(model, "model")
    check_whole(source, "source")
    target, donor = model.get_input_embeddings(), source.get_input_embeddings()
    for name, table in (("model", target), ("source", donor)):
        if not isinstance(getattr(table, "weight", None), torch.Tensor):
            raise ValueError(f"{name} ({type(table).__name__}) has no single table of token embeddings.")
    if lost := [name for name, value in source.named_parameters() if value is donor.weight and name in made_up]:
        raise ValueError(f"source={str(place)!r} lacks {lost[0]}, its token embeddings, which would be random.")
    count, width = donor.weight.shape
    if width != target.weight.shape[1] or count > target.weight.shape[0]:
        raise ValueError(
            f"source has {count} rows of width {width}; model needs hidden_size={width} and vocab_size >= {count}, "
            f"but has {target.weight.shape[0]} of width {target.weight.shape[1]}."
        )
    with torch.no_grad():
        target.weight[:count] = donor.weight.to(target.weight)
    return count
