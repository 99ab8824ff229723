"""Operations that a layer dispatches, decoding a token and in a training step: no change may raise them unseen.

A layer's count is the difference of two depths, so that embeddings and heads are no part of it. A kernel of this
package counts once. `python -m tests.models.operation_counts` writes the table of today.
"""

import pytest

from hf_hybrid_ssm.ops.core.native_library import missing_compiler
from tests.models.operation_counts import decoding_count

needs_compiler = pytest.mark.skipif(missing_compiler() is not None, reason="the counts are those of the C kernels")

# the most operations of a decoded token, by layer
DECODE = {
    "longhorn": 9,
    "longhorn, sliding attention": 27,
    "bst, sliding attention": 16,
    "bst SH, S4D": 24,
    "bst SH, S5": 32,
    "bst MH, S4": 24,
    "bst MF, S4D": 28,
    "bst MF, unstructured": 30,
    "block-recurrent": 50,
    "spade, window": 14,
    "spade, chunk": 14,
    "spade, full": 14,
    "spade, S4 and window": 19,
    "spade, S5 and window": 26,
    "spade, Hyena and window": 26,
    "spade, EMA and window": 19,
    "lmu-isa": 17,
    "lmu-isa, window attention": 34,
}
# without kernels, which is what a device without kernels for single tokens launches
DECODE_IN_TORCH = {
    "longhorn": 28,
    "bst, sliding attention": 40,
    "bst SH, S4D": 70,
    "bst MH, S4": 70,
    "bst MF, S4D": 70,
    "block-recurrent": 90,
    "spade, window": 40,
    "spade, S4 and window": 45,
}


@needs_compiler
@pytest.mark.parametrize("layer", DECODE)
def test_decoding(layer):
    assert decoding_count(layer) <= DECODE[layer]


@pytest.mark.parametrize("layer", DECODE_IN_TORCH)
def test_decoding_in_torch(layer):
    assert decoding_count(layer, "torch") <= DECODE_IN_TORCH[layer]
