"""Teachers on disk: a folder with its tokenizer, and the same Llama as a GGUF file, written by the package `gguf`."""

import json
from pathlib import Path

import torch
from _lib.documents import train_tokenizer
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants

from tests.upcycle.test_upcycle import teacher_of

TEXT = "one two three four five six seven eight nine ten"
TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
LAYERS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
Q4_1, F32 = GGMLQuantizationType.Q4_1, GGMLQuantizationType.F32


def tokenizer_of_tests():
    """290 tokens, with a chat template."""
    tokenizer = train_tokenizer([TEXT], 290)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def teacher_and_tokenizer(name: str = "llama", **fields):
    """A random teacher with as many tokens as the tokenizer has."""
    tokenizer = tokenizer_of_tests()
    end = tokenizer.eos_token_id
    tokens = {"vocab_size": len(tokenizer), "bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    return teacher_of(name, **tokens | fields), tokenizer


def save_teacher(folder: Path, name: str = "llama", **fields) -> Path:
    """The folder of a teacher with its tokenizer."""
    teacher, tokenizer = teacher_and_tokenizer(name, **fields)
    teacher.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_gguf(path: Path, architecture: str = "llama", quantized: bool = False, **more) -> Path:
    """The same Llama as `save_teacher` writes; `quantized`: its matrices in blocks of four bits.

    Args:
        more: metadata (strings) that the file has besides.
    """
    teacher, tokenizer = teacher_and_tokenizer()
    config = teacher.config
    writer = GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, tokenizer)
    for key, value in more.items():
        writer.add_string(key.replace("__", "."), value)
    for name, value in teacher.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        kind = Q4_1 if quantized and value.dim() == 2 and value.shape[1] % 32 == 0 else F32
        data = quants.quantize(_as_in_gguf(name, value, config).numpy(), kind)
        writer.add_tensor(_gguf_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: GGUFWriter, tokenizer) -> None:
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    special = set(tokenizer.all_special_tokens)
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in vocabulary["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)


def _gguf_name(name: str) -> str:
    name, _, kind = name.rpartition(".")
    if name in OTHERS:
        return f"{OTHERS[name]}.{kind}"
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{LAYERS[part]}.{kind}"


def _as_in_gguf(name: str, value: torch.Tensor, config) -> torch.Tensor:
    """Llama's GGUF rotates neighbours, where transformers rotates halves: rows of queries and keys change places."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, count in heads.items():
        if name.endswith(f"{part}.weight"):
            rows = value.unflatten(0, (count, 2, -1))
            return rows.transpose(1, 2).reshape(value.shape).contiguous()
    return value.contiguous()
