"""The scan and the language model against the official code's own reference."""

import pytest
import torch

from hf_hybrid_ssm.hub.official.longhorn import convert
from tests.golden.values import FLOAT32, assert_near, golden
from tests.row_options import longhorn_scan

BACKENDS = [None, "torch", "reference"]
NAMES = {"u": "x", "dt": "beta_logit", "k": "k", "q": "q", "t_bias": "beta_bias", "D": "D", "z": "z"}


def arguments(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Time last in the official layout, before the channels in ours."""
    return {
        ours: tensors[theirs].transpose(1, 2).contiguous() if tensors[theirs].dim() == 3 else tensors[theirs]
        for theirs, ours in NAMES.items()
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "options"),
    {"y_bare": (), "y_bias": ("beta_bias",), "y_skip": ("D",), "y_gate": ("z",), "y": ("beta_bias", "D", "z")}.items(),
)
def test_scan(name, options, backend):
    tensors = golden("longhorn_scan")
    given = arguments(tensors)
    taken = {key: value for key, value in given.items() if key in ("x", "beta_logit", "k", "q", *options)}
    y, state = longhorn_scan(**taken, return_final_state=True, backend=backend)
    assert_near(y.transpose(1, 2), tensors[name])
    if "beta_bias" in options and len(options) == 3:
        assert_near(state, tensors["last_state"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients(backend):
    tensors = golden("longhorn_scan")
    leaves = {name: value.requires_grad_() for name, value in arguments(tensors).items()}
    y, _ = longhorn_scan(**leaves, backend=backend)
    gradients = torch.autograd.grad((y.transpose(1, 2) * tensors["weight"]).sum(), list(leaves.values()))
    for (theirs, ours), gradient in zip(NAMES.items(), gradients):
        wanted = tensors[f"grad_{theirs}"]
        assert_near(gradient.transpose(1, 2) if ours not in ("beta_bias", "D") else gradient, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_float32(backend):
    tensors = golden("longhorn_scan")
    given = {name: tensors[f"f32_{name}"] for name in NAMES}
    y, _ = longhorn_scan(**arguments(given), backend=backend)
    assert_near(y.transpose(1, 2), tensors["f32_y"], FLOAT32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16(backend):
    """Both compute in float32 and round the output to bfloat16: at most one unit in its last place apart."""
    tensors = golden("longhorn_scan")
    given = {name: tensors[f"bf16_{name}"] for name in NAMES}
    y, _ = longhorn_scan(**arguments(given), backend=backend)
    wanted = tensors["bf16_y"]
    assert y.dtype == wanted.dtype == torch.bfloat16
    apart = (y.transpose(1, 2).float() - wanted.float()).abs()
    assert (apart <= 2**-7 * wanted.float().abs() + 1e-6).all()
    assert (apart == 0).float().mean() > 0.98


def test_language_model(tmp_path):
    """A checkpoint with the official model's own keys, through the converter, in float64."""
    tensors = golden("longhorn_model")
    torch.save({"model": golden("longhorn_model", "model")}, tmp_path / "checkpoint.pt")
    model = convert(tmp_path / "checkpoint.pt", eos_token_id=0, bos_token_id=0).eval().double()
    with torch.no_grad():
        logits = model(tensors["input_ids"]).logits
        pieces, cache = [], None
        for piece in tensors["input_ids"].split([7, 1, 1, 10], dim=1):
            out = model(piece, past_key_values=cache, use_cache=True)
            pieces.append(out.logits)
            cache = out.past_key_values
    assert_near(logits, tensors["logits"])
    assert_near(torch.cat(pieces, 1), tensors["logits"])
