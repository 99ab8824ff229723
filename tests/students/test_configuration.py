"""A student's configuration is its teacher's, with a plan of its layers that can be."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen3Config

from hf_hybrid_ssm.students.configuration import HybridStudentConfig, LayerPlan, Student
from hf_hybrid_ssm.students.initial import student_config
from hf_hybrid_ssm.students.modeling import HybridStudentForCausalLM, HybridStudentModel
from hf_hybrid_ssm.students.teacher import attention_layers
from tests.students.teachers import MIXED, SIZES, TEACHERS, student, teacher, tokens, tolerance
from tests.tiny_models import OF_STUDENTS, config_of, ids_of, own_language_model

LAYERS = {"full": {"attention": "full"}, "window": {"attention": "window", "window": 4}}


BUILDERS = (AutoModelForCausalLM.from_config, HybridStudentForCausalLM, HybridStudentModel)


def of_plan(*layers, teacher=LlamaConfig, others=(), **plan):
    config = teacher(**SIZES, **dict(others))
    given = {"layers": list(layers), **plan}
    return HybridStudentConfig(teacher_type=config.model_type, student=given, **SIZES, **dict(others))


def test_it_is_one_of_the_teachers_class_and_gives_the_teachers_back(tmp_path):
    teacher = Qwen3Config(**SIZES, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0})
    config = student_config(teacher, keep=[1, (2, 0)], window=4, attn_scale=0.1)
    assert isinstance(config, HybridStudentConfig | Qwen3Config) and config.model_type == "hybrid_student"
    assert config.teacher_config().to_dict() == teacher.to_dict()
    assert config.plan == Student(
        (
            LayerPlan("window", 4, sink="constant"),
            LayerPlan(),
            LayerPlan("window", 4, (0,), "constant"),
            LayerPlan("window", 4, sink="constant"),
        ),
        attn_scale=0.1,
        floor_scale=6,
    )
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is type(config) and loaded.plan == config.plan
    assert loaded.teacher_config().to_dict() == teacher.to_dict()


def test_layers_that_slide_or_are_kept_whole_stay_as_they_are():
    config = student_config(Gemma3TextConfig(**SIZES, **MIXED), keep=[(1, 0), (1, 1)], window=4)
    assert [layer.attention for layer in config.plan.layers] == ["window", "full", "window", "window"]
    assert [layer.window for layer in config.plan.layers] == [7, None, 7, 4]
    assert [layer.sink for layer in config.plan.layers] == [None, None, None, "constant"]
    assert HybridStudentConfig(teacher_type="gemma3_text").plan.layers[0] == LayerPlan("window", 4095)


@pytest.mark.parametrize(
    "keep, message",
    [
        ([4], r"keep names layer 4, group 0, but the teacher sees all tokens in the layers \[0, 1, 2, 3\]"),
        ([(1, 2)], "keep names layer 1, group 2"),
        ([-1], "keep names layer -1"),
    ],
)
def test_layers_and_groups_that_are_not_there_are_refused(keep, message):
    with pytest.raises(ValueError, match=message):
        student_config(LlamaConfig(**SIZES), keep=keep)


@pytest.mark.parametrize(
    "layer, others, message",
    [
        ({"attention": "chunk"}, {}, r"student.layers\[1\].attention='chunk' must be one of 'full', 'window', 'none'"),
        ({"attention": {"a": 1}}, {}, "attention={'a': 1} must be one of 'full', 'window', 'none'"),
        ({"attention": "none"}, {}, "attention='none', but the teacher's is 'full'"),
        ({"attention": "full", "sink": "constant"}, {}, r"student.layers\[1\]: sink is for attention='window'"),
        ({"attention": "window"}, {}, "window=None must be a number of tokens"),
        ({"attention": "window", "window": 0}, {}, "window=0 must be"),
        ({"attention": "window", "window": 4, "groups": [0, 1]}, {}, r"groups=\[0, 1\] must be some of 0 to 1"),
        ({"attention": "window", "window": 4, "groups": [1, 0]}, {}, "in order"),
        ({"attention": "window", "window": 4, "sink": "scalar"}, {}, "sink='scalar' must be one of 'constant'"),
        ({"attention": "window", "windows": 4}, {}, r"student.layers\[1\] has windows, and knows attention, window"),
        ("window", {}, r"student.layers\[1\]='window' must be an object"),
        ({"attention": "full"}, {"attn_scale": -1.0}, "attn_scale=-1.0 must be at least 0"),
        ({"attention": "full"}, {"floor_scale": 0}, "floor_scale=0 at least 1"),
        ({"attention": "full"}, {"scale": 0}, "student has scale, and knows layers, attn_scale, floor_scale"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(layer, others, message):
    with pytest.raises(ValueError, match=message):
        of_plan(LAYERS["window"], layer, LAYERS["full"], LAYERS["full"], **others)


@pytest.mark.parametrize(
    "layer, message",
    [
        ({"attention": "full"}, "the teacher has a window of 7 tokens there"),
        ({"attention": "window", "window": 9}, "window=9 is wider than the teacher's, which sees 7 tokens"),
        ({"attention": "window", "window": 7, "sink": "constant"}, "the teacher's has a window"),
    ],
)
def test_a_teachers_own_windows_stay_windows(layer, message):
    with pytest.raises(ValueError, match=message):
        of_plan(layer, *[LAYERS["window"]] * 3, teacher=Gemma3TextConfig, others=MIXED)


def test_there_is_a_plan_for_each_layer_and_a_teacher():
    with pytest.raises(ValueError, match=r"student.layers has 2 entries, but num_hidden_layers=4"):
        of_plan(LAYERS["window"], LAYERS["full"])
    for name in ("hybrid_student", "nonesuch"):
        with pytest.raises(ValueError, match=f"teacher_type='{name}' is not a model type of transformers"):
            HybridStudentConfig(teacher_type=name)


@pytest.mark.parametrize("variant", OF_STUDENTS)
def test_a_plan_that_was_changed_in_place_is_that_of_the_model(variant, tmp_path):
    """The model's configuration, what is saved of it and its layers say the same, whatever the caller does later."""
    saved, ids = own_language_model(variant), ids_of(2, 12)
    saved.save_pretrained(tmp_path / "saved")
    wanted = copy.deepcopy(saved.config)
    wanted.student["layers"][0]["window"] = 2
    wanted = type(wanted).from_dict(wanted.to_dict())
    config = AutoConfig.from_pretrained(tmp_path / "saved")
    config.student["layers"][0]["window"] = 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", config=config)
    built = [build(config) for build in BUILDERS]
    config.student["layers"][0]["window"] = 4
    for one in (model, *built):
        assert one.config.student == wanted.student and one.config.plan == wanted.plan
        windows = [module.windowed for module in one.modules() if hasattr(module, "windowed")]
        assert windows[0].layer_idx == 0 and windows[0].left == 2
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert not torch.equal(saved(ids).logits, model(ids).logits)


@pytest.mark.parametrize("variant", OF_STUDENTS)
@pytest.mark.parametrize("build", BUILDERS)
def test_a_plan_that_was_changed_to_what_cannot_be_is_refused_by_name(variant, build):
    config = copy.deepcopy(config_of(variant))
    for value in (-3, 0, "5", None):
        config.student["layers"][0]["window"] = value
        with pytest.raises(ValueError, match=rf"student\.layers\[0\]\.window={value!r} must be a number of tokens"):
            build(config)
        config.student = copy.deepcopy(config.student)
        with pytest.raises(ValueError, match=rf"student\.layers\[0\]\.window={value!r} must be a number of tokens"):
            build(config)


@pytest.mark.parametrize("name", TEACHERS)
@torch.no_grad()
def test_a_built_student_gives_its_teachers_configuration(name):
    """With the teacher's attention, by which a model of it runs."""
    own, ids = teacher(name), tokens(2, 12)
    config = student(name, "windows").config.teacher_config()
    assert config._attn_implementation == own.config._attn_implementation
    again = AutoModelForCausalLM.from_config(config, dtype=own.dtype).eval()
    again.load_state_dict(own.state_dict())
    torch.testing.assert_close(again(ids).logits, own(ids).logits, **tolerance(name))


def test_a_teacher_is_looked_at_within_inference_mode_too():
    with torch.inference_mode():
        found = attention_layers(Qwen3Config(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 77.0}))
    assert [layer.turned for layer in found.values()] == [8] * 4
