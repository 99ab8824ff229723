"""A teacher is a folder, a name on the Hub or a GGUF file; what is none of them is refused in one line."""

import shutil

import pytest
import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM

from hf_hybrid_ssm.hub import downloads
from hf_hybrid_ssm.upcycle import Keep, Teacher, load_teacher, loading, upcycle
from tests.damaged_weights import damage, lacking
from tests.upcycle.teacher_files import TEXT, in_cache, save_teacher, teacher_and_tokenizer, write_gguf

MESSAGES = [{"role": "user", "content": "one"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_teacher(tmp_path_factory.mktemp("teacher") / "llama")


@pytest.fixture(scope="module", params=["plain", "quantized"])
def gguf(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "llama.gguf"
    return write_gguf(path, quantized=request.param == "quantized")


def test_a_folder_and_a_gguf_file_are_the_same_teacher(folder, gguf):
    wanted, tokenizer = teacher_and_tokenizer()
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    is_quantized = any(tensor.tensor_type.name == "Q4_1" for tensor in GGUFReader(gguf).tensors)
    for source, step in (
        (folder, 0),
        (str(gguf), 0.05 if is_quantized else 0),
    ):  # half a step: blocks span less than 1.5
        known = load_teacher(source)
        model, found = known.model, known.tokenizer
        assert known.source == str(source) and known.is_as_saved
        assert model.dtype == torch.float32 and not model.training
        assert found(TEXT)["input_ids"] == ids[0].tolist()
        assert found.apply_chat_template(MESSAGES, tokenize=False) == "<user>one"
        torch.testing.assert_close(model.state_dict(), wanted.state_dict(), atol=step, rtol=0)
        student, _ = upcycle(known, Keep(1.0))
        torch.testing.assert_close(student(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)
        assert "quantization_config" not in student.config.to_dict()


def test_a_gguf_teacher_that_transformers_loaded_is_no_less(gguf):
    """Its `quantization_config`, where transformers leaves one, speaks of the file and not of the weights."""
    teacher = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name).eval()
    ids = torch.arange(20)[None]
    torch.testing.assert_close(
        upcycle(Teacher(teacher), Keep(1.0))[0](ids).logits, teacher(ids).logits, atol=1e-5, rtol=1e-5
    )


def test_dtypes(folder, gguf):
    """As saved by default; of a GGUF file float32, whatever its blocks hold."""
    narrow = folder.parent / "narrow"
    load_teacher(folder, torch.bfloat16).model.save_pretrained(narrow)
    shutil.copy(folder / "tokenizer.json", narrow)
    assert load_teacher(narrow).model.dtype == torch.bfloat16
    wide = load_teacher(narrow, torch.float32)
    assert wide.model.dtype == torch.float32 and not wide.is_as_saved
    half, whole = load_teacher(gguf, torch.float16).model, load_teacher(gguf).model
    torch.testing.assert_close(half.state_dict(), whole.half().state_dict(), rtol=0, atol=0)


def written(folder, content):
    (folder / "teacher.gguf").write_bytes(content)
    return folder / "teacher.gguf"


def adapter(folder):
    (folder / "adapter_config.json").write_text("{}")
    return folder


def incomplete(folder):
    weights = save_teacher(folder) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return folder


def not_whole(folder):
    damage(save_teacher(folder), lacking, "model.norm.weight")
    return folder


def student(folder):
    upcycle(Teacher(teacher_and_tokenizer()[0]), Keep([1], window=4))[0].save_pretrained(folder)
    return folder


KINDS = {
    "no folder": (lambda folder: folder / "none", FileNotFoundError, "there is no such folder or file"),
    "not here": (lambda folder: f"{folder}/a/b", FileNotFoundError, "there is no such folder or file"),
    "another file": (lambda folder: written(folder, b"PK\x03\x04"), ValueError, "no GGUF file"),
    "a model file": (lambda folder: save_teacher(folder) / "model.safetensors", ValueError, "no GGUF file"),
    "GGUF files": (lambda folder: written(folder, b"").parent, FileNotFoundError, "one of its GGUF files, such as "),
    "an adapter": (adapter, FileNotFoundError, "it is an adapter; merge it"),
    "incomplete weights": (incomplete, ValueError, "not a complete safetensors file"),
    "not all weights": (not_whole, ValueError, r"lacks model\.norm\.weight, which"),
    "a student": (student, ValueError, "model_type='hybrid_student' .*Take another"),
    "no path": (lambda _: None, TypeError, "teacher must be a path or a name on the Hub, not NoneType"),
}
"""A source, and what is said of it; GGUF files have their own (`tests/hub/test_gguf.py`), so have other damages of
weights (`tests/hub/test_whole_models.py`); what is refused by its configuration is in `tests/cli/test_upcycle.py`."""


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_teacher_is_refused_in_one_line(kind, tmp_path):
    make, error, message = KINDS[kind]
    source = make(tmp_path)
    with pytest.raises(error, match=message) as found:
        load_teacher(source)
    assert "\n" not in str(found.value)


def test_a_name_on_the_hub_is_the_folder_that_was_downloaded(folder, tmp_path, caplog):
    in_cache(folder, tmp_path, "someone/a-model")
    found, other = load_teacher("someone/a-model", cache_dir=tmp_path), load_teacher(folder)
    model, tokenizer, wanted, own = found.model, found.tokenizer, other.model, other.tokenizer
    assert found.source == "someone/a-model"
    torch.testing.assert_close(model.state_dict(), wanted.state_dict(), rtol=0, atol=0)
    assert tokenizer(TEXT) == own(TEXT) and tokenizer.chat_template == own.chat_template
    assert model.name_or_path == model.config.name_or_path == tokenizer.name_or_path == "someone/a-model"
    assert "the Hub is asked" in caplog.text and loading.logger.name == caplog.records[0].name


def test_what_the_hub_does_not_give_is_one_line(tmp_path):
    for name in ("someone/a-model", "a-model"):
        with pytest.raises(OSError, match=f"'{name}' was not downloaded from the Hub") as error:
            load_teacher(name, cache_dir=tmp_path)
        assert "\n" not in str(error.value)


def test_weights_are_asked_for_when_all_else_was_checked(folder, tmp_path, monkeypatch):
    """Texts first; then the weights that the index names, of the same commit, and no other file."""
    asked = []
    sharded = tmp_path / "sharded"
    load_teacher(folder).model.save_pretrained(sharded, max_shard_size="20KB")
    shutil.copy(folder / "tokenizer.json", sharded)
    for name in ("code.py", "pytorch_model.bin"):
        (sharded / name).write_text("never")
    snapshot = in_cache(sharded, tmp_path / "hub", "someone/a-model")
    weights = sorted(path.name for path in snapshot.glob("*.safetensors"))
    given = {path: path.readlink() for path in snapshot.iterdir()}

    def give(name, allow_patterns, **options):
        asked.append((name, allow_patterns, options))
        for path, target in given.items():
            path.unlink(missing_ok=True)
            if any(path.match(pattern) for pattern in {*allow_patterns, *downloads.TEXTS}):
                path.symlink_to(target)
        return str(snapshot)

    monkeypatch.setattr(downloads, "snapshot_download", give)
    load_teacher("someone/a-model", revision="main")
    texts = ("someone/a-model", list(downloads.TEXTS), {"revision": "main"})
    assert asked == [texts, ("someone/a-model", weights, {"revision": snapshot.name})]
    asked.clear()
    config = (snapshot / "config.json").resolve()
    config.write_text(config.read_text().replace('"rope_type": "default"', '"rope_type": "dynamic", "factor": 2.0'))
    with pytest.raises(ValueError, match="rope_type='dynamic' turns keys by the length of the text"):
        load_teacher("someone/a-model", revision="main")
    assert asked == [texts]


def test_code_of_a_folder_is_not_run(folder, tmp_path):
    """A model type that transformers does not know, with code beside it, is refused and not run."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "code.py").write_text("raise SystemExit('was run')")
    text = (copy / "config.json").read_text()
    text = text.replace('"model_type": "llama"', '"model_type": "new", "auto_map": {"AutoConfig": "code.Config"}')
    (copy / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"model_type='new' is not known to transformers\. No code of the folder is"):
        load_teacher(copy)
