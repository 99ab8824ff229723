"""A tokenizer for libraries that will not train without one, though the rows are token ids already."""

from transformers import PreTrainedTokenizerFast

from tests.invariants.variants import TOKENS


def words_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Words "0", "1", ...; padding, begin and end as in `TOKENS`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({str(word): word for word in range(vocabulary)}, unk_token="3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {name.removesuffix("_id"): str(TOKENS[name]) for name in TOKENS if name.endswith("_token_id")}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
