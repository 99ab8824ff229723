"""A student as what it has beyond its teacher: it comes back exactly, and only with its own teacher."""

import json
import shutil

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Phi3Config,
    Phi3ForCausalLM,
)

from hf_hybrid_ssm.hub import card_of_folder, check_contents, check_folder, export_code
from hf_hybrid_ssm.hub.fingerprint import digest_of
from hf_hybrid_ssm.upcycle import load_teacher_model, new_modules, save_delta, upcycle
from hf_hybrid_ssm.upcycle.delta import TEACHER, tokenizer_of, write_full
from tests.upcycle.teacher_files import TEXT, in_cache, save_teacher, tokenizer_of_tests, write_gguf
from tests.upcycle.test_upcycle import SIZES

STUDENTS = {
    "longhorn": {"keep": 0.5, "state_size": 4},
    "longhorn, all kept": {"keep": 1.0, "keep_as": "sliding_attention", "sliding_window": 8},
    "bst": {"family": "bst", "sliding_window": 8, "ssm_layers": [1, 3]},
    "bst, windows alone": {"family": "bst", "sliding_window": 8, "ssm_layers": []},
}
UNTIED = {"tie_word_embeddings": False}
KINDS = ("folder", "untied folder", "gguf", "bfloat16 folder")


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """kind → path."""
    folder = tmp_path_factory.mktemp("teachers")
    narrow = load_teacher_model(save_teacher(folder / "folder"), torch.bfloat16)
    narrow.save_pretrained(folder / "bfloat16 folder")
    return {
        "folder": folder / "folder",
        "untied folder": save_teacher(folder / "untied folder", **UNTIED),
        "gguf": write_gguf(folder / "teacher.gguf", quantized=True),
        "bfloat16 folder": folder / "bfloat16 folder",
    }


def trained(student):
    """What upcycling put in is moved a little."""
    with torch.no_grad():
        for name in new_modules(student):
            for parameter in student.get_submodule(name).parameters():
                parameter += 0.01 * torch.randn_like(parameter)
    return student


def student_of(teacher, name="bst", **more):
    torch.manual_seed(0)
    return trained(upcycle(load_teacher_model(teacher), **STUDENTS[name], **more)[0]).eval()


def same(found, wanted):
    fields, expected = found.config.to_dict(), wanted.config.to_dict()
    assert type(found) is type(wanted) and fields.keys() - {"auto_map"} == expected.keys()
    assert all(
        fields[name] == expected[name] for name in expected.keys() - {"architectures", "dtype", "_name_or_path"}
    )
    torch.testing.assert_close(found.state_dict(), wanted.state_dict(), rtol=0, atol=0)
    ids = tokenizer_of_tests()(TEXT, return_tensors="pt")["input_ids"]
    torch.testing.assert_close(found(ids).logits, wanted(ids).logits, rtol=0, atol=0)
    assert found.generation_config.eos_token_id == wanted.generation_config.eos_token_id is not None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STUDENTS)
def test_a_student_comes_back_exactly(name, kind, teachers, tmp_path):
    student = student_of(teachers[kind], name)
    delta = save_delta(student, tmp_path, teachers[kind])
    assert delta.teacher == teachers[kind].name and not delta.is_on_hub
    found = AutoModelForCausalLM.from_pretrained(tmp_path, teacher=teachers[kind])
    same(found, student)
    assert found.dtype == student.dtype
    counts = check_contents(tmp_path)
    assert counts["files"] == 1 and counts["tensors"] + len(delta.carried) >= len(dict(student.named_parameters()))
    kept = {name for name in student.state_dict() if ".mlp." in name or "feed_forward" in name}
    assert kept and kept <= delta.carried.keys()


@pytest.mark.parametrize("kind", ["folder", "untied folder"])
def test_what_carries_over_twice_is_two_parameters(kind, teachers, tmp_path):
    """A tensor of the teacher that two parameters begin with has its own memory in each: they are trained apart."""
    student, _ = upcycle(load_teacher_model(teachers[kind]), **STUDENTS["bst"])
    carried = list(save_delta(student, tmp_path, teachers[kind]).carried.values())
    assert len(set(carried)) < len(carried)
    found = AutoModelForCausalLM.from_pretrained(tmp_path, teacher=teachers[kind])
    memory = [parameter.untyped_storage().data_ptr() for parameter in found.parameters()]  # a tied one counts once
    assert len(set(memory)) == len(memory)
    before = {name: parameter.detach().clone() for name, parameter in found.named_parameters()}
    for name, parameter in found.named_parameters():
        with torch.no_grad():
            parameter += 1
        torch.testing.assert_close(parameter.detach(), before[name] + 1)


def test_only_what_is_new_is_saved(teachers, tmp_path):
    """Of an output projection with more columns than the teacher's, the others; of windows alone, their sinks."""
    windows = student_of(teachers["folder"], "bst, windows alone")
    save_delta(windows, tmp_path / "windows", teachers["folder"])
    sinks = {name for name in windows.state_dict() if ".sink." in name}
    assert set(load_file(tmp_path / "windows" / "delta.safetensors")) == sinks and len(sinks) == 8
    untrained, _ = upcycle(load_teacher_model(teachers["folder"]), **STUDENTS["bst"])
    delta = save_delta(untrained, tmp_path / "untrained", teachers["folder"])
    own = load_file(tmp_path / "untrained" / "delta.safetensors")
    both = "model.layers.1.attention.o_proj.weight"
    assert delta.carried[both] == "model.layers.1.self_attn.o_proj.weight" and own[both].shape == (32, 32)
    new = {name for name in untrained.state_dict() if "context" in name and name not in delta.carried}
    assert set(own) == new | sinks | {both, "model.layers.3.attention.o_proj.weight"}
    same(AutoModelForCausalLM.from_pretrained(tmp_path / "untrained", teacher=teachers["folder"]), untrained.eval())


def test_where_the_teacher_is_the_user_says(teachers, tmp_path, monkeypatch):
    """A path or a name in a folder is followed for nobody who did not ask for it."""
    monkeypatch.delenv(TEACHER, raising=False)
    student = student_of(teachers["folder"])
    save_delta(student, tmp_path / "delta", teachers["folder"])
    shutil.copytree(teachers["folder"], tmp_path / "folder")  # beside, under the recorded name
    monkeypatch.chdir(tmp_path)
    for load in (AutoModelForCausalLM.from_pretrained, type(student).from_pretrained):
        with pytest.raises(ValueError, match=f"'folder', and nothing outside of the folder .* set {TEACHER}"):
            load("delta")
        same(load("delta", teacher="folder"), student)
        with monkeypatch.context() as patched:
            patched.setenv(TEACHER, str(teachers["folder"]))
            same(load("delta"), student)
            patched.setenv(TEACHER, "recorded")
            same(load("delta", teacher=teachers["folder"]), student)
            for options in ({}, {"teacher": "recorded"}):
                with pytest.raises(ValueError, match=r"takes a name on the Hub, and .* 'folder': give its path"):
                    load("delta", **options)


def test_a_recorded_name_of_the_hub_is_asked_for_only_on_the_users_word(teachers, tmp_path, monkeypatch):
    """And never a path, though one of that name be here."""
    monkeypatch.delenv(TEACHER, raising=False)
    monkeypatch.chdir(tmp_path)
    student = student_of(teachers["folder"])
    delta = save_delta(student, "delta", "someone/teacher", model=load_teacher_model(teachers["folder"]))
    assert delta.teacher == "someone/teacher" and delta.is_on_hub
    shutil.copytree(teachers["untied folder"], "someone/teacher")  # another one
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(OSError, match="'someone/teacher' was not downloaded from the Hub"):
        AutoModelForCausalLM.from_pretrained("delta", teacher="recorded")
    in_cache(teachers["folder"], tmp_path / "cache", "someone/teacher")
    with pytest.raises(ValueError, match=r"'someone/teacher'.*on the Hub"):
        AutoModelForCausalLM.from_pretrained("delta")
    same(AutoModelForCausalLM.from_pretrained("delta", teacher="recorded"), student)
    assert tokenizer_of("delta", "recorded")(TEXT) == tokenizer_of_tests()(TEXT)
    assert "base_model: someone/teacher" in card_of_folder("delta")


@pytest.mark.parametrize("name", ["../teacher", "/teacher", "a/b/c", "", "someone/..", "https://example.org/a"])
def test_a_recorded_name_that_the_hub_cannot_have_is_refused(name, teachers, tmp_path):
    save_delta(
        student_of(teachers["folder"]), tmp_path, "someone/teacher", model=load_teacher_model(teachers["folder"])
    )
    file = tmp_path / "delta.json"
    file.write_text(file.read_text().replace('"someone/teacher"', json.dumps(name)))
    with pytest.raises(ValueError, match="is no name on the Hub"):
        AutoModelForCausalLM.from_pretrained(tmp_path, teacher="recorded")


def test_another_teacher_is_refused(teachers, tmp_path):
    save_delta(student_of(teachers["folder"]), tmp_path / "delta", teachers["folder"])
    other = load_teacher_model(teachers["folder"])
    with torch.no_grad():
        other.model.layers[2].mlp.up_proj.weight[0, 0] += 1e-6
    other.save_pretrained(tmp_path / "other")
    for wrong in (tmp_path / "other", *(teachers[kind] for kind in KINDS if kind != "folder")):
        with pytest.raises(ValueError, match=r"is not the teacher of .*fingerprint") as error:
            AutoModelForCausalLM.from_pretrained(tmp_path / "delta", teacher=wrong)
        assert "\n" not in str(error.value)


def test_the_same_weights_in_another_file_are_the_same_teacher(teachers, tmp_path):
    """Unpacked and saved as a folder, in several files, a GGUF teacher has the same fingerprint."""
    student = student_of(teachers["gguf"])
    save_delta(student, tmp_path / "delta", teachers["gguf"])
    load_teacher_model(teachers["gguf"]).save_pretrained(tmp_path / "folder", max_shard_size="20KB")
    assert len(list((tmp_path / "folder").glob("model-*.safetensors"))) > 1
    same(AutoModelForCausalLM.from_pretrained(tmp_path / "delta", teacher=tmp_path / "folder"), student)


def test_a_teacher_for_what_is_no_delta_is_refused(teachers, tmp_path):
    student_of(teachers["folder"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"teacher='x' is for a delta, and .* is none"):
        AutoModelForCausalLM.from_pretrained(tmp_path, teacher="x")


def test_options_of_loading(teachers, tmp_path):
    student = student_of(teachers["folder"])
    save_delta(student, tmp_path, teachers["folder"])
    given = {"teacher": teachers["folder"]}
    narrow = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, **given)
    assert narrow.model.embed_tokens.weight.dtype == torch.bfloat16
    model, info = type(student).from_pretrained(tmp_path, output_loading_info=True, **given)
    assert not info["missing_keys"] and not info["unexpected_keys"] and model.name_or_path == str(tmp_path)
    base = AutoModel.from_pretrained(tmp_path, **given)
    torch.testing.assert_close(base.state_dict(), student.model.state_dict(), rtol=0, atol=0)
    head = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3, **given)
    torch.testing.assert_close(head.model.state_dict(), student.model.state_dict(), rtol=0, atol=0)
    assert head.score.out_features == 3


def test_matrices_in_half_as_many_bytes(teachers, tmp_path):
    student = student_of(teachers["folder"])
    save_delta(student, tmp_path, teachers["folder"], dtype=torch.bfloat16)
    own = load_file(tmp_path / "delta.safetensors")
    assert {value.dtype for value in own.values() if value.dim() > 1} == {torch.bfloat16}
    found = AutoModelForCausalLM.from_pretrained(tmp_path, teacher=teachers["folder"])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.state_dict(), student.state_dict(), rtol=2**-8, atol=0)


def test_the_whole_model_is_an_ordinary_folder(teachers, tmp_path):
    student = student_of(teachers["gguf"])
    save_delta(student, tmp_path / "delta", teachers["gguf"])
    (tmp_path / "delta" / "results.json").write_text('{"validation_loss": 1.5}')
    write_full(tmp_path / "delta", tmp_path / "full", teachers["gguf"])
    same(AutoModelForCausalLM.from_pretrained(tmp_path / "full"), student)
    assert check_contents(tmp_path / "full")["code"] > 0 and not (tmp_path / "full" / "delta.json").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "full", config=student.config)(TEXT) == tokenizer_of_tests()(TEXT)
    assert "validation loss | 1.5" in (tmp_path / "full" / "README.md").read_text()
    with pytest.raises(ValueError, match="it is whole already"):
        write_full(tmp_path / "full", tmp_path / "again", teachers["gguf"])
    with pytest.raises(ValueError, match="is the delta's own folder"):
        write_full(tmp_path / "delta", tmp_path / "delta", teachers["gguf"])


def test_the_tokenizer_is_the_deltas_or_its_teachers(teachers, tmp_path, monkeypatch):
    monkeypatch.delenv(TEACHER, raising=False)
    student, tokenizer = student_of(teachers["gguf"]), tokenizer_of_tests()
    save_delta(student, tmp_path / "with", teachers["gguf"], tokenizer=tokenizer)
    save_delta(student, tmp_path / "without", teachers["gguf"])
    found = tokenizer_of(tmp_path / "without", teachers["gguf"])
    for one in (found, tokenizer_of(tmp_path / "with"), AutoTokenizer.from_pretrained(tmp_path / "with")):
        assert one(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
        assert one.chat_template == tokenizer.chat_template
    with pytest.raises(ValueError, match="nothing outside of the folder is read"):
        tokenizer_of(tmp_path / "without")


def damaged(folder, kind):
    """What is wrong with the folder of a delta, and what is said of it."""
    file, weights = folder / "delta.json", folder / "delta.safetensors"
    said = json.loads(file.read_text())
    both = next(name for name in load_file(weights) if name in said["carried"])
    match kind:
        case "no weights":
            weights.unlink()
            return r"delta\.safetensors is missing"
        case "cut off":
            weights.write_bytes(weights.read_bytes()[:-8])
            return "is not a complete safetensors file"
        case "no JSON":
            file.write_text("{")
            return r"delta\.json is not valid JSON"
        case "another format":
            said["format"] = 1
        case "a field more":
            said["path"] = "/etc"
        case "a path":
            said["teacher"] = "../teacher"
        case "no tensor carried":
            del said["carried"]["model.norm.weight"]
        case "a foreign tensor":
            said["carried"]["other.weight"] = "model.norm.weight"
        case "a wrong width":
            save_file(load_file(weights) | {both: torch.zeros(32, 64)}, weights)
            return f"{both} has shape .32, 64.; the teacher's columns are carried"
        case "a number":
            own = load_file(weights)
            own[both][0, 0] = torch.nan
            save_file(own, weights)
        case "two names":
            own = load_file(weights)
            first, second = two_alike({name: value.shape for name, value in own.items()})
            save_file(own | {first: own[second], second: own[first]}, weights)
        case "two carried names":
            first, second = two_alike({name: name.split(".", 3)[3:] for name in said["carried"] if ".layers." in name})
            said["carried"] |= {first: said["carried"][second], second: said["carried"][first]}
        case "whole weights beside it":
            shutil.copy(weights, folder / "model.safetensors")
            return "holds both a delta .* and whole weights"
    file.write_text(json.dumps(said))
    return {
        "another format": "is not a delta of format 2",
        "a field more": "must hold teacher, is_on_hub, fingerprint, digest, carried",
        "a path": r"teacher='\.\./teacher' must be a name without its folder",
        "no tensor carried": r"no weight file holds model\.norm\.weight",
        "a foreign tensor": r"carries other\.weight, which the student does not have",
    }.get(kind, r"delta\.safetensors and delta\.json are not what was saved")


def two_alike(kinds):
    """Two names of the same kind."""
    pairs = ((one, other) for one in kinds for other in kinds if one < other and kinds[one] == kinds[other])
    return next(pairs)


DAMAGES = (
    "no weights", "cut off", "no JSON", "another format", "a field more", "a path", "no tensor carried",
    "a foreign tensor", "a wrong width", "a number", "two names", "two carried names", "whole weights beside it",
)  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_delta_is_found(kind, teachers, tmp_path):
    untrained, _ = upcycle(load_teacher_model(teachers["folder"]), **STUDENTS["bst"])
    save_delta(untrained, tmp_path, teachers["folder"])
    message = damaged(tmp_path, kind)
    with pytest.raises(ValueError, match=message) as error:
        check_contents(tmp_path)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError):
        AutoModelForCausalLM.from_pretrained(tmp_path, teacher=teachers["folder"])


def test_a_student_that_is_not_finite_is_not_saved(teachers, tmp_path):
    student = student_of(teachers["folder"])
    name = new_modules(student)[0]
    with torch.no_grad():
        next(student.get_submodule(name).parameters()).view(-1)[0] = torch.inf
    with pytest.raises(ValueError, match=rf"{name}\S+ of the student holds NaN or infinite numbers"):
        save_delta(student, tmp_path / "delta", teachers["folder"])
    assert not (tmp_path / "delta").exists()


def test_what_carries_over_twice_is_two(teachers, tmp_path):
    """Norms that are alike are carried from one of the teacher's; a Phi-3's projections are parts of one matrix. Each
    is trained apart after loading."""
    alike = load_teacher_model(teachers["folder"])
    with torch.no_grad():
        for name, parameter in alike.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
    alike.save_pretrained(tmp_path / "alike")
    Phi3ForCausalLM(Phi3Config(**SIZES, pad_token_id=0)).save_pretrained(tmp_path / "fused")
    for folder in ("alike", "fused"):
        student, _ = upcycle(load_teacher_model(tmp_path / folder), **STUDENTS["bst"])
        delta = save_delta(student, tmp_path / f"{folder}-delta", tmp_path / folder)
        assert len(set(delta.carried.values())) < len(delta.carried)
        found = AutoModelForCausalLM.from_pretrained(tmp_path / f"{folder}-delta", teacher=tmp_path / folder)
        parameters = list(found.parameters())
        assert len({value.untyped_storage().data_ptr() for value in parameters}) == len(parameters)
        wanted = {name: value.clone() for name, value in found.state_dict().items()}
        with torch.no_grad():
            found.model.layers[0].attention_norm.weight.add_(1)
            found.model.layers[0].attention.q_proj.weight.add_(1)
        changed = {name for name, value in found.state_dict().items() if not torch.equal(value, wanted[name])}
        assert changed == {f"model.layers.0.{part}.weight" for part in ("attention_norm", "attention.q_proj")}


def test_a_tensor_of_another_shape_is_not_carried(teachers, tmp_path):
    student = student_of(teachers["folder"])
    save_delta(student, tmp_path, teachers["folder"])
    file = tmp_path / "delta.json"
    said = json.loads(file.read_text())
    said["carried"]["model.norm.weight"] = "model.layers.0.mlp.up_proj.weight"
    said["digest"] = digest_of(said["carried"], load_file(tmp_path / "delta.safetensors"))
    file.write_text(json.dumps(said))
    with pytest.raises(ValueError, match=r"model\.norm\.weight is carried as \(48, 32\), not \(32,\)"):
        AutoModelForCausalLM.from_pretrained(tmp_path, teacher=teachers["folder"])


def test_folders_are_not_replaced_unasked(teachers, tmp_path):
    student = student_of(teachers["folder"])
    student.save_pretrained(tmp_path)
    with pytest.raises(FileExistsError, match="is not empty"):
        save_delta(student, tmp_path, teachers["folder"])
    save_delta(student, tmp_path, teachers["folder"], overwrite=True)
    assert not list(tmp_path.glob("model*.safetensors"))
    same(AutoModelForCausalLM.from_pretrained(tmp_path, teacher=teachers["folder"]), student)
    with pytest.raises(ValueError, match="is a delta, which loads with this package alone"):
        export_code(tmp_path)


def test_the_card_says_whose_delta_it_is(teachers, tmp_path):
    delta = save_delta(student_of(teachers["folder"]), tmp_path, teachers["folder"])
    card = card_of_folder(tmp_path)
    assert f"`{delta.teacher}`" in card and f"`{delta.fingerprint}`" in card and "base_model" not in card
    assert f'teacher="{delta.teacher}")' in card and check_folder(tmp_path)["code"] == 0
