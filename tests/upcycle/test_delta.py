"""A student as what it has beyond its teacher: it comes back exactly, and only with its own teacher."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from hf_hybrid_ssm.hub import card_of_folder, check_contents, check_folder, export_code
from hf_hybrid_ssm.hub.delta_files import DELTA, DELTA_WEIGHTS
from hf_hybrid_ssm.upcycle import Keep, Teacher, load_teacher, save_delta, tokenizer_of, upcycle
from hf_hybrid_ssm.upcycle.delta import TEACHER, write_full
from hf_hybrid_ssm.upcycle.student import constant_sinks, new_modules
from tests.upcycle.teacher_files import TEXT, in_cache, save_teacher, tokenizer_of_tests, write_gguf
from tests.upcycle.test_upcycle import MEMORIES

UNTIED = {"tie_word_embeddings": False}
KINDS = ("folder", "untied folder", "gguf", "bfloat16 folder")
OTHERS = ("gemma3", "mixtral", "phi3", "olmo2")


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """kind → path."""
    folder = tmp_path_factory.mktemp("teachers")
    narrow = load_teacher(save_teacher(folder / "folder"), torch.bfloat16)
    narrow.model.save_pretrained(folder / "bfloat16 folder")
    narrow.tokenizer.save_pretrained(folder / "bfloat16 folder")
    return {
        "folder": folder / "folder",
        "untied folder": save_teacher(folder / "untied folder", **UNTIED),
        "gguf": write_gguf(folder / "teacher.gguf", quantized=True),
        "bfloat16 folder": folder / "bfloat16 folder",
        **{name: save_teacher(folder / name, name) for name in OTHERS},
    }


def trained(student):
    """What upcycling put in is moved a little."""
    with torch.no_grad():
        for name in new_modules(student):
            for parameter in student.get_submodule(name).parameters():
                parameter += 0.01 * torch.randn_like(parameter)
    return student


def student_of(teacher, memory="context states", train=True):
    torch.manual_seed(0)
    known = teacher if isinstance(teacher, Teacher) else load_teacher(teacher)
    options = {"sink": "constant", **MEMORIES[memory]}
    student, _ = upcycle(known, Keep([known.layers[1]], window=8), **options)
    return (trained(student) if train else student).eval()


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


@pytest.mark.parametrize(
    ("kind", "memory"),
    [*((kind, memory) for kind in KINDS for memory in MEMORIES), *((kind, "windows") for kind in OTHERS)],
)
def test_a_student_comes_back_exactly(kind, memory, teachers, tmp_path):
    student = student_of(teachers[kind], memory)
    delta = save_delta(student, tmp_path, teachers[kind])
    assert delta.teacher == teachers[kind].name and not delta.is_on_hub
    found = AutoModelForCausalLM.from_pretrained(tmp_path, teacher=teachers[kind])
    same(found, student)
    assert found.dtype == student.dtype
    own = set(load_file(tmp_path / "delta.safetensors"))
    new = [name for name in student.state_dict() if ".sink." in name or ".memory." in name]
    assert own == set(new) and new
    counts = check_contents(tmp_path)
    assert counts["files"] == 1 and counts["tensors"] == len(new)


def test_a_tensor_that_training_changed_is_saved_whole(teachers, tmp_path):
    student = student_of(teachers["folder"], "windows")
    with torch.no_grad():
        student.model.layers[1].mlp.up_proj.weight[3, 4] += 0.5
    save_delta(student, tmp_path, teachers["folder"])
    own = load_file(tmp_path / "delta.safetensors")
    changed = "model.layers[1].mlp.up_proj.weight".replace("[1]", ".1")
    sinks = {f"{name}.{part}" for name in constant_sinks(student) for part in ("key", "value")}
    assert set(own) == sinks | {changed} and own[changed].shape == (48, 32)
    same(AutoModelForCausalLM.from_pretrained(tmp_path, teacher=teachers["folder"]), student)


def test_a_teacher_in_another_type_is_read_as_it_was_saved(teachers, tmp_path):
    """The fingerprint is of the tensors in the folder, whatever the student was made from."""
    wide = load_teacher(teachers["bfloat16 folder"], torch.float32)
    assert not wide.is_as_saved
    student = student_of(wide)
    save_delta(student, tmp_path, wide)
    assert load_file(tmp_path / "delta.safetensors").keys().isdisjoint(wide.model.state_dict())
    same(AutoModelForCausalLM.from_pretrained(tmp_path, teacher=teachers["bfloat16 folder"]), student)


def test_a_teacher_that_lies_nowhere_has_no_delta(teachers, tmp_path):
    known = load_teacher(teachers["folder"])
    with pytest.raises(ValueError, match="no source that a delta could name"):
        save_delta(student_of(known), tmp_path, Teacher(known.model))


@pytest.mark.parametrize("kind", ["folder", "untied folder"])
def test_what_is_trained_is_not_shared(kind, teachers, tmp_path):
    """No two parameters share memory, but what the student ties."""
    save_delta(student_of(teachers[kind]), tmp_path, teachers[kind])
    found = AutoModelForCausalLM.from_pretrained(tmp_path, teacher=teachers[kind])
    memory = [parameter.untyped_storage().data_ptr() for parameter in found.parameters()]  # a tied one counts once
    assert len(set(memory)) == len(memory)


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
    known = load_teacher(teachers["folder"])
    delta = save_delta(student, "delta", replace(known, source="someone/teacher"))
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
    known = replace(load_teacher(teachers["folder"]), source="someone/teacher")
    save_delta(student_of(known), tmp_path, known)
    file = tmp_path / "delta.json"
    file.write_text(file.read_text().replace('"someone/teacher"', json.dumps(name)))
    with pytest.raises(ValueError, match="is no name on the Hub"):
        AutoModelForCausalLM.from_pretrained(tmp_path, teacher="recorded")


def test_another_teacher_is_refused(teachers, tmp_path):
    save_delta(student_of(teachers["folder"]), tmp_path / "delta", teachers["folder"])
    other = load_teacher(teachers["folder"]).model
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
    load_teacher(teachers["gguf"]).model.save_pretrained(tmp_path / "folder", max_shard_size="20KB")
    assert len(list((tmp_path / "folder").glob("model-*.safetensors"))) > 1
    same(AutoModelForCausalLM.from_pretrained(tmp_path / "delta", teacher=tmp_path / "folder"), student)


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


def of_tensors(change):
    """A change of the delta's own tensors, given the names of its sinks' keys."""

    def changed(folder):
        own = load_file(folder / DELTA_WEIGHTS)
        save_file(change(own, *sorted(name for name in own if name.endswith("sink.key"))[:2]), folder / DELTA_WEIGHTS)

    return changed


def of_fields(**fields):
    return lambda folder: (folder / DELTA).write_text(json.dumps(json.loads((folder / DELTA).read_text()) | fields))


def cut(folder):
    (folder / DELTA_WEIGHTS).write_bytes((folder / DELTA_WEIGHTS).read_bytes()[:-8])


OTHER = r"delta\.safetensors and delta\.json are not what was saved"
STUDENT = "HybridStudentForCausalLM"
DAMAGES = {
    "no weights": (lambda folder: (folder / DELTA_WEIGHTS).unlink(), r"delta\.safetensors is missing"),
    "cut off": (cut, "is not a complete safetensors file"),
    "no JSON": (lambda folder: (folder / DELTA).write_text("{"), r"delta\.json is not valid JSON"),
    "another format": (of_fields(format=1), "is not a delta of format 3"),
    "a field more": (of_fields(path="/etc"), "must hold teacher, is_on_hub, fingerprint, digest"),
    "a path": (of_fields(teacher="../teacher"), r"teacher='\.\./teacher' must be a name without its folder"),
    "a tensor less": (
        of_tensors(lambda own, sink, _: {name: own[name] for name in own.keys() - {sink}}),
        rf"no weight file holds \S+sink\.key, which {STUDENT} needs",
    ),
    "a foreign tensor": (
        of_tensors(lambda own, *_: own | {"other.weight": torch.zeros(2)}),
        rf"holds other\.weight, which {STUDENT} does not have",
    ),
    "a wrong width": (
        of_tensors(lambda own, sink, _: own | {sink: torch.zeros(2, 9)}),
        rf"sink\.key has shape .2, 9., but {STUDENT} needs .2, 8.",
    ),
    "a number": (of_tensors(lambda own, sink, _: own | {sink: own[sink] * torch.nan}), OTHER),
    "two names": (of_tensors(lambda own, one, two: own | {one: own[two], two: own[one]}), OTHER),
    "a tensor of the teacher": (of_tensors(lambda own, *_: own | {"model.norm.weight": torch.ones(32)}), OTHER),
    "whole weights beside it": (
        lambda folder: shutil.copy(folder / DELTA_WEIGHTS, folder / "model.safetensors"),
        "holds both a delta .* and whole weights",
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_delta_is_found(kind, teachers, tmp_path):
    save_delta(student_of(teachers["folder"]), tmp_path, teachers["folder"])
    damage, message = DAMAGES[kind]
    damage(tmp_path)
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


def test_a_configuration_of_other_sizes_does_not_fit_the_teacher(teachers, tmp_path):
    save_delta(student_of(teachers["folder"], "windows"), tmp_path, teachers["folder"])
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"intermediate_size": 48', '"intermediate_size": 50'))
    with pytest.raises(ValueError, match=r"mlp\.gate_proj\.weight of the teacher is \(48, 32\), not \(50, 32\)"):
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
    assert "## Teacher" in card and f"hf-hybrid-ssm export {tmp_path.name} --full OUT" in card
    assert f"`{delta.teacher}`" in card and f"`{delta.fingerprint}`" in card and "base_model" not in card
    assert f'teacher="{delta.teacher}")' in card and check_folder(tmp_path)["code"] == 0


def adapted(student, **options):
    peft = pytest.importorskip("peft")
    made = peft.get_peft_model(student, peft.LoraConfig(r=2, target_modules=["q_proj"], **options))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    return made


def test_a_head_that_was_untied_comes_back(teachers, tmp_path):
    merged = adapted(student_of(teachers["folder"], "windows"), modules_to_save=["lm_head"]).merge_and_unload()
    merged.config.tie_word_embeddings = True
    with pytest.raises(ValueError, match=r"tie_word_embeddings=True of the student, but lm_head\.weight differs"):
        save_delta(merged, tmp_path / "tied", teachers["folder"])
    assert not (tmp_path / "tied").exists()
    merged.config.tie_word_embeddings = False
    save_delta(merged, tmp_path / "delta", teachers["folder"])
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "delta", teacher=teachers["folder"])
    ids = tokenizer_of_tests()(TEXT, return_tensors="pt")["input_ids"]
    torch.testing.assert_close(found(ids).logits, merged.eval()(ids).logits, rtol=0, atol=0)


def test_what_no_delta_could_be_read_into_is_refused(teachers, tmp_path):
    """The adapters are still there."""
    student = student_of(teachers["folder"], "windows")
    wrapped = adapted(student)
    for given in (student, wrapped, torch.compile(student)):
        with pytest.raises(ValueError, match="give the model inside of a wrapper, and merge adapters"):
            save_delta(given, tmp_path, teachers["folder"])
    assert not list(tmp_path.iterdir())


def test_a_teacher_is_not_replaced_by_its_student(teachers, tmp_path):
    teacher = shutil.copytree(teachers["folder"], tmp_path / "teacher")
    held = {path.name: path.read_bytes() for path in teacher.iterdir()}
    student = student_of(teacher, "windows")
    save_delta(student, tmp_path / "delta", teacher)
    with pytest.raises(ValueError, match="is the teacher's own folder"):
        save_delta(student, teacher, teacher, overwrite=True)
    with pytest.raises(ValueError, match="is the teacher's own folder"):
        write_full(tmp_path / "delta", teacher / ".", teacher)
    assert held == {path.name: path.read_bytes() for path in teacher.iterdir()}


def test_settings_of_generate_that_only_sampling_reads(teachers, tmp_path):
    teacher = shutil.copytree(teachers["folder"], tmp_path / "teacher")
    sampling = {"bos_token_id": 0, "eos_token_id": 1, "temperature": 0.6, "top_p": 0.9}
    (teacher / "generation_config.json").write_text(json.dumps(sampling))
    save_delta(student_of(teacher, "windows"), tmp_path / "delta", teacher)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "delta", teacher=teacher)
    assert found.generation_config.temperature == 0.6
    found.save_pretrained(tmp_path / "whole")
    write_full(tmp_path / "delta", tmp_path / "full", teacher)
    assert json.loads((tmp_path / "full/generation_config.json").read_text())["top_p"] == 0.9


def test_an_earlier_save_goes_when_the_next_one_is_whole(teachers, tmp_path, monkeypatch):
    student, tokenizer = student_of(teachers["folder"], "windows"), tokenizer_of_tests()
    tokenizer.chat_template = "{{ messages[0].content }}"
    save_delta(student, tmp_path, teachers["folder"], tokenizer=tokenizer)
    (tmp_path / "adapter_runs").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    held = {path.name for path in tmp_path.iterdir()}
    with monkeypatch.context() as breaking:
        breaking.setattr("hf_hybrid_ssm.upcycle.delta.save_file", lambda *given, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            save_delta(student, tmp_path, teachers["folder"], overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == held
    save_delta(student, tmp_path, teachers["folder"], overwrite=True)
    left = {path.name for path in tmp_path.iterdir()}
    assert {"adapter_runs", "notes.txt", DELTA, DELTA_WEIGHTS, "config.json"} <= left
    assert not any(name.startswith(("tokenizer", "chat_template")) for name in left)
    assert tokenizer_of(tmp_path, teachers["folder"]).chat_template != tokenizer.chat_template
