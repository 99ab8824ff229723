"""A GGUF file is the model that it was written from: each of its keys and tensors is in it, or is refused by name."""

import re
import struct

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM

from hf_hybrid_ssm.hub.gguf_config import MODEL_TYPES, OPTIONAL_BIASES, config_fields
from hf_hybrid_ssm.hub.gguf_header import read_header
from hf_hybrid_ssm.hub.gguf_weights import _unpacked
from hf_hybrid_ssm.upcycle.loading import open_teacher
from tests.gguf_files import ARCHITECTURES, MODELS, model_of, tensors_of, write_model


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Name → a file of it."""
    folder = tmp_path_factory.mktemp("gguf")
    return {name: write_model(folder / f"{name}.gguf", model_of(name)) for name in MODELS}


def logits(model):
    ids = torch.arange(60).view(2, 30)
    with torch.inference_mode():
        return model(ids).logits


@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_the_model_that_it_was_written_from(name, files):
    wanted, found = model_of(name), open_teacher(files[name]).load_model()
    assert type(found) is type(wanted) and not found.training and found.dtype == torch.float32
    tolerance = 1e-6 if name == "gemma3" else 0  # (1 + w) - 1
    torch.testing.assert_close(found.state_dict(), wanted.state_dict(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(logits(found), logits(wanted), rtol=1e-5, atol=1e-5)
    fields, expected = found.config.to_dict(), wanted.config.to_dict()
    others = {
        "_name_or_path",
        "architectures",
        "dtype",
        "transformers_version",
        "head_dim",
    }  # a Llama computes head_dim
    assert {name: fields[name] for name in expected.keys() - others} == {
        name: expected[name] for name in expected.keys() - others
    }
    assert found.generation_config.eos_token_id == 5 and found.generation_config.bos_token_id == 3


def test_every_architecture_and_option_is_a_model_here():
    assert {ARCHITECTURES[config.model_type] for config, _, _ in MODELS.values()} == set(MODEL_TYPES)
    for architecture, fields in OPTIONAL_BIASES.items():
        if architecture == "llama":
            assert set(fields) <= {field for _, _, own in MODELS.values() for field in own}


@pytest.mark.parametrize("name", MODELS)
def test_the_head_is_that_of_the_package_gguf(name, files):
    reader, header = GGUFReader(files[name]), read_header(files[name])
    said = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert header.fields == said
    for tensor in reader.tensors:
        own = header.tensors[tensor.name]
        assert own.shape == tuple(reversed(tensor.shape.tolist())) and own.kind == tensor.tensor_type
        assert own.offset == tensor.data_offset and header.bytes_of(tensor.name) == tensor.n_bytes


@pytest.mark.parametrize("kind", gguf.GGMLQuantizationType, ids=lambda kind: kind.name)
def test_blocks_are_unpacked_as_the_package_gguf_does_or_refused(kind, tmp_path):
    writer, values = gguf.GGUFWriter(tmp_path / "a.gguf", "llama"), torch.randn(4, 256).numpy()
    try:
        blocks = gguf.quants.quantize(values, kind)
    except NotImplementedError:  # any bytes are blocks; small ones have finite scales
        size = gguf.quants.quant_shape_to_byte_shape(values.shape, kind)
        blocks = torch.randint(0, 60, size, dtype=torch.uint8).numpy()
    for key, value in {"block_count": 2, "context_length": 128}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_tensor("a", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(tmp_path / "a.gguf")
    header.check_complete()
    data = np.memmap(header.path, mode="r", dtype=np.uint8)
    try:
        wanted = gguf.quants.dequantize(blocks, kind)
    except NotImplementedError:
        with pytest.raises(ValueError, match=f"a is of the type {kind.name}, which is not unpacked"):
            _unpacked(header, data, "a")
        return
    found = _unpacked(header, data, "a")
    assert found.dtype == np.float32 and np.isfinite(found).all() and (found == wanted).all() and found.any()


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2"])
def test_transformers_reads_the_same_of_what_it_reads(name, files):
    theirs = AutoModelForCausalLM.from_pretrained(files[name].parent, gguf_file=files[name].name, dtype=torch.float32)
    found = open_teacher(files[name]).load_model()
    torch.testing.assert_close(found.state_dict(), theirs.state_dict(), rtol=0, atol=0)


def test_positions_scaled_without_a_type_are_scaled_linearly(tmp_path):
    """As llama.cpp has it: by `rope.scaling.factor`, or by the older `rope.scale_linear`; a type "none" is none."""
    wanted, plain = logits(model_of("llama, linear positions")), logits(model_of("llama"))
    assert (wanted - plain).abs().max() > 0.1
    model = model_of("llama, linear positions")
    without = {"llama.rope.scaling.type": None, "llama.rope.scaling.factor": None}
    for said, same in (
        ({"llama.rope.scaling.factor": 4.0}, True),
        ({"llama.rope.scale_linear": 4.0}, True),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scale_linear": 4.0}, True),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, False),
        ({"llama.rope.scaling.factor": 1.0}, False),
        ({}, False),
    ):
        path = write_model(tmp_path / "a.gguf", model, keys=without | said)
        found = open_teacher(path).load_model()
        assert (found.config.rope_parameters["rope_type"] == "linear") == same
        assert torch.allclose(logits(found), wanted, atol=1e-5) == same


def test_biases_that_no_layer_has_are_zero(tmp_path):
    """Some files have biases of queries, keys and values, and none of the output."""
    model = model_of("llama with biases")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.bias.zero_()
    names = [f"blk.{layer}.attn_output.bias" for layer in range(2)]
    path = write_model(tmp_path / "a.gguf", model, tensors=dict.fromkeys(names))
    torch.testing.assert_close(logits(open_teacher(path).load_model()), logits(model), rtol=1e-5, atol=1e-5)
    path = write_model(tmp_path / "b.gguf", model, tensors={names[1]: None})
    with pytest.raises(ValueError, match=r"lacks blk\.1\.attn_output\.bias"):
        open_teacher(path).load_model()


ROWS = torch.zeros(97, 32)
KEYS = {
    "llama.expert_count": (8, r"llama\.expert_count=8 is not read"),
    "llama.attention.sliding_window": (16, r"llama\.attention\.sliding_window=16 is not read"),
    "llama.attention.scale": (0.5, r"llama\.attention\.scale=0\.5 is not read"),
    "llama.logit_scale": (2.0, r"llama\.logit_scale=2\.0 is not read"),
    "llama.embedding_scale": (2.0, r"llama\.embedding_scale=2\.0 is not read"),
    "llama.of_tomorrow": ([1, 2], r"llama\.of_tomorrow=2 values is not read"),
    "llama.rope.scaling.type": ("yarn", r"scales its rotary positions \(llama\.rope\.scaling\.type='yarn'\)"),
    "llama.rope.dimension_count": (4, r"llama\.rope\.dimension_count=4, and heads of 8"),
    "llama.attention.value_length": (16, r"llama\.attention\.value_length=16, and heads of 8"),
    "llama.attention.head_count_kv": ([2, 1], r"head_count_kv=\[2, 1\], and one whole number"),
    "llama.embedding_length": (0, r"embedding_length=0, and one whole number of at least 1"),
    "llama.feed_forward_length": ("many", r"feed_forward_length='many', and one whole number"),
    "llama.attention.head_count": (None, r"head_count=None, and one whole number"),
    "llama.attention.causal": (False, r"attention\.causal=False"),
    "llama.attention.layer_norm_rms_epsilon": (None, r"layer_norm_rms_epsilon=None, and a number"),
    "llama.block_count": (5000, r"num_hidden_layers=5000 is beyond 1,024"),
    "general.type": ("imatrix", r"says general\.type='imatrix', and a model is wanted"),
    "tokenizer.ggml.tokens": (["a", "b"], r"has 2 tokens and 97 embeddings"),
    "tokenizer.ggml.eos_token_id": (97, r"tokenizer\.ggml\.eos_token_id=97 lies beyond its 97 tokens"),
}
"""A key, its value, and what is said of it."""
TENSORS = {
    "blk.1.attn_q.weight": (None, r"lacks blk\.1\.attn_q\.weight: it is not a whole model"),
    "output_norm.weight": (None, r"lacks output_norm\.weight"),
    "token_embd.weight": (None, r"lacks token_embd\.weight"),
    "blk.0.ffn_norm.bias": (torch.zeros(32), r"holds blk\.0\.ffn_norm\.bias, for which a llama"),
    "blk.0.attn_q_norm.weight": (torch.zeros(8), r"holds blk\.0\.attn_q_norm\.weight, for which a llama"),
    "rope_factors_long.weight": (torch.ones(4), r"holds rope_factors_long\.weight, for which a llama"),
    "rope_freqs.weight": (torch.tensor([1.0, 1.0, 2.0, 3.0]), r"\(rope_freqs\.weight\) in another way than Llama 3"),
    "blk.1.ffn_up.weight": (torch.full((48, 32), torch.nan), r"blk\.1\.ffn_up\.weight holds NaN or infinite"),
    "blk.0.ffn_up.weight": (torch.zeros(48, 16), r"holds blk\.0\.ffn_up\.weight as \(48, 16\), and \(48, 32\)"),
}


@pytest.mark.parametrize("key", KEYS)
def test_a_key_that_is_not_read_is_refused_by_name(key, tmp_path):
    value, message = KEYS[key]
    header = read_header(write_model(tmp_path / "a.gguf", model_of("llama"), keys={key: value}))
    with pytest.raises(ValueError, match=message) as error:
        config_fields(header)
    assert str(header.path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_that_is_not_read_is_refused_by_name(name, tmp_path):
    value, message = TENSORS[name]
    path = write_model(tmp_path / "a.gguf", model_of("llama"), tensors={name: value})
    with pytest.raises(ValueError, match=message) as error:
        open_teacher(path).load_model()
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", MODELS)
def test_no_tensor_of_any_file_is_made_up(name, tmp_path):
    """Of each kind one is left out."""
    model = model_of(name)
    kinds = {re.sub(r"\d+", "N", place): place for place in tensors_of(model)}
    optional = {"output.weight", "rope_freqs.weight"}  # without them a file says something else
    for place in set(kinds.values()) - optional:
        path = write_model(tmp_path / "a.gguf", model, tensors={place: None})
        with pytest.raises(ValueError, match=rf"lacks .*{re.escape(place)}"):
            open_teacher(path).load_model()


def test_a_part_of_a_model_is_refused_by_its_number(tmp_path):
    """Only the first part says what model it is."""
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama", split_max_tensors=1)
    for name in ("a", "b"):
        writer.add_tensor(name, ROWS.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for number in (1, 2):
        with pytest.raises(ValueError, match=f"is part {number} of 2 of a model: merge them into one file first"):
            open_teacher(tmp_path / f"a-0000{number}-of-00002.gguf")


def damaged(path, kind):
    data = bytearray(write_model(path, model_of("llama")).read_bytes())
    match kind:
        case "cut off in its head":
            data = data[:300]
        case "cut off in its tensors":
            data = data[:-300]
        case "another version":
            data[4:8] = struct.pack("<I", 1)
        case "big-endian":
            data[4:8] = struct.pack(">I", 3)
        case "more keys than there are":
            data[16:24] = struct.pack("<Q", 2**60)
        case "more tensors than there are":
            data[8:16] = struct.pack("<Q", 2**60)
        case "a string without an end":
            data[24:32] = struct.pack("<Q", 2**63)
        case "no text":
            data[32:40] = b"\xff" * 8
    path.write_bytes(data)


DAMAGES = {
    "cut off in its head": "is not a complete GGUF file",
    "cut off in its tensors": "is not a complete GGUF file: it ends before ",
    "another version": "is of version 1 of GGUF, and 2 and 3 are read",
    "big-endian": "is big-endian, and little-endian files are read",
    "more keys than there are": "is not a complete GGUF file",
    "more tensors than there are": "is not a complete GGUF file",
    "a string without an end": "is not a complete GGUF file",
    "no text": "is not a complete GGUF file",
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file_is_refused_in_one_line(kind, tmp_path):
    path = tmp_path / "a.gguf"
    damaged(path, kind)
    with pytest.raises(ValueError, match=DAMAGES[kind]) as error:
        open_teacher(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
