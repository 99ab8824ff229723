"""Requests in pages: however a server schedules their tokens, each gets what it would get alone."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_hybrid_ssm.serving.paged_states import PagedModel, PageLayout, Requests
from hf_hybrid_ssm.serving.state_layout import FullAttention, StateSpec, state_layout
from hf_hybrid_ssm.students.initial import student_config
from tests.host_syncs import as_on_an_accelerator, host_syncs
from tests.models.invariances import TOLERANCE, random_ids, whole
from tests.serving.students import EVERY_STUDENT, FULL_STUDENTS, STUDENTS, UNEVEN_STUDENTS, student_model
from tests.serving.test_context import GROWING
from tests.students.teachers import SIZES, TEACHERS, student
from tests.tiny_models import OF_FAMILIES, config_of, language_model, own_language_model

FIXED = [variant for variant in OF_FAMILIES if variant not in GROWING] + ["longhorn + window attention", *STUDENTS]
MAX_TOKENS = 24
# with layers whose keys and values the server keeps
SERVED = ["longhorn + window and full attention", "longhorn + full attention", "lmu-isa + global attention"]
SERVED += ["spade hyena full without a bias", *FULL_STUDENTS]
KEYS = ("keys", "values", "seen")


class Server:
    """Keeps keys and values by page, and attends as the equation says."""

    def __init__(self, layers: list[FullAttention]):
        self.scales = {layer.layer: layer.scale for layer in layers}
        self.kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, layer, queries, keys, values, requests):
        found, parts = [], (x.split(requests.lengths) for x in (queries, keys, values))
        for q, k, v, seen, page in zip(*parts, requests.seen, requests.pages.tolist()):
            if seen > 0:
                k, v = (torch.cat([before, new]) for before, new in zip(self.kept[layer, page], (k, v)))
            self.kept[layer, page] = k, v
            assert len(k) == seen + len(q)
            heads = q.shape[1] // k.shape[1]
            k, v = (x.repeat_interleave(heads, dim=1) for x in (k, v))
            logits = self.scales[layer] * torch.einsum("qhe,khe->hqk", q, k)
            columns = torch.arange(len(k))
            weights = logits.masked_fill(columns > columns[-len(q) :, None], float("-inf")).softmax(-1)
            found.append(torch.einsum("hqk,khe->qhe", weights, v).flatten(1))
        return torch.cat(found)


def paged_of(model, pages: int) -> PagedModel:
    """On as many pages; some bytes of each are not ours, and all of them begin as anything."""
    paged = PagedModel(model, MAX_TOKENS, Server)
    for part in range(paged.layout.num_parts):
        paged.bind(torch.randint(-128, 128, (pages, paged.layout.num_bytes + 32), dtype=torch.int8), part)
    return paged


def model_of(variant):
    if variant in EVERY_STUDENT:
        return student_model(variant)
    if variant == "spade hyena full without a bias":
        torch.manual_seed(0)
        return type(language_model("spade hyena full"))(
            config_of("spade hyena full", relative_bias_scope="none")
        ).eval()
    if variant != "longhorn + window attention":
        return language_model(variant)
    kinds = ["longhorn", "window_attention"]
    config = config_of("longhorn + window and full attention", layer_types=kinds, num_hidden_layers=2)
    torch.manual_seed(0)
    return type(language_model("longhorn"))(config).eval()


class Request:
    def __init__(self, model, number: int, length: int):
        self.ids = random_ids(model, 1, length, seed=number)[0]
        self.seen, self.page, self.logits = 0, -1, []


def served(model, requests: list[Request], seed: int, pages: int = 6) -> set[str]:
    """Schedules at random until all are read; returns what has happened on the way."""
    draw, happened = random.Random(seed), set()
    paged = paged_of(model, pages)
    free, waiting, running = list(range(pages)), list(requests), []
    while waiting or running:
        while waiting and free and draw.random() < 0.7:
            request = waiting.pop(0)
            request.page, request.seen, request.logits = free.pop(draw.randrange(len(free))), 0, []
            running.append(request)
        if running and draw.random() < 0.08:  # preempted: it will be read again from its first token, in another page
            request = running.pop(draw.randrange(len(running)))
            free.append(request.page)
            waiting.append(request)
            happened.add("preempted")
        batch, lengths, budget = [], [], MAX_TOKENS
        for request in draw.sample(running, len(running)):
            length = min(budget, len(request.ids) - request.seen, draw.choice((1, 1, 1, 2, 5, MAX_TOKENS)))
            if length > 0:
                batch.append(request)
                lengths.append(length)
                budget -= length
        if not batch:
            continue
        seen = [request.seen for request in batch]
        happened |= {"steps only"} if all(n == 1 and s for n, s in zip(lengths, seen)) else {"mixed"}
        happened |= {"begins and goes on"} if 0 in seen and max(seen) > 0 else set()
        tokens = torch.cat([r.ids[r.seen : r.seen + n] for r, n in zip(batch, lengths)])
        order = torch.tensor([request.page for request in batch])
        positions = torch.cat([torch.arange(before, before + n) for before, n in zip(seen, lengths)])
        hidden = paged.forward(tokens, positions, Requests(lengths, seen, order))
        logits = paged.logits(hidden)
        for request, part, length in zip(batch, logits.split(lengths), lengths):
            request.logits.append(part)
            request.seen += length
            if request.seen == len(request.ids):
                running.remove(request)
                free.append(request.page)
    return happened


@pytest.mark.parametrize("variant", [*FIXED, *UNEVEN_STUDENTS, *SERVED])
def test_any_schedule_gives_each_request_its_own_text(variant):
    model, happened = model_of(variant), set()
    for seed in range(2):
        requests = [Request(model, number, length) for number, length in enumerate((1, 2, 9, 17, 24, 30, 5, 13))]
        happened |= served(model, requests, seed)
        for request in requests:
            expected = whole(model, request.ids.unsqueeze(0))[0]
            torch.testing.assert_close(torch.cat(request.logits), expected, **TOLERANCE)
    assert happened == {"preempted", "steps only", "mixed", "begins and goes on"}


@pytest.mark.parametrize("variant", ["longhorn", "bst block-recurrent", "lmu-isa", "spade s4 window"])
def test_in_bfloat16(variant):
    """Close, as far as bfloat16 goes: pieces round where the whole does not."""
    model = own_language_model(variant).bfloat16()
    ids, paged = random_ids(model, 1, 20), PagedModel(model, MAX_TOKENS)
    paged.bind(torch.full((3, paged.layout.num_bytes), -1, dtype=torch.int8))
    page, found, seen = torch.tensor([2]), [], 0
    for piece in ids[0].split([7, 1, 1, 6, 1, 4]):
        positions = torch.arange(seen, seen + len(piece))
        found.append(paged.forward(piece, positions, Requests([len(piece)], [seen], page)))
        seen += len(piece)
    expected = model.get_decoder()(ids).last_hidden_state[0]
    torch.testing.assert_close(torch.cat(found), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("variant", FIXED)
def test_a_page_is_as_large_as_its_states(variant):
    model = model_of(variant)
    layout = PagedModel(model, MAX_TOKENS).layout
    held = sum(state.num_bytes for state in state_layout(model).states)
    assert held <= layout.num_bytes < held + 16
    pages = torch.zeros(2, layout.num_bytes, dtype=torch.uint8)
    for number, (state, view) in enumerate(layout.views(pages)):
        assert view.shape == (2, *state.shape) and view.dtype == state.dtype
        assert not view.any(), f"{state} overlaps another"
        view.fill_(number + 1)
    assert [int(view.real.min()) for _, view in layout.views(pages)] == [*range(1, len(layout.states) + 1)]


@pytest.mark.parametrize("variant", SERVED)
def test_a_page_has_a_part_for_each_layer_of_full_attention(variant):
    """Of one size; each state lies in one of them, beside the others."""
    model = model_of(variant)
    found = state_layout(model)
    layout = PagedModel(model, MAX_TOKENS, Server).layout
    kept = [state for state in found.states if state.layer not in found.growing or state.name not in KEYS]
    assert layout.num_parts == len(found.growing) and sorted(layout.states) == sorted(kept)
    views = []
    for part in range(layout.num_parts):
        pages = torch.zeros(2, layout.num_bytes, dtype=torch.uint8)
        views += layout.views(pages, part)
        for number, (state, view) in enumerate(layout.views(pages, part)):
            assert not view.any(), f"{state} overlaps another"
            view.fill_(number + 1)
    assert sorted(state for state, _ in views) == sorted(kept)


def test_parts_of_a_page_are_evenly_full():
    states = [StateSpec(layer, "window", (size,), torch.float32) for layer, size in enumerate((9, 1, 8, 2, 7, 3))]
    layout = PageLayout(states, 3)
    assert layout.num_bytes == 48 and sorted(layout.offsets) == [0, 0, 0, 28, 32, 36]
    assert PageLayout([], 2).num_bytes == 16  # nothing but full attention


def test_narrow_states_come_last_in_a_page():
    """Whatever the order of the layers, so that each state lies at a multiple of its own elements' size."""
    narrow, wide = StateSpec(0, "window", (3,), torch.bfloat16), StateSpec(1, "scan", (5,), torch.complex128)
    layout = PageLayout([narrow, StateSpec(0, "flag", (1,), torch.bool), wide])
    assert [state.dtype.itemsize for state in layout.states] == [16, 2, 1]
    assert all(offset % state.dtype.itemsize == 0 for offset, state in zip(layout.offsets, layout.states))
    views = layout.views(torch.zeros(2, layout.num_bytes, dtype=torch.uint8))
    assert [view.shape for _, view in views] == [(2, 5), (2, 3), (2, 1)]


@pytest.mark.parametrize("variant", [*GROWING, "encoder-decoder"])
def test_what_needs_more_than_a_page_is_refused(variant):
    words = (
        "does not continue texts" if variant == "encoder-decoder" else rf"layers \[{GROWING[variant][0]}.* keep the"
    )
    with pytest.raises(ValueError, match=words):
        PagedModel(language_model(variant), MAX_TOKENS)


@pytest.mark.parametrize(("keep", "groups"), [([(0, 0), 1], 3), ([(0, 0), (1, 1), (1, 2)], 2)])
def test_layers_ask_a_server_for_as_many_groups(keep, groups):
    """A server's pages have one size, so that layers with fewer full groups fill them up."""
    sizes = SIZES | {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
    torch.manual_seed(0)
    config = student_config(LlamaConfig(**sizes), keep=keep, window=5, attn_scale=0.3)
    model = AutoModelForCausalLM.from_config(config).eval()
    asked = state_layout(model).attention
    assert [(each.num_heads, each.num_key_value_heads) for each in asked] == [(2 * groups, groups)] * 2
    ids = random_ids(model, 1, 16)
    paged = PagedModel(model, 16, Server)
    hidden = paged.forward_without_pages(ids[0])
    torch.testing.assert_close(paged.logits(hidden), whole(model, ids)[0], **TOLERANCE)


@pytest.mark.parametrize(
    "name, words",
    [
        ("spade hyena full", r"layers \[0, 1\] of this 'spade' model add a learned bias by distance"),
        ("gemma2", r"layers \[1, 3\] of this 'hybrid_student' model cap the scores of full attention"),
        ("gpt_oss", r"layers \[1, 3\] of this 'hybrid_student' model have sinks of their own in full attention"),
        pytest.param(
            "lfm2",
            r"layers \[0, 2\] of this 'hybrid_student' model keep states in cache layers of transformers",
            marks=pytest.mark.skipif("lfm2" not in TEACHERS, reason="this transformers renames its layers"),
        ),
    ],
)
def test_what_a_servers_attention_does_not_have_is_refused(name, words):
    """Of teachers: where their layers are kept. Windows instead have it."""
    with pytest.raises(ValueError, match=words):
        PagedModel(student(name, "kept") if name in TEACHERS else language_model(name), MAX_TOKENS, Server)


def test_rectangles_hold_no_more_tokens_than_one_forward_and_little_padding():
    """One long prompt among many short ones must not pad all of them to its length."""
    draw = random.Random(0)
    for limit in (64, 4096):
        paged = PagedModel(language_model("longhorn"), limit)
        lengths, seen = [1] * 30 + [34, 5, 5, 2] + [draw.randint(2, 64) for _ in range(30)], [3] * 29 + [0] * 35
        groups = list(paged._rectangles(Requests(lengths, seen, torch.arange(64))))
        assert sorted(index for group in groups for index in group) == list(range(64))
        assert groups[0] == list(range(29))
        for group in groups:
            own = [lengths[i] for i in group]
            assert len(own) * max(own) <= min(limit, 1.25 * sum(own))
    assert len(groups) < 10


@pytest.mark.parametrize("variant", FIXED)
def test_a_step_makes_no_device_wait(variant, monkeypatch):
    """Nor is anything sent to it, once the engine has said which page is whose."""
    monkeypatch.setattr("hf_hybrid_ssm.ops.core.dispatch._ENVIRONMENT_BACKEND", "torch")  # as without kernels for CPUs
    model, pages = model_of(variant), torch.tensor([1, 0])
    paged = PagedModel(model, MAX_TOKENS)
    paged.bind(torch.zeros(2, paged.layout.num_bytes, dtype=torch.int8))
    places = torch.cat([torch.arange(9), torch.arange(7)])
    paged.forward(random_ids(model, 1, 16)[0], places, Requests([9, 7], [0, 0], pages))
    tokens, places, requests = torch.tensor([5, 6]), torch.tensor([9, 7]), Requests([1, 1], [9, 7], pages)
    with as_on_an_accelerator():
        paged.forward(tokens, places, requests)  # computes what is kept
    assert host_syncs(lambda: paged.forward(tokens, places + 1, requests)) == []
