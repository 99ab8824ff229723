"""A student is its teacher with windows: every way to read a text gives what the teacher with masks does."""

import copy
import json
import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

from hf_hybrid_ssm.students.modeling import HybridStudentForCausalLM
from hf_hybrid_ssm.students.teacher import attention_layers
from hf_hybrid_ssm.upcycle import Keep, Teacher, upcycle
from tests.models import invariances as inv
from tests.students.teachers import REFUSED, SIZES, TEACHERS, full_layers, masked, student, teacher, tokens, tolerance

LENGTH = 24
EVERY = pytest.mark.parametrize("name", TEACHERS)
# windows alone, and beside them attention to all tokens with one kind of sink or the other
PAIRS = [(name, kind) for i, name in enumerate(TEACHERS) for kind in ("windows", ("constant", "first_token")[i % 2])]
CASES = pytest.mark.parametrize("name, kind", PAIRS)


def cases(option, *values):
    """Each pair with one of the values: both values for each teacher."""
    return pytest.mark.parametrize(
        f"name, kind, {option}", [(*pair, values[(i + i // 2) % 2]) for i, pair in enumerate(PAIRS)]
    )


def least(name: str) -> float:
    """What a deviation is allowed to be of the largest logit, all of which are below ten."""
    return tolerance(name)["atol"] / 10


@EVERY
def test_windows_equal_a_masked_teacher(name):
    ids, (first, *_, last) = tokens(2, LENGTH), full_layers(name)
    wanted = masked(name, ids)
    assert (wanted - teacher(name)(ids).logits).abs().max() > 1e-2
    torch.testing.assert_close(student(name, "windows")(ids).logits, wanted, **tolerance(name))
    wanted = masked(name, ids, [(first, 1)], [last])
    torch.testing.assert_close(student(name, "mixed")(ids).logits, wanted, **tolerance(name))


@EVERY
def test_all_kept_equals_the_teacher(name):
    ids = tokens(2, LENGTH)
    torch.testing.assert_close(student(name, "kept")(ids).logits, teacher(name)(ids).logits, **tolerance(name))


@EVERY
def test_a_teacher_that_was_saved_is_one_still(name, tmp_path):
    """transformers leaves the dtype of its configuration a string, which Apertus does not read."""
    model, ids = copy.deepcopy(teacher(name)), tokens(2, LENGTH)
    model.save_pretrained(tmp_path)
    kept, report = upcycle(Teacher(model), Keep(1.0))
    assert not report.dropped and not report.new and report.sink is None
    torch.testing.assert_close(kept(ids).logits, teacher(name)(ids).logits, **tolerance(name))


@CASES
def test_pieces_and_tokens_equal_the_whole(name, kind):
    assert inv.check_split(student(name, kind), tokens(2, LENGTH), [7, *range(16, LENGTH)]) <= least(name)


@cases("side", "left", "right")
def test_padding_is_not_read(name, kind, side):
    """In a prompt, and by what follows it."""
    model, rows = student(name, kind), [tokens(1, LENGTH - 9), tokens(1, LENGTH, seed=3)]
    if side == "right" and name == "lfm2":  # transformers' own convolutions keep padding that ends a piece
        assert inv.check_padded(model, rows, side) <= least(name)
    else:
        more = [tokens(1, 3, seed=1), tokens(1, 3, seed=2)]
        assert inv.check_padded_continuation(model, rows, more, side) <= least(name)
        assert inv.check_padded(model, rows, side) <= least(name)


@CASES
def test_a_cache_goes_back(name, kind):
    assert inv.check_rollback(student(name, kind), tokens(2, LENGTH), [12], 9) <= least(name)


@cases("told_by", "seq_idx", "position_ids")
def test_packed_rows_equal_each_alone(name, kind, told_by):
    """At once and in pieces, one of which begins within a document and one with the next."""
    model, ids = student(name, kind), tokens(1, LENGTH)
    documents = torch.tensor([[0] * 10 + [1] * 14])
    positions = torch.cat([torch.arange(10), torch.arange(14)])[None]
    told = {"seq_idx": documents} if told_by == "seq_idx" else {"position_ids": positions}
    if name == "lfm2":
        with pytest.raises(ValueError, match="packed rows"):
            model(ids, **told)
        return
    wanted = torch.cat([model(ids[:, :10]).logits, model(ids[:, 10:]).logits], 1)
    torch.testing.assert_close(model(ids, **told).logits, wanted, **tolerance(name))
    cache, logits = DynamicCache(config=model.config), []
    for begin, end in ((0, 7), (7, 15), (15, LENGTH)):
        piece = {key: value[:, begin:end] for key, value in told.items()}
        logits.append(model(ids[:, begin:end], cache=cache, **piece).logits)
    torch.testing.assert_close(torch.cat(logits, 1), wanted, **tolerance(name))


@pytest.mark.parametrize("kept", [{}, {"cache_implementation": "static"}], ids=["growing", "static"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_layers_that_are_kept_write_under_autocast(name, kept):
    """Angles make queries and keys float32 there, and values are bfloat16."""
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **kept}
    with torch.autocast("cpu", torch.bfloat16):
        assert student(name, "constant").generate(tokens(2, 12), **options).shape == (2, 16)


@CASES
def test_generation_in_all_modes(name, kind):
    """Without a cache, with one, by beams, in a static cache, with prompt lookup, and in a padded batch."""
    model, ids = student(name, kind), tokens(2, 12)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = model.generate(ids, use_cache=False, **options)
    assert wanted.unique().numel() > 5
    assert torch.equal(model.generate(ids, **options), wanted)
    beams = model.generate(ids, num_beams=3, use_cache=False, **options)
    assert torch.equal(model.generate(ids, num_beams=3, **options), beams)
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), wanted)
    alone = ids[:1].repeat(1, 2)
    looked_up = model.generate(alone, prompt_lookup_num_tokens=3, **options)
    assert torch.equal(looked_up, model.generate(alone, **options))
    padded = torch.cat([torch.zeros(2, 4, dtype=torch.int64), ids], 1)
    mask = (torch.arange(16) >= torch.tensor([[4], [4]])).long()
    assert torch.equal(model.generate(padded, attention_mask=mask, **options)[:, 4:], wanted)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "lfm2"])
@pytest.mark.parametrize("kind", ["windows", "mixed", "kept"])
def test_a_full_static_cache_refuses_more_where_a_group_sees_all_tokens(name, kind):
    model, ids = student(name, kind), tokens(1, LENGTH)
    cache = StaticCache(config=model.config, max_cache_len=10)
    model(ids[:, :8], cache=cache)
    if kind == "windows":
        last = model(ids[:, 8:], cache=cache).logits[:, -1]
        torch.testing.assert_close(last, model(ids).logits[:, -1], **tolerance(name))
    else:
        with pytest.raises(IndexError, match="room for 10 tokens"):
            model(ids[:, 8:], cache=cache)


@EVERY
def test_folders_have_the_teachers_names_and_load_by_the_auto_classes(name, tmp_path):
    model, ids = student(name, "constant"), tokens(1, 12)
    model.save_pretrained(tmp_path / "student")
    teacher(name).save_pretrained(tmp_path / "teacher")
    saved, own = (set(_names(tmp_path / folder)) for folder in ("student", "teacher"))
    own = {name.replace("embed_out.", "lm_head.") for name in own}  # as GPT-NeoX calls it now, and its folders do not
    assert own <= saved and all(
        re.search(r"\.(self_attn|attention)\.sink\.(key|value)$", name) for name in saved - own
    )
    assert bool(saved - own) == (name != "gpt_oss")  # which has sinks of its own
    config = json.loads((tmp_path / "student" / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "hybrid_student" and config["teacher_type"] == name
    chosen = teacher(name).config._attn_implementation
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "student", attn_implementation=chosen)
    assert type(loaded) is type(model) and isinstance(loaded, (HybridStudentForCausalLM, type(teacher(name))))
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def _names(folder):
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return list(file.keys())


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("by_layer", [False, True])
def test_positions_that_follow_from_the_length_are_refused(kind, by_layer):
    """Keys in a window's cache keep the frequencies that they were turned by."""
    rule = {"rope_type": kind, "rope_theta": 100.0, "factor": 2.0}
    config = AutoConfig.for_model("gemma3_text" if by_layer else "llama", **SIZES)
    config.rope_parameters = (
        {"full_attention": rule, "sliding_attention": {"rope_type": "default"}} if by_layer else rule
    )
    with pytest.raises(ValueError, match=f"rope_type='{kind}' turns keys by the length of the text"):
        attention_layers(config)


@pytest.mark.parametrize("name, reason", REFUSED.items())
def test_what_cannot_be_a_teacher_is_refused_by_name(name, reason):
    config = AutoConfig.for_model(name, **({} if name == "gemma3" else SIZES))
    with pytest.raises(
        ValueError, match=f"(?s)^model_type='{name}' cannot be a teacher: .*{reason}.*Take another"
    ) as error:
        attention_layers(config)
    assert "\n" not in str(error.value)
