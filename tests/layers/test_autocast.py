"""Under bfloat16 autocast recurrences and filters keep float32; only what surrounds them is narrow."""

import pytest
import torch

from hf_hybrid_ssm.layers.mixers.registry import MIXERS, build_mixer
from tests.row_options import mix, one_token
from tests.tiny_models import CASES, VOCABULARY, built

LENGTH = 100  # longer than a block, and no multiple of it
ROWS: dict[str, dict] = {
    "plain": {},
    "packed": {"seq_idx": torch.arange(LENGTH).expand(2, -1) // 30},
    "ragged": {"seq_idx": torch.arange(LENGTH).expand(2, -1) // 30, "lengths": torch.tensor([0, LENGTH])},
}


@pytest.mark.parametrize("trainable", ["all", "none"])
@pytest.mark.parametrize("name", sorted(set(MIXERS) - {"hyena"}))  # it has projections of its own
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixers(name, trainable, rows, dtype):
    torch.manual_seed(0)
    mixer = build_mixer(name, 8, trainable=trainable)
    u = torch.randn(2, LENGTH, 8)
    token, rows = torch.randn(2, 8), ROWS[rows]
    expected, expected_state = mix(mixer, u, return_final_state=True, **rows)
    whole, _ = mix(mixer, u, **rows)
    following, _ = one_token(mixer, token, expected_state)
    mixer.clear_kernel_cache()
    with torch.autocast("cpu", dtype=dtype):
        found, state = mix(mixer, u, return_final_state=True, **rows)
        again, _ = mix(mixer, u, **rows)
        stepped, _ = one_token(mixer, token, state)
    for value, exact in ((found, expected), (again, whole), (state, expected_state), (stepped, following)):
        torch.testing.assert_close(value, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_models_train(case):
    """Forward and backward give finite numbers, near those of float32."""
    model = built(case).eval()  # no dropout
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(2, dtype=torch.int64) if "classifier" in case else ids
    exact = model(input_ids=ids, labels=labels).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    torch.testing.assert_close(loss, exact, rtol=2e-2, atol=0)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients and all(gradient.isfinite().all() for gradient in gradients)
