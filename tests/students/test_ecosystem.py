"""What is done with models besides reading and writing texts, with a student of every kind of layer."""

import copy
import pickle
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, Trainer, TrainingArguments

import hf_hybrid_ssm
from hf_hybrid_ssm.serving import PrefixCache, load_context, save_context
from tests import processes
from tests.reporting import ROOT
from tests.serving.students import EVERY_STUDENT, student_model
from tests.students.teachers import OF_EXPERTS, TEACHERS, student, tokens

KINDS = pytest.mark.parametrize("kind", ["constant", "first_token"])
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}


def close(found, wanted, atol=1e-12):
    torch.testing.assert_close(found, wanted, rtol=0, atol=atol)


@KINDS
def test_copies_and_pickles_are_the_same_model(kind):
    model, ids = student("qwen3", kind), tokens(2, 20)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model) and type(other.config) is type(model.config)
        assert torch.equal(other(ids).logits, model(ids).logits)


def test_auto_classes_know_students(tmp_path):
    model, ids = student("qwen3", "constant"), tokens(2, 20)
    model.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)
    assert type(AutoConfig.from_pretrained(tmp_path)) is type(model.config)
    named = hf_hybrid_ssm.HybridStudentForCausalLM.from_pretrained(tmp_path)
    assert type(named) is type(model) and torch.equal(named(ids).logits, model(ids).logits)
    assert type(hf_hybrid_ssm.HybridStudentForCausalLM(model.config)) is type(model)
    eager = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    close(eager(ids).logits, model(ids).logits, 1e-5)
    eager.set_attn_implementation("sdpa")
    assert torch.equal(eager(ids).logits, model(ids).logits)


@pytest.mark.parametrize("first", ["build", "load"])
def test_students_of_experts_are_the_first_of_their_kind_in_a_process(first, tmp_path):
    for name in OF_EXPERTS:
        student(name, "windows").save_pretrained(tmp_path / name)
    command = [sys.executable, "-m", "tests.students.fresh_process", first, tmp_path]
    result = processes.run(command, cwd=ROOT)
    assert result.stdout.split() == OF_EXPERTS, result.stderr[-3000:]


@pytest.mark.parametrize("name", TEACHERS)
def test_trainer_keeps_the_documents_of_packed_rows(name, tmp_path):
    """Its collator gives what the forward's signature shows."""
    model, ids = copy.deepcopy(student(name, "windows")), tokens(2, 20)
    documents = torch.tensor([[0] * 12 + [1] * 8, [0] * 5 + [1] * 15])
    rows = [{"input_ids": row, "labels": row, "seq_idx": of_row} for row, of_row in zip(ids, documents, strict=True)]
    settings = {"per_device_eval_batch_size": 2, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    trainer = Trainer(model, TrainingArguments(tmp_path, **settings), eval_dataset=rows)
    if "none" in model.config.plan.own_kinds:
        with pytest.raises(ValueError, match="layers of this teacher without attention would read across documents"):
            trainer.evaluate()
        return
    with torch.no_grad():
        wanted, across = (float(model(ids, labels=ids, seq_idx=given).loss) for given in (documents, None))
    assert abs(wanted - across) > 1e-4
    assert trainer.evaluate()["eval_loss"] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("name", EVERY_STUDENT)
@pytest.mark.parametrize("written", ["eager", "sdpa", None])
def test_an_attention_that_is_written_to_the_configuration_is_that_of_the_student(name, written):
    """As llmcompressor does for its calibration (0.14)."""
    model, ids = copy.deepcopy(student_model(name)), tokens(2, 20)
    wanted = model(ids).logits
    model.config._attn_implementation = written
    close(model(ids).logits, wanted, 1e-5)
    model.config._attn_implementation = written
    assert torch.equal(model.generate(ids, **GREEDY), student_model(name).generate(ids, **GREEDY))


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"atention_mask": None}, TypeError, "no argument 'atention_mask'. Did you mean 'attention_mask'?"),
        ({"output_attentions": True}, ValueError, "output_attentions=True cannot be answered"),
        ({"attention_mask": torch.ones(2, 5)}, ValueError, "attention_mask must have shape"),
    ],
)
def test_what_has_no_effect_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        student("qwen3", "constant")(tokens(2, 20), **options)


def test_a_cache_of_another_plan_or_batch_or_beside_checkpointing_is_refused():
    model, ids = student("qwen3", "constant"), tokens(2, 20)
    cache = model(ids, use_cache=True).cache
    with pytest.raises(ValueError, match="cache has layers"):
        student("qwen3", "windows")(ids, cache=cache)
    with pytest.raises(ValueError, match="batch of 2"):
        model(ids[:1], cache=cache)
    trained = copy.deepcopy(model).train()
    trained.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient checkpointing"):
        trained(ids, cache=cache)
    empty = DynamicCache(config=model.config)
    assert trained(ids, cache=empty).cache is None and empty.get_seq_length() == 0


@pytest.mark.filterwarnings("ignore:layers .* keep the keys")  # such a file grows with the text
@pytest.mark.parametrize("name", EVERY_STUDENT)
def test_contexts_in_files_and_prefixes_that_are_kept(name, tmp_path):
    """In this process and after a restart; of rows with padding, a context as well."""
    model, ids, more = student_model(name), tokens(1, 20), tokens(1, 4, seed=3)
    both, close_to = torch.cat([ids, more], 1), 1e-5
    rows, mask = torch.cat([ids, torch.zeros_like(ids)]), torch.ones(2, 20, dtype=torch.int64)
    rows[1, 7:], mask[1, :7] = ids[0, :13], 0
    with torch.no_grad():
        saved = model(rows, attention_mask=mask, use_cache=True).cache
        save_context(saved, tmp_path / "context", model, tokens=rows, attention_mask=mask)
        context = load_context(tmp_path / "context", model)
        assert torch.equal(context.tokens, rows) and torch.equal(context.attention_mask, mask)
        seen = torch.cat([mask, torch.ones(2, 4, dtype=torch.int64)], 1)
        found = model(more.expand(2, -1), cache=context.cache, attention_mask=seen).logits
        close(found[:1], model(both).logits[:, 20:], close_to)
        close(found[1:], model(torch.cat([ids[:, :13], more], 1)).logits[:, 13:], close_to)
    wanted = model.generate(both, **GREEDY)
    prefixes = PrefixCache(max_bytes=10**7, folder=tmp_path / "states")
    model.generate(ids, prefix_cache=prefixes, **GREEDY)
    for cache in (prefixes, PrefixCache(max_bytes=10**7, folder=tmp_path / "states")):
        read = cache.tokens_read
        assert torch.equal(model.generate(both, prefix_cache=cache, **GREEDY), wanted)
        assert cache.tokens_read - read < 20  # the prompt was read before


def test_a_context_of_another_plan_is_refused(tmp_path):
    one, other, ids = student("qwen3", "windows"), student("qwen3", "constant in all"), tokens(1, 9)
    save_context(one(ids, use_cache=True).cache, tmp_path / "context", one, tokens=ids)
    with pytest.raises(ValueError, match="student"):
        load_context(tmp_path / "context", other)


def test_attention_weights_where_all_layers_are_kept():
    model = copy.deepcopy(student("qwen3", "kept"))
    model.set_attn_implementation("eager")
    assert [weights.shape for weights in model(tokens(2, 9), output_attentions=True).attentions] == [(2, 4, 9, 9)] * 4
