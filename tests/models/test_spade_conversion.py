"""The converter of official SPADE language models, and of S4's parameters, against plain evaluations."""

import argparse
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_hybrid_ssm import SpadeConfig, SpadeForCausalLM
from hf_hybrid_ssm.cli import main
from hf_hybrid_ssm.hub.official import spade as converter
from hf_hybrid_ssm.hub.official.s4 import convert_s4
from tests.memory import in_own_memory

D, N, S = 8, 6, 4


def official_s4(seed: int, filters: int = 1) -> dict[str, torch.Tensor]:
    """An S4 kernel with C itself (L = 0), its parameters away from HiPPO's."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    return {
        "C": draw(filters, D, N // 2, 2),
        "log_dt": draw(D) * 0.5 - 2,
        "B": draw(1, S, N // 2, 2),
        "P": draw(1, S, N // 2, 2) * 0.5,
        "inv_w_real": draw(S, N // 2) * 0.2 - 0.7,
        "w_imag": draw(S, N // 2) * 3,
        "L": torch.tensor(0),
    }


@pytest.mark.parametrize("name", ["C", "log_dt", "B", "P", "inv_w_real", "w_imag", "L"])
def test_incomplete_kernels_are_refused(name):
    kernel = official_s4(0)
    with pytest.raises(ValueError, match=f"lacks {name}"):
        convert_s4({key: value for key, value in kernel.items() if key != name}, torch.zeros(1, D))
    with pytest.raises(ValueError, match=f"{name} of the S4 kernel has shape"):
        convert_s4(kernel | {name: torch.zeros(5, 5, 5)}, torch.zeros(1, D))


def test_wrong_skip_is_refused():
    with pytest.raises(ValueError, match="D of S4 has shape"):
        convert_s4(official_s4(0), torch.zeros(D))


CONFIG = {
    "vocab_size": 60,
    "adaptive_cutoffs": [20, 40],
    "adaptive_factor": 2,
    "hidden_size": D,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "sliding_window": 4,
    "ssm_state_size": N,
    "ssm_num_dynamics": S,
    "scale_embedding": True,
    "final_norm": False,
}


def in_official_layout(model) -> dict[str, torch.Tensor]:
    """The tensors of one of our models under the official names, with tied copies and buffers."""
    names = {ours: official for official, ours in converter.LAYER_KEYS.items()}
    # what fairseq's TransformerDecoder, AdaptiveInput, AdaptiveSoftmax and TiedHeadModule register beside parameters
    found = {
        "decoder.version": torch.tensor([3.0]),
        "decoder.embed_tokens._float_tensor": torch.empty(1),
        "decoder.adaptive_softmax.version": torch.tensor([1]),
        "decoder.adaptive_softmax.head._float_tensor": torch.empty(1),
    }
    kernel = {}
    for name, tensor in model.state_dict().items():
        if name.startswith("model.embed_tokens."):
            kind, band = name.removeprefix("model.embed_tokens.").split("_")
            place = ("table", "projection").index(kind)
            found[f"decoder.embed_tokens.embeddings.{band}.{place}.weight"] = tensor
            if band != "0":
                found[f"decoder.adaptive_softmax.tail.{int(band) - 1}.{2 - 2 * place}.weight"] = tensor
            elif place == 0:
                found["decoder.adaptive_softmax.head.word_proj.weight"] = tensor
        elif name == "lm_head.clusters":
            found["decoder.adaptive_softmax.head.class_proj.weight"] = tensor
        elif name == "model.relative_bias.weight":
            found["decoder.layers.0.self_attn.relative_attention_bias.weight"] = tensor
        elif ".ssm." in name:
            kernel[name.rsplit(".", 1)[1]] = tensor
        else:
            layer, rest = name.removeprefix("model.layers.").split(".", 1)
            found[f"decoder.layers.{layer}.{names[rest]}"] = tensor
    prefix = "decoder.layers.0.s4_module.s4."
    found[f"{prefix}D"] = kernel["D"]
    official = {"inv_w_real": kernel["A_log_real"], "w_imag": kernel["A_imag"], "C": kernel["C"], "L": torch.tensor(0)}
    official |= {"B": kernel["B"][None], "P": kernel["P"][None], "log_dt": kernel["log_dt"][0]}
    return found | {f"{prefix}kernel.kernel.{name}": tensor for name, tensor in official.items()}


SAVED = {  # of fairseq's settings, which it saves by these names
    "local_radius": 3,
    "activation_fn": "gelu",
    "dropout": 0.25,
    "attention_dropout": 0.05,
    "activation_dropout": 0.15,
    "adaptive_softmax_dropout": 0.1,
    "relative_attention_max_distance": 64,
    "no_scale_embedding": False,
    "s4_weight": 0.5,
}
FIELDS = {  # ours for them
    "hidden_act": "gelu",
    "dropout": 0.25,
    "embedding_dropout": 0.25,
    "attention_dropout": 0.05,
    "activation_dropout": 0.15,
    "adaptive_dropout": 0.1,
    "relative_attention_max_distance": 64,
}


@pytest.mark.parametrize("form", ["cfg", "args", "bare", "safetensors"])
def test_round_trip(form, tmp_path):
    torch.manual_seed(0)
    with_settings = form in ("cfg", "args")
    original = SpadeForCausalLM(SpadeConfig(**CONFIG | (FIELDS if with_settings else {}))).eval()
    tensors = in_official_layout(original)
    source = tmp_path / ("model.safetensors" if form == "safetensors" else "checkpoint_best.pt")
    if form == "safetensors":
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, source)
    elif form == "bare":
        torch.save(tensors, source)
    elif form == "cfg":
        torch.save({"args": None, "cfg": {"model": SAVED, "bpe": None}, "model": tensors}, source)
    else:  # before fairseq 0.10
        torch.save({"args": argparse.Namespace(arch="spade_lm_wiki103", **SAVED), "model": tensors}, source)
    options = [] if with_settings else ["--set", "sliding_window=4"]
    main(["convert", "spade", str(source), str(tmp_path / "out"), *options])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.arange(2, 26).view(2, 12)
    assert torch.equal(in_own_memory(model)(ids).logits, original(ids).logits)
    tokens = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    for field, value in (CONFIG | tokens | (FIELDS if with_settings else {})).items():
        assert getattr(model.config, field) == value
    assert model.generation_config.eos_token_id == 2


GOLDEN = Path(__file__).parents[1] / "golden"


def test_checkpoint_that_fairseq_wrote(tmp_path):
    """Log-probabilities of fairseq's own model, from the file that its trainer saved after a step.

    Made with fairseq 3d262bb2 and SPADE's code 0819294 (its Cauchy fallback completed by the conjugates) by the
    published run_lm.sh and these sizes: --s4-state-dim 6 --s4-n-ssm 4 --local-radius 3 --decoder-embed-dim 8
    --decoder-ffn-embed-dim 16 --decoder-layers 2 --decoder-attention-heads 2 --adaptive-{input,softmax}-cutoff 20,40
    --adaptive-{input,softmax}-factor 2 --tokens-per-sample 12 --no-save-optimizer-state, a dictionary of 60 symbols.
    """
    main(["convert", "spade", str(GOLDEN / "fairseq_spade_lm.pt"), str(tmp_path / "out")])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert model.config.sliding_window == 4
    assert model.config.ssm_num_dynamics == 4
    golden = load_file(GOLDEN / "fairseq_spade_lm.safetensors")
    logits = model(golden["ids"]).logits
    torch.testing.assert_close(logits, golden["log_probabilities"], rtol=1e-5, atol=1e-5)


def test_checkpoint_without_adaptive_vocabulary(tmp_path):
    """fairseq's other architectures have one embedding and a norm after the last layer."""
    torch.manual_seed(0)
    sizes = CONFIG | {"adaptive_cutoffs": None, "final_norm": True, "ssm_layers": []}
    original = SpadeForCausalLM(SpadeConfig(**sizes)).eval()
    tensors = {}
    names = {"model.embed_tokens.weight": "embed_tokens.weight", "lm_head.weight": "output_projection.weight"}
    names |= {"model.norm.weight": "layer_norm.weight", "model.norm.bias": "layer_norm.bias"}
    names["model.relative_bias.weight"] = "layers.0.self_attn.relative_attention_bias.weight"
    layers = {ours: official for official, ours in converter.LAYER_KEYS.items()}
    for name, tensor in original.state_dict().items():
        layer = name.removeprefix("model.layers.").split(".", 1)
        official = names[name] if name in names else f"layers.{layer[0]}.{layers[layer[1]]}"
        tensors[f"decoder.{official}"] = tensor
    torch.save({"model": tensors}, tmp_path / "checkpoint_best.pt")
    model = converter.convert(tmp_path / "checkpoint_best.pt", sliding_window=4).eval()
    ids = torch.arange(2, 26).view(2, 12)
    assert torch.equal(in_own_memory(model)(ids).logits, original(ids).logits)
    assert model.config.final_norm
    assert model.config.tie_word_embeddings


def test_special_tokens_can_be_given(tmp_path):
    source = str(GOLDEN / "fairseq_spade_lm.pt")
    main(["convert", "spade", source, str(tmp_path / "out"), "--eos-token-id", "5", "--pad-token-id", "0"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.config.bos_token_id, model.config.pad_token_id, model.config.eos_token_id) == (0, 0, 5)
    with pytest.raises(ValueError, match=r"eos_token_id=60 must lie in the checkpoint's vocabulary of 60 tokens"):
        converter.convert(source, eos_token_id=60)


@pytest.fixture(scope="module")
def original():
    torch.manual_seed(0)
    return SpadeForCausalLM(SpadeConfig(**CONFIG)).eval()


def test_bad_checkpoints_are_refused(original, tmp_path):
    tensors = in_official_layout(original)
    convert = converter.convert_state_dict
    with pytest.raises(ValueError, match=r"Unknown tensors.*decoder\.other"):
        convert(tensors | {"decoder.other": torch.zeros(1)})
    with pytest.raises(ValueError, match="embed_positions"):  # sinusoidal positions, which the model does not have
        convert(tensors | {"decoder.embed_positions._float_tensor": torch.zeros(1)})
    with pytest.raises(ValueError, match="differs from the embedding it is tied to"):
        convert(tensors | {"decoder.adaptive_softmax.head.word_proj.weight": torch.zeros(20, D)})
    with pytest.raises(ValueError, match="only a part of its S4"):
        convert({name: tensor for name, tensor in tensors.items() if not name.endswith("s4.D")})
    with pytest.raises(ValueError, match=r"lacks model\.relative_bias"):
        converter.infer_config(convert({n: t for n, t in tensors.items() if "relative" not in n}))
    cut = {name: tensor for name, tensor in tensors.items() if name != "decoder.layers.1.fc2.bias"}
    save_file({name: tensor.clone() for name, tensor in cut.items()}, tmp_path / "cut.safetensors")
    with pytest.raises(ValueError, match=r"lacks model\.layers\.1\.feed_forward\.fc2\.bias"):
        converter.convert(tmp_path / "cut.safetensors")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert main(["convert", "spade", str(tmp_path / "cut.safetensors"), str(tmp_path / "full")]) == 1
