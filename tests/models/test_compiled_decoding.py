"""`compiled_decoding`: the step of `generate` is compiled once on a CPU, and writes the same text."""

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, StaticCache

from hf_hybrid_ssm import LonghornForCausalLM, LowBitConfig, compiled_decoding, kept_programs
from hf_hybrid_ssm.layers.rms_norm import RMSNorm
from hf_hybrid_ssm.ops.core.dispatch import backend
from tests.processes import run
from tests.tiny_models import compiles, own_language_model, shallow_language_model

pytestmark = compiles
VARIANTS = {  # with how many rows
    "longhorn + window and full attention": 2,
    "bst sh s4d": 1,
    "lmu-isa": 2,
    "spade s4 window": 1,
    "student: windows and a full layer": 1,
    "student: groups": 2,
    "student with a mixer": 1,
}


def traced_only(**options):
    """With torch's backend that runs a graph as it is: inductor takes up to minutes for each of these models."""
    config = compiled_decoding(**options)
    config.backend = "eager"
    return config


def written(model, prompts, count, **options):
    with torch.no_grad():
        return model.generate(prompts, max_new_tokens=count, min_new_tokens=count, do_sample=False, **options)


def prompts(rows, length):
    return torch.randint(3, 61, (rows, length), generator=torch.Generator().manual_seed(length))


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("variant", VARIANTS)
def test_later_texts_of_any_length_compile_nothing(variant):
    model, rows = copy.deepcopy(shallow_language_model(variant)), VARIANTS[variant]
    options = {"cache_implementation": "static", "max_cache_len": 40, "compile_config": traced_only()}
    compiled = [written(model, prompts(rows, 9), 4, **options)]
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled += [written(model, prompts(rows, 3), 5, **options), written(model, prompts(rows, 20), 12, **options)]
    for got, (length, count) in zip(compiled, [(9, 4), (3, 5), (20, 12)]):
        assert torch.equal(got, written(model, prompts(rows, length), count))


def test_weights_that_change_are_used():
    """In place, by others (the head is then tied no longer), and in another dtype, which compiles the step anew."""
    model = own_language_model("longhorn")
    options = {"cache_implementation": "static", "max_cache_len": 40, "compile_config": traced_only()}
    changes = [
        lambda: None,
        lambda: model.lm_head.weight.data.mul_(-1),
        lambda: setattr(model.lm_head, "weight", torch.nn.Parameter(model.lm_head.weight.flip(0))),
        lambda: model.double(),
    ]
    texts = []
    for change in changes:
        change()
        texts.append(written(model, prompts(1, 5), 6, **options))
        assert torch.equal(texts[-1], written(model, prompts(1, 5), 6))
    assert len({tuple(text[0].tolist()) for text in texts}) > 2


def test_modules_that_change_are_used():
    """Adapters that are scaled, switched off or merged, hooks, and another module: each is seen by the next call."""
    peft = pytest.importorskip("peft")
    model = own_language_model("longhorn", wide=True)
    lora = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False, r=4, lora_alpha=64)
    adapted = peft.get_peft_model(model, lora).eval()
    options = {"cache_implementation": "static", "max_cache_len": 40, "compile_config": traced_only()}
    norm, tuned = model.model.norm, [module for module in model.modules() if hasattr(module, "scale_layer")]
    changes = [
        lambda: None,
        lambda: [layer.scale_layer(-1.0) for layer in tuned],
        adapted.base_model.disable_adapter_layers,
        lambda: norm.register_forward_hook(lambda module, args, output: -output),
        lambda: setattr(model.model, "norm", torch.nn.Identity()),
        adapted.base_model.enable_adapter_layers,
    ]
    texts = []
    for change in changes:
        change()
        texts.append(written(model, prompts(1, 5), 6, **options))
        assert torch.equal(texts[-1], written(model, prompts(1, 5), 6)), len(texts)
    assert len({tuple(text[0].tolist()) for text in texts}) > 3


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_loop_of_ones_own(variant):
    """A token at a time, without `generate`, which makes the masks beforehand."""
    torch.compiler.reset()
    model, ids = copy.deepcopy(shallow_language_model(variant)), prompts(1, 12)
    cache = StaticCache(config=model.config, max_cache_len=20)
    compiled = model.get_compiled_call(traced_only())
    with torch.no_grad():
        model(ids[:, :9], cache=cache)
        logits = [compiled(input_ids=ids[:, place : place + 1], cache=cache).logits for place in (9, 10, 11)]
        torch.testing.assert_close(torch.cat(logits, 1), model(ids).logits[:, 9:], rtol=0, atol=1e-5)


def test_few_guards_look_into_modules():
    """By count, of a step."""
    inside = []
    config = traced_only()
    own = config.options["guard_filter_fn"]

    def filtered(guards):
        kept = own(guards)
        inside.extend(keep for guard, keep in zip(guards, kept) if "._modules[" in guard.name)
        return kept

    config.options["guard_filter_fn"] = filtered
    model = copy.deepcopy(shallow_language_model("student: groups"))
    written(model, prompts(1, 5), 3, cache_implementation="static", compile_config=config)
    assert len(inside) > 500 and sum(inside) < len(inside) / 5


@pytest.fixture
def nothing_kept(tmp_path, monkeypatch):
    """As another process begins, with an empty folder."""
    monkeypatch.setenv("HF_HYBRID_SSM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_programs, "_programs", {})
    return tmp_path / "cache" / "programs"


def test_low_bits_by_inductor(tmp_path, nothing_kept, monkeypatch):
    """Compiled indeed, by what torch compiles with: the text of weights of 4 bits, also by a program that was kept."""
    own_language_model("student: groups", wide=True).save_pretrained(tmp_path)

    def loaded():
        return AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=LowBitConfig(bits=4)).eval()

    options = {"cache_implementation": "static", "max_cache_len": 40, "compile_config": compiled_decoding()}
    model = loaded()
    assert torch.equal(written(model, prompts(1, 9), 8, **options), written(model, prompts(1, 9), 8))
    assert hasattr(model, "_compiled_call")
    if not kept_programs.CAN_KEEP:
        return
    (kept,) = nothing_kept.iterdir()
    monkeypatch.setattr(kept_programs, "_programs", {})
    monkeypatch.delattr(kept_programs, "_made")  # a later process compiles nothing
    other, before = loaded(), written(model, prompts(1, 5), 8)
    assert torch.equal(written(other, prompts(1, 5), 8, **options), before)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.neg_()
    changed = written(other, prompts(1, 5), 8, **options)
    assert torch.equal(changed, written(other, prompts(1, 5), 8)) and not torch.equal(changed, before)
    assert kept_programs._read(kept.name)
    kept.chmod(0o666)  # others may write to it
    assert kept_programs._read(kept.name) is None
    kept.chmod(0o600)
    monkeypatch.setattr(kept_programs, "_source", lambda module: "another version")
    assert kept_programs._read(kept.name) is None
    kept.write_bytes(kept.read_bytes()[:1000])
    assert kept_programs._read(kept.name) is None


SCALE = 1.0


def scaled(*values):
    return SCALE * values[-1]


class Scaled(torch.nn.Module):
    """A hook that is no module of the model's."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, module, args, output):
        return self.scale * output


def test_what_says_nothing_of_itself_is_compiled_and_not_kept(nothing_kept):
    model = copy.deepcopy(shallow_language_model("longhorn"))

    def with_an_empty_cell():
        def inner(module, args, output):
            return output if args else never

        if not model:
            never = None
        return inner

    model.model.norm.register_forward_hook(with_an_empty_cell())
    options = {"cache_implementation": "static", "max_cache_len": 20, "compile_config": compiled_decoding()}
    assert torch.equal(written(model, prompts(1, 5), 3, **options), written(model, prompts(1, 5), 3))
    assert not nothing_kept.exists()


ELSEWHERE = """
import json, sys, torch
from hf_hybrid_ssm import kept_programs
from tests.models.test_compiled_decoding import kept_text
torch.set_num_threads(int(sys.argv[2]))
if sys.argv[3] == "second":
    del kept_programs._made  # nothing is compiled here
print(json.dumps(kept_text(sys.argv[1])))
"""


def kept_text(variant):
    model = copy.deepcopy(shallow_language_model(variant)).requires_grad_("spade" in variant)
    options = {"cache_implementation": "static", "max_cache_len": 40, "compile_config": compiled_decoding()}
    return written(model, prompts(1, 9), 8, **options).tolist(), written(model, prompts(1, 9), 8).tolist()


@pytest.mark.skipif(not kept_programs.CAN_KEEP, reason="this torch writes no programs")
@pytest.mark.parametrize("variant", ["bst sh s4d", "spade s4 window"])
def test_another_process_has_the_constants_of_a_program(variant, nothing_kept):
    """Buckets of distances, and what state-space mixers compute of their parameters: frozen (cached) or not."""
    for which in ("first", "second"):
        command = [sys.executable, "-c", ELSEWHERE, variant, torch.get_num_threads(), which]
        done = run(command, cwd=Path(__file__).parents[2])
        assert done.returncode == 0, done.stderr
        compiled, eager = json.loads(done.stdout.split("\n")[-2])
        assert compiled == eager and len(list(nothing_kept.iterdir())) == 1


def test_a_program_is_kept_for_what_is_traced(monkeypatch):
    """Its name is that of another model with the same modules and other weights, and no other's."""
    peft = pytest.importorskip("peft")

    def adapted(scale=1.0):
        torch.manual_seed(0)
        lora = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False, r=4)
        model = peft.get_peft_model(own_language_model("longhorn", wide=True), lora).eval()
        for module in model.modules():
            if hasattr(module, "scale_layer"):
                module.scale_layer(scale)
        return model

    def key(model, dtype=torch.long, config=None):
        return kept_programs._key(model, config or compiled_decoding(), {"input_ids": torch.ones(1, 1, dtype=dtype)})

    def of(change):
        model = own_language_model("longhorn")
        change(model)
        return key(model)

    def others():
        yield of(lambda model: None)
        yield of(lambda model: model.double())
        yield of(lambda model: model.train())
        yield of(lambda model: model.requires_grad_(False))
        yield of(lambda model: setattr(model.lm_head, "weight", torch.nn.Parameter(model.lm_head.weight.clone())))
        yield of(lambda model: setattr(model.model, "norm", torch.nn.Identity()))
        yield of(lambda model: model.model.norm.register_forward_hook(lambda module, args, output: -output))
        yield of(lambda model: model.model.norm.register_forward_hook(lambda module, args, output: 2 * output))
        yield of(lambda model: setattr(model.config, "rms_norm_eps", 0.5))
        yield of(lambda model: model.set_attn_implementation("eager"))
        for scale in (1.0, -1.0):
            yield of(lambda model, scale=scale: model.model.norm.register_forward_hook(Scaled(scale)))
            monkeypatch.setattr(sys.modules[__name__], "SCALE", scale)
            yield of(lambda model: model.model.norm.register_forward_hook(scaled))
        with monkeypatch.context() as patch:
            patch.setattr(RMSNorm, "forward", lambda norm, x: -x)
            yield of(lambda model: None)
        with monkeypatch.context() as patch:  # read of the module that defines the mixer
            patch.setattr(sys.modules[LonghornForCausalLM.__module__], "longhorn_scan", scaled)
            yield of(lambda model: None)
        model = own_language_model("longhorn")
        yield key(model, torch.int)
        yield key(model, config=compiled_decoding(max_autotune=True))
        with torch.inference_mode():
            yield key(model)
        with backend("reference"):
            yield key(model)
        yield from (key(adapted()), key(adapted(-1.0)))

    once, again = list(others()), list(others())
    assert once == again and len(set(once)) == len(once)
