"""What stands beside a window or in the place of attention, against plain computations in float64."""

import math

import pytest
import torch

from hf_hybrid_ssm.ops.core.rows import Rows
from hf_hybrid_ssm.students.initial import init_memories, student_of
from hf_hybrid_ssm.students.initial_projections import score_factors
from hf_hybrid_ssm.students.teacher import attention_layers
from tests.students.teachers import SIZES, WINDOW, full_layers, masked, teacher, tokens

LENGTH = 24
NAMES = pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "granite"])
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


def attention_of(model, index):
    config = model.config
    layer = attention_layers(config, getattr(config, "teacher_type", None))[index]
    return model.base_model.get_submodule(layer.name)


def mixed(mixer, u, cos, sin):
    """What a mixer with the heads of attention gives, token by token: (B, L, d)."""
    heads, size = mixer.num_heads, mixer.state_size
    x, gate = mixer.in_proj(u).chunk(2, -1)
    taps = mixer.conv1d.weight[:, 0] if mixer.conv1d.weight.dim() == 3 else mixer.conv1d.weight
    past = torch.nn.functional.pad(x, (0, 0, taps.shape[1] - 1, 0))
    x = sum(past[:, tap : tap + x.shape[1]] * taps[:, tap] for tap in range(taps.shape[1])) + mixer.conv1d.bias
    x = torch.nn.functional.silu(x)
    beta = (mixer.dt_proj(mixer.x_proj(x)) + mixer.dt_bias).sigmoid()
    keys, queries = (projection(u).unflatten(-1, (heads, size)) for projection in (mixer.k_proj, mixer.q_proj))
    if mixer.k_norm is not None:
        keys, queries = mixer.k_norm(keys), mixer.q_norm(queries)
    cos, sin = cos[:, :, None], sin[:, :, None]
    turned = [torch.cat([-each[..., size // 2 :], each[..., : size // 2]], -1) for each in (keys, queries)]
    keys, queries = keys * cos + turned[0] * sin, queries * cos + turned[1] * sin
    channels = x.shape[-1] // heads
    state = u.new_zeros(u.shape[0], heads, channels, size)
    outputs = []
    for t in range(u.shape[1]):
        k, q, b = keys[:, t, :, None], queries[:, t, :, None], beta[:, t].unflatten(-1, (heads, channels))[..., None]
        step = b / (1 + b * k.square().sum(-1, keepdim=True))
        state = (1 - step * k.square()) * state + step * x[:, t].unflatten(-1, (heads, channels))[..., None] * k
        outputs.append((state * q).sum(-1).flatten(1))
    y = torch.stack(outputs, 1) + mixer.D * x
    return mixer.out_proj(y * torch.nn.functional.silu(gate))


def with_memories(model, name, keep, ids, compute):
    """Logits of the teacher with windows, beside which `compute` (memory, input of the attention, of its layer,
    angles) gives what is added."""
    plain, hooks, inputs = teacher(name), [], {}

    def remember(index):
        return lambda module, args, kwargs: inputs.update({index: args[0] if args else kwargs["hidden_states"]})

    def add(index, memory):
        def added(module, args, kwargs, output):
            z = args[0] if args else kwargs["hidden_states"]
            return output[0] + compute(memory, z, inputs[index], kwargs["position_embeddings"]), *output[1:]

        return added

    for index in full_layers(name):
        if (memory := getattr(attention_of(model, index), "memory", None)) is not None:
            layer = plain.base_model.get_submodule(attention_layers(plain.config)[index].name.rpartition(".")[0])
            hooks.append(layer.register_forward_pre_hook(remember(index), with_kwargs=True))
            hooks.append(attention_of(plain, index).register_forward_hook(add(index, memory), with_kwargs=True))
    try:
        return masked(name, ids, layers=keep)
    finally:
        for hook in hooks:
            hook.remove()


def check(model, name, keep, compute):
    ids = tokens(2, LENGTH)
    found, wanted = model(ids).logits, with_memories(model, name, keep, ids, compute)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)
    assert (found - masked(name, ids, layers=keep)).abs().max() > 1e-3


@NAMES
@torch.no_grad()
def test_a_mixer_beside_windows_is_the_recurrence_over_the_attentions_heads(name):
    kept = full_layers(name)[-1:]
    model = opened(student_of(teacher(name), keep=kept, window=WINDOW, sink=None, memory="longhorn"))
    check(model, name, kept, lambda memory, z, x, angles: mixed(memory, z, *angles))


@pytest.mark.parametrize("variant", CONTEXT)
@NAMES
@torch.no_grad()
def test_context_states_read_the_layers_input(name, variant):
    """Their queries are the memory's, from the input of attention."""
    fields, first = {**CONTEXT[variant], "ssm_state_size": 4}, full_layers(name)[0]
    where = {"keep": full_layers(name)[1:], "window": WINDOW, "sink": None, "memory_layers": [first]}
    model = opened(student_of(teacher(name), memory="context", **where, **fields))

    def compute(memory, z, x, angles):
        queries = memory.q_proj(z).unflatten(2, (memory.num_heads, -1))
        queries = queries if memory.q_norm is None else memory.q_norm(queries)
        found, _ = memory.context(queries, x, {}, Rows(), head_scale=None)
        return memory.o_proj(found.flatten(2))

    check(model, name, where["keep"], compute)


@NAMES
@torch.no_grad()
def test_a_mixer_instead_of_attention_reads_its_input(name):
    first, *kept = full_layers(name)
    model = opened(student_of(teacher(name), keep=kept, memory="longhorn", instead=True))
    own, ids = teacher(name), tokens(2, LENGTH)
    mixer = attention_of(model, first).memory

    def replaced(module, args, kwargs, output):
        return mixer(args[0] if args else kwargs["hidden_states"]), *output[1:]

    hook = attention_of(own, first).register_forward_hook(replaced, with_kwargs=True)
    wanted = own(ids).logits
    hook.remove()
    torch.testing.assert_close(model(ids).logits, wanted, rtol=0, atol=1e-11)


# -- what they start from ---------------------------------------------------------------------------------------------


@NAMES
@torch.no_grad()
def test_a_mixer_starts_with_the_heads_of_the_attention_beside_it(name):
    """What it reads from each head is the recurrence over the attention's own queries, keys and values, whose scores
    are the attention's."""
    own, first = teacher(name), full_layers(name)[0]
    model = student_of(own, window=WINDOW, memory="longhorn")
    init_memories(model, own)
    attention, layer = attention_of(own, first), attention_layers(own.config)[first]
    mixer, size, shared = attention_of(model, first).memory, layer.key_size, layer.heads // layer.groups
    u = torch.randn(2, 7, SIZES["hidden_size"], dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    heads = {}
    for part in ("q", "k", "v"):
        x = getattr(attention, f"{part}_proj")(u).unflatten(-1, (-1, size))
        norm = getattr(attention, f"{part}_norm", None)
        heads[part] = x if norm is None else norm(x)
    keys, queries = mixer.k_proj(u).unflatten(-1, (-1, size)), mixer.q_proj(u).unflatten(-1, (-1, size))
    if mixer.k_norm is not None:
        keys, queries = mixer.k_norm(keys), mixer.q_norm(queries)
    torch.testing.assert_close(keys, heads["k"].repeat_interleave(shared, 2))
    scale = energy_of(own, attention, first) / size * attention.scaling
    wanted = heads["q"] * scale.repeat_interleave(shared)[:, None]
    torch.testing.assert_close(queries, wanted, rtol=1e-5, atol=1e-6)
    pairs = mixer.in_proj(u).chunk(2, -1)[0].unflatten(-1, (layer.heads, -1))
    values = torch.nn.functional.silu(pairs[..., :size]) - torch.nn.functional.silu(pairs[..., size : 2 * size])
    torch.testing.assert_close(values, heads["v"].repeat_interleave(shared, 2))
    assert mixer.conv1d.weight[..., -1].eq(1).all() and not mixer.conv1d.weight[..., :-1].any()
    assert not mixer.out_proj.weight.any()


def energy_of(own, attention, index):
    """E|k|² of each group, of normed inputs: those of drawn signs times the weights of the norm."""
    size, config = attention.head_dim, own.config
    plus = 1.0 if config.model_type == "gemma3_text" else 0.0
    if getattr(attention, "k_norm", None) is not None:
        return (plus + attention.k_norm.weight).square().sum().expand(2)
    norm = own.base_model.layers[index].input_layernorm.weight + plus
    energy = (attention.k_proj.weight * norm).unflatten(0, (2, size)).square().sum((1, 2))
    bias = attention.k_proj.bias
    return energy if bias is None else energy + bias.unflatten(0, (2, size)).square().sum(1)


@torch.no_grad()
def test_heads_forget_within_one_to_sixteen_windows():
    """A state that nothing is written to, at the keys of normed inputs that are drawn: 1/e of it is left."""
    own = teacher("mistral")
    model = student_of(own, window=49, memory="longhorn")
    init_memories(model, own)
    mixer, norm = attention_of(model, 0).memory, own.model.layers[0].input_layernorm
    torch.manual_seed(0)
    u = norm(torch.randn(1, 4000, SIZES["hidden_size"], dtype=torch.float64))
    keys = mixer.k_proj(u).unflatten(-1, (4, 8))
    logits = mixer.dt_bias.unflatten(0, (4, -1))[:, 0]
    delta = 1 / (1 + torch.exp(-logits) + keys.square().sum(-1))
    forgetting = (delta.unsqueeze(-1) * keys.square()).mean((0, 1, 3))  # of a number of the state, for each token
    torch.testing.assert_close(1 / forgetting, 50.0 * 16.0 ** (torch.arange(4) / 3).double(), rtol=0.25, atol=0)


@pytest.mark.parametrize("variant", CONTEXT)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "granite"])
@torch.no_grad()
def test_context_states_start_as_averages_read_like_tokens(name, variant):
    own, first = teacher(name), full_layers(name)[0]
    model = student_of(own, window=8, memory="context", **CONTEXT[variant])
    init_memories(model, own)
    attention, memory = attention_of(own, first), attention_of(model, first).memory
    context = memory.context
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 1, SIZES["hidden_size"], dtype=torch.float64, generator=generator).expand(1, 1500, -1)
    y, _ = context.ssm(context.input_norm(x))
    filters = {"sh": 1, "mh": 2, "mf": 3}[variant]
    averages = y.view(1500, filters, -1)
    torch.testing.assert_close(averages[-1], context.input_norm(x)[0, -1].expand(filters, -1), rtol=1e-4, atol=1e-4)
    lengths = [2 * 8] if filters == 1 else [8 * (64 ** (f / (filters - 1))) / 4 for f in range(filters)]
    for f, length in enumerate(lengths):  # to 1 - 1/e after as many tokens as the memory has
        share = (averages[round(length) - 1, f] / averages[-1, f]).mean()
        assert share == pytest.approx(1 - 0.3679 ** (round(length) / length), abs=0.05)
    keys, values = (part[0, -1] for part in context._project(y[:, -1:]))
    z, size = own.base_model.layers[first].input_layernorm(x)[0, -1:], attention.head_dim
    wanted = {part: getattr(attention, f"{part}_proj")(z).unflatten(-1, (-1, size)) for part in ("q", "k", "v")}
    if getattr(attention, "k_norm", None) is not None:
        wanted |= {"q": attention.q_norm(wanted["q"]), "k": attention.k_norm(wanted["k"])}
    for found, part in ((keys, "k"), (values, "v")):
        heads = found.reshape(-1, *wanted[part].shape[1:])
        torch.testing.assert_close(heads, wanted[part].expand_as(heads), rtol=1e-3, atol=1e-3)
    queries = memory.q_proj(z).unflatten(-1, (-1, size))
    queries = queries if memory.q_norm is None else memory.q_norm(queries)
    torch.testing.assert_close(queries, wanted["q"] * attention.scaling * math.sqrt(size), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["mistral", "qwen2"])
@torch.no_grad()
def test_values_pass_a_mixer_instead_of_attention_as_they_are(name):
    """silu(v) - silu(-v) = v: with one token, the mixer's output is that of attention, scaled by Δc²(1 + q · k).

    Qwen2's values have a bias, which both channels of a pair need."""
    own = teacher(name)  # grouped heads: there are channels to spare
    assert (attention_of(own, 0).v_proj.bias is not None) == (name == "qwen2")
    model = student_of(own, memory="longhorn", instead=True, state_size=16)
    init_memories(model, own)
    hidden = torch.randn(64, 1, SIZES["hidden_size"], dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    positions = own.model.rotary_emb(hidden, torch.zeros(1, 1, dtype=torch.long))
    wanted, _ = attention_of(own, 0)(hidden, positions, attention_mask=None)
    found = attention_of(model, 0).memory(hidden)
    cosine = torch.nn.functional.cosine_similarity(found.squeeze(1), wanted.squeeze(1), dim=-1)
    torch.testing.assert_close(cosine.abs(), torch.ones(64).double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["mistral", "granite"])
@torch.no_grad()
def test_scores_are_fitted_by_their_leading_directions(name):
    attention = attention_of(teacher(name), 0)
    queries, keys = (layer.weight.view(-1, 8, 32) for layer in (attention.q_proj, attention.k_proj))
    wanted = sum(queries[head].T @ keys[head // 2] for head in range(4)) / 4 * attention.scaling
    left, right = score_factors(attention, 32)
    torch.testing.assert_close(left.T @ right, wanted, atol=1e-10, rtol=0)
    singular = torch.linalg.svdvals(wanted)
    for rank in (2, 8, 16):
        left, right = score_factors(attention, rank)
        torch.testing.assert_close((wanted - left.T @ right).norm(), singular[rank:].norm(), atol=1e-10, rtol=0)


def test_a_memory_that_cannot_start_from_attention_is_refused():
    own = teacher("phi3")
    model = student_of(own, memory="longhorn", instead=True)
    with pytest.raises(ValueError, match=r'layers\.0\.self_attn of the teacher has no k_proj; give init="random"'):
        init_memories(model, own)
    own = teacher("llama")
    for plan, message in (
        ({"instead": True, "use_bias": False}, "use_bias=False"),
        ({"use_bias": False}, "use_bias=False"),
        ({"state_size": 4}, "state_size=4 of the mixer, but the attention's heads need 8"),
        ({"expand": 1}, "the values of 4 heads have 32 channels, which need 64 of the mixer .*, not 32"),
    ):
        with pytest.raises(ValueError, match=message):
            init_memories(student_of(own, window=WINDOW, memory="longhorn", **plan), own)


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
