"""What stands beside a window or in the place of attention, in every use; tests/students/test_equations.py has what it
computes."""

import pytest
import torch
from transformers import DynamicCache

from hf_hybrid_ssm.students.initial import student_of
from tests.students.teachers import WINDOW, teacher, tokens

LENGTH = 24
CONTEXT = {"sh": {}, "mh": {"context_variant": "mh"}, "mf": {"context_variant": "mf", "num_context_states": 3}}


def opened(model, seed=3):
    """Closed maps and all else that is new get random values: the memory is heard."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".memory." in name:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.1 * noise.to(parameter))
    return model


@pytest.fixture(scope="module", params=["beside", "instead", "sh", "mf"])
def model(request):
    own, kind = teacher("qwen3"), request.param
    if kind in CONTEXT:
        return opened(student_of(own, keep=[1], window=WINDOW, memory="context", ssm_state_size=4, **CONTEXT[kind]))
    return opened(student_of(own, keep=[1, (2, 0)], window=WINDOW, memory="longhorn", instead=kind == "instead"))


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_every_way_to_read_a_text_gives_the_same(model):
    ids, mask = tokens(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.int64)
    with torch.no_grad():
        wanted, logits = model(ids).logits, []
        output = model(ids[:, :7], use_cache=True)
        logits.append(output.logits)
        for begin, end in ((7, 16), *((i, i + 1) for i in range(16, LENGTH))):
            logits.append(model(ids[:, begin:end], cache=output.cache).logits)
        close(torch.cat(logits, 1), wanted)
        mask[0, :9] = 0
        close(model(ids, attention_mask=mask).logits[:1, 9:], model(ids[:1, 9:]).logits)
        documents = torch.tensor([[0] * 10 + [1] * 14])
        alone = torch.cat([model(ids[:1, :10]).logits, model(ids[:1, 10:]).logits], 1)
        close(model(ids[:1], seq_idx=documents).logits, alone)
        cache = DynamicCache(config=model.config)
        model.config.fit_cache(cache)
        cache.activate_past_recording()
        model(ids[:, :12], cache=cache)
        model(torch.cat([ids[:, 12:15], tokens(2, 8, seed=2)], 1), cache=cache)
        cache.crop(-8)
        close(model(ids[:, 15:], cache=cache).logits, wanted[:, 15:])


def test_generation_saving_and_training(model, tmp_path):
    ids, options = tokens(2, 12), {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = model.generate(ids, use_cache=False, **options)
    assert torch.equal(model.generate(ids, **options), wanted)
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), wanted)
    beams = model.generate(ids, num_beams=3, use_cache=False, **options)
    assert torch.equal(model.generate(ids, num_beams=3, **options), beams)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    loaded.train().gradient_checkpointing_enable()
    loaded(ids, labels=ids).loss.backward()
    silent = [name for name, each in loaded.named_parameters() if each.grad is None or not each.grad.abs().sum()]
    assert not silent


def test_until_it_is_trained_a_memory_beside_a_window_is_closed():
    own, ids = teacher("qwen3"), tokens(2, LENGTH)
    alone = student_of(own, window=WINDOW)(ids).logits
    for kind in ("longhorn", "context"):
        torch.testing.assert_close(student_of(own, window=WINDOW, memory=kind)(ids).logits, alone, rtol=0, atol=1e-12)


def test_in_training_rows_may_lose_their_windows():
    model = opened(student_of(teacher("qwen3"), window=WINDOW, memory="longhorn", window_dropout=0.999999))
    ids = tokens(2, LENGTH)
    lost = model.train()(ids).logits
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    torch.testing.assert_close(model.eval()(ids).logits, lost, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "name, plan, message",
    [
        ("phi3", {"memory": "longhorn"}, "stands beside attention of k_proj, o_proj, q_proj, v_proj"),
        ("olmo2", {"memory": "context"}, "perhaps with norms of each head"),
        ("llama", {"memory": "lstm"}, "memory='lstm' must be one of 'longhorn', 'context'"),
        ("llama", {"memory": "context", "instead": True}, "memory='context' beside attention='none'"),
        ("llama", {"memory": "longhorn", "window_dropout": 1.0}, "window_dropout=1.0 must lie in"),
        ("llama", {"memory": "longhorn", "state_size": -1}, "state_size=-1 must be positive"),
    ],
)
def test_memory_where_there_is_no_place_is_refused(name, plan, message):
    with pytest.raises(ValueError, match=message):
        student_of(teacher(name), window=WINDOW, **plan)
