"""SPADE's encoder-decoder against the released one (`msrlongt5` of namisan/mt-dnn), through the converter."""

import json

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from hf_hybrid_ssm.cli import main
from hf_hybrid_ssm.hub.official.spade import convert
from tests.golden.values import assert_near, golden

SAVED = {  # of the config.json that the official class saves, what shapes do not tell
    "model_type": "msrlongt5",
    "bos_token_id": 0,
    "decoder_roberta_lm_head": False,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.3,
    "eos_token_id": 2,
    "feed_forward_proj": "relu",
    "have_bias": False,
    "layer_norm_epsilon": 1e-06,
    "local_radius": 3,
    "normalize_before": False,
    "pad_token_id": 1,
    "relative_attention_max_distance": 6,
    "s4_dt_max": 0.2,
    "s4_dt_min": 0.002,
    "s4_use_residual_dropout": False,
}
BIASES = {"feed_forward_proj": "gelu", "have_bias": True, "local_radius": 1, "normalize_before": True}
BIASES |= {"tie_word_embeddings": False}
CASES = {"post": SAVED, "biases": SAVED | BIASES}


def saved_by_the_official_class(name, folder, leave_out=(), **more):
    """The file of a case with the config.json that belongs to it."""
    folder.mkdir(exist_ok=True)
    tensors = {key: tensor for key, tensor in golden("spade_seq2seq", f"{name}.model").items() if key not in leave_out}
    torch.save(tensors | more, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(CASES[name]))
    return folder / "pytorch_model.bin"


@pytest.mark.parametrize("name", CASES)
def test_encoder_decoder(name, tmp_path):
    """A source with padding: encoder, logits at once and token by token; every key of the official state dict."""
    values, wanted = golden("spade_seq2seq"), golden("spade_seq2seq", name)
    main(["convert", "spade", str(saved_by_the_official_class(name, tmp_path / "in")), str(tmp_path / "out")])
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").eval().double()
    source = {"attention_mask": values["mask"]}
    pieces, cache = [], None
    with torch.no_grad():
        encoded = model.get_encoder()(values["ids"], **source)
        logits = model(values["ids"], decoder_input_ids=values["target"], **source).logits
        for token in values["target"].split(1, dim=1):
            out = model(encoder_outputs=encoded, decoder_input_ids=token, cache=cache, use_cache=True, **source)
            pieces.append(out.logits)
            cache = out.cache
    real = values["mask"].bool()
    assert_near(encoded[0][real], wanted["encoder"][real])
    assert_near(logits, wanted["logits"])
    assert_near(torch.cat(pieces, 1), wanted["logits"])
    config, saved = model.config, CASES[name]
    assert (config.ssm_layers, config.ssm_state_size, config.ssm_trainable) == ([0], 8, "none")
    assert (config.ssm_dt_min, config.ssm_dt_max, config.max_target_positions) == (0.002, 0.2, 16)
    assert config.tie_word_embeddings == saved.get("tie_word_embeddings", True)
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id, config.decoder_start_token_id) == (
        1,
        0,
        2,
        0,
    )
    assert {getattr(config, f"{part}dropout") for part in ("", "attention_", "activation_", "embedding_")} == {0.3}


def test_without_a_configuration(tmp_path):
    """The official class's defaults; a copy of the embedding may be left out."""
    path = saved_by_the_official_class("post", tmp_path, leave_out=["lm_head.weight", "encoder.embed_tokens.weight"])
    path.with_name("config.json").unlink()
    config = convert(path, sliding_window=4).config
    assert (config.sliding_window, config.relative_attention_max_distance, config.tie_word_embeddings) == (
        4,
        128,
        True,
    )
    assert (config.hidden_act, config.norm_position, config.pad_token_id) == ("relu", "post", 1)
    assert convert(path).config.sliding_window == 129


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decoder_roberta_lm_head": True}, r"decoder_roberta_lm_head \(RoBERTa's head"),
        ({"s4_use_residual_dropout": True}, r"s4_use_residual_dropout \(a residual around S4"),
        ({"model_type": "longt5"}, "model_type='longt5'; 'msrlongt5' was expected"),
        ({"tie_word_embeddings": False}, r"lacks lm_head\.weight"),
    ],
)
def test_settings_that_are_not_converted_are_refused(settings, message, tmp_path):
    path = saved_by_the_official_class("post", tmp_path, leave_out=["lm_head.weight"])
    path.with_name("config.json").write_text(json.dumps(SAVED | settings))
    with pytest.raises(ValueError, match=message):
        convert(path)


@pytest.mark.parametrize(
    ("leave_out", "more", "message"),
    [
        ([], {"encoder.block.0.layer.1.DenseReluDense.wi_0.weight": torch.zeros(12, 8)}, "wi_0"),
        ([], {"lm_head.dense.weight": torch.zeros(8, 8)}, r"lm_head\.dense\.weight.*a head that is one map"),
        ([], {"encoder.embed_tokens.weight": torch.zeros(24, 8)}, "share one embedding"),
        (["encoder.block.1.layer.0.layer_norm.bias"], {}, r"lacks model\.encoder\.layers\.1\.mixing_norm\.bias"),
        (["decoder.pos_embed.weight"], {}, r"lacks model\.decoder\.positions\.weight"),
        (["encoder.block.0.layer.0.s4.s4.D"], {}, "only a part of its S4"),
        ([], {"decoder.block.0.layer.0.SelfAttention.q.weight": torch.zeros(12, 8)}, r"q_proj\.weight has shape"),
    ],
)
def test_tensors_that_are_not_converted_are_refused(leave_out, more, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        convert(saved_by_the_official_class("post", tmp_path, leave_out, **more))
