"""The converter against a step-by-step evaluation of the official model on the official tensors."""

import math
import sys

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from hf_hybrid_ssm.cli import main
from hf_hybrid_ssm.hub.official.longhorn import convert
from hf_hybrid_ssm.hub.official.state_dict import read_checkpoint
from tests import processes

V, M, D, N, K, R, LAYERS = 24, 16, 32, 4, 4, 2, 2


def official_state_dict(prefix: str = "transformer.") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator) * 0.5

    tensors = {"backbone.embedding.weight": draw(V, M), "backbone.norm_f.weight": 1 + draw(M)}
    for i in range(LAYERS):
        layer = {
            "norm.weight": 1 + draw(M),
            "mixer.in_proj.weight": draw(2 * D, M),
            "mixer.conv1d.weight": draw(D, 1, K),
            "mixer.conv1d.bias": draw(D),
            "mixer.x_proj.weight": draw(R + 2 * N, D),
            "mixer.dt_head.weight": draw(D, R),
            "mixer.dt_head.bias": draw(D),
            "mixer.D": draw(D),
            "mixer.out_proj.weight": draw(M, D),
        }
        tensors |= {f"backbone.layers.{i}.{name}": tensor for name, tensor in layer.items()}
    tensors["lm_head.weight"] = tensors["backbone.embedding.weight"]
    return {prefix + name: tensor for name, tensor in tensors.items()}


def rms_norm(x, weight):
    return x / torch.sqrt((x * x).mean() + 1e-5) * weight


def official_logits(weights: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    """One token after the other, one layer after the other, in float64, straight from the official equations."""
    w = {name.removeprefix("transformer."): tensor.double() for name, tensor in weights.items()}
    windows = [torch.zeros(D, K, dtype=torch.float64) for _ in range(LAYERS)]
    states = [torch.zeros(D, N, dtype=torch.float64) for _ in range(LAYERS)]
    rows = []
    for token in ids:
        residual = w["backbone.embedding.weight"][token]
        for i in range(LAYERS):
            p = f"backbone.layers.{i}."
            x, z = (w[p + "mixer.in_proj.weight"] @ rms_norm(residual, w[p + "norm.weight"])).split(D)
            windows[i] = torch.cat([windows[i][:, 1:], x[:, None]], 1)
            x = F.silu((windows[i] * w[p + "mixer.conv1d.weight"][:, 0]).sum(1) + w[p + "mixer.conv1d.bias"])
            d, k, q = (w[p + "mixer.x_proj.weight"] @ x).split([R, N, N])
            beta = torch.sigmoid(w[p + "mixer.dt_head.weight"] @ d + w[p + "mixer.dt_head.bias"])
            step = beta / (1 + beta * (k @ k))
            states[i] = (1 - torch.outer(step, k * k)) * states[i] + torch.outer(step * x, k)
            y = states[i] @ q + w[p + "mixer.D"] * x
            residual = residual + w[p + "mixer.out_proj.weight"] @ (y * F.silu(z))
        rows.append(w["lm_head.weight"] @ rms_norm(residual, w["backbone.norm_f.weight"]))
    return torch.stack(rows)


def test_converted_logits_equal_the_official_mathematics(tmp_path):
    weights = official_state_dict()
    torch.save({"model": weights, "iter_num": 5}, tmp_path / "ckpt.pt")
    command = [sys.executable, "-m", "hf_hybrid_ssm", "convert", "longhorn"]
    command += [str(tmp_path / "ckpt.pt"), str(tmp_path / "out")]
    processes.run(command, check=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").double().eval()
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 23, 0, 8]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    scale = official_logits(weights, ids).abs().max()
    assert (logits - official_logits(weights, ids)).abs().max() / scale < 1e-6  # the file is float32
    assert model.config.num_hidden_layers == LAYERS
    assert model.config.time_step_rank == R
    assert model.config.tie_word_embeddings
    assert (tmp_path / "out" / "model.safetensors").exists()
    again = processes.run(command)
    assert again.returncode != 0
    assert "not empty" in again.stderr


@pytest.mark.parametrize("prefix", ["", "_orig_mod.transformer.", "module.transformer."])
def test_wrapper_prefixes_are_removed(prefix, tmp_path):
    torch.save(official_state_dict(prefix), tmp_path / "ckpt.pt")
    assert "backbone.norm_f.weight" in read_checkpoint(tmp_path / "ckpt.pt")[0]
    convert(tmp_path / "ckpt.pt")


def save_and_convert(tmp_path, change):
    weights = official_state_dict()
    change(weights)
    torch.save(weights, tmp_path / "ckpt.pt")
    return convert(tmp_path / "ckpt.pt")


def test_untied_head(tmp_path):
    head = {"transformer.lm_head.weight": torch.ones(V, M)}
    model = save_and_convert(tmp_path, lambda weights: weights.update(head))
    assert not model.config.tie_word_embeddings
    assert (model.lm_head.weight == 1).all()


def gpt2_vocabulary(weights):
    for key in ("transformer.backbone.embedding.weight", "transformer.lm_head.weight"):
        weights[key] = torch.zeros(50304, M)


def test_special_tokens_follow_the_vocabulary(tmp_path):
    config = save_and_convert(tmp_path, gpt2_vocabulary).config
    assert (config.bos_token_id, config.eos_token_id) == (50256, 50256)
    config = save_and_convert(tmp_path, lambda weights: None).config  # of 24 tokens: none is known
    assert (config.bos_token_id, config.pad_token_id, config.eos_token_id) == (None, None, None)
    options = ["--bos-token-id", "1", "--eos-token-id", "2"]
    main(["convert", "longhorn", str(tmp_path / "ckpt.pt"), str(tmp_path / "out"), *options])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.config.bos_token_id, model.generation_config.eos_token_id) == (1, 2)
    with pytest.raises(ValueError, match="eos_token_id=50256 must lie in the checkpoint's vocabulary of 24"):
        convert(tmp_path / "ckpt.pt", eos_token_id=50256)


LAYER = "transformer.backbone.layers.1.mixer."
EMBEDDING = "transformer.backbone.embedding.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.update({LAYER + "surprise": torch.zeros(1)}), "surprise"),
        (lambda w: w.pop(LAYER + "dt_head.bias"), "lacks model.layers.1.mixer.dt_bias"),
        (lambda w: w.pop("transformer.backbone.layers.0.mixer.x_proj.weight"), "lacks"),
        (lambda w: w.pop(EMBEDDING), "lacks model.embed_tokens.weight"),
        (lambda w: w.update({EMBEDDING: torch.zeros(24)}), r"has shape \(24,\), but 2 dimensions"),
        (
            lambda w: w.update({"backbone.layers.99999999.mixer.D": torch.zeros(D)}),
            "lacks layers between 0 and 99999999",
        ),
        (lambda w: w.update({LAYER + "A_log": torch.zeros(D, N)}), "Mamba"),
        (lambda w: w.update({LAYER + "out_proj.weight": torch.zeros(M, D - 1)}), "shape"),
    ],
)
def test_refusals(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        save_and_convert(tmp_path, change)


def test_unreadable_files(tmp_path):
    torch.save(official_state_dict(), tmp_path / "ckpt.pt")
    whole = (tmp_path / "ckpt.pt").read_bytes()
    for content, name in (
        (whole[: len(whole) // 2], "cut.pt"),
        (b"", "cut.pt"),
        (b"text", "a.pt"),
        (b"text", "a.safetensors"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read"):
            convert(tmp_path / name)
    torch.save({"model": {"a": math.pi}}, tmp_path / "foreign.pt")
    with pytest.raises(ValueError, match="no state dict"):
        convert(tmp_path / "foreign.pt")
