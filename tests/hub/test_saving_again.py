"""A folder that everybody could load is such a folder still after somebody has loaded and saved it."""

import json

import pytest
from transformers import AutoModelForCausalLM

from hf_hybrid_ssm.hub import check_folder
from hf_hybrid_ssm.hub.export import auto_map_of, code_of
from tests.hub import saving_again
from tests.hub.saving_again import ONLY_CONFIGURATION, check_loading, save_in_every_way, saved_folders
from tests.hub.test_export import VARIANTS, class_of, run_elsewhere
from tests.tiny_models import build

FAMILIES = ("longhorn", "spade_seq2seq")  # one file of models, and two; test_export.py has all families
EVERY = pytest.mark.parametrize("model_type", FAMILIES)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Exported, saved again without the package, and from there once more with and without it."""
    root = tmp_path_factory.mktemp("again")
    for model_type in FAMILIES:
        folder = root / model_type
        build(VARIANTS[model_type], class_of(model_type)).save_pretrained(folder / "exported", export_code=True)
        without = ((folder / "exported", folder / "without"), (folder / "without/model", folder / "without, without"))
        for source, target in without:
            run_elsewhere(root, saving_again.__file__, "save", source, target)
        save_in_every_way(folder / "exported", folder / "with")
        save_in_every_way(folder / "without/model", folder / "without, with")
    return root


ORDERS = ("with", "without", "without, with", "without, without")


def read_by_loading(folder):
    """The files' contents, and what the model has to answer."""
    paths = [path for path in folder.iterdir() if path.suffix in (".py", ".json", ".safetensors")]
    answers = folder.with_suffix(".answers")
    found = {path.name: path.read_bytes() for path in paths if path.name != "trainer_state.json"}
    return folder.name in ONLY_CONFIGURATION, answers.is_file() and answers.read_bytes(), *sorted(found.items())


def test_everything_saved_is_loaded_by_those_who_lack_the_package(root):
    """One of those folders that are the same, byte for byte."""
    targets = [root / model_type / order for model_type in FAMILIES for order in ORDERS]
    folders = [folder for target in targets for folder in saved_folders(target)]
    distinct = {read_by_loading(folder): folder for folder in folders}
    run_elsewhere(root, saving_again.__file__, "load", *distinct.values())


@EVERY
@pytest.mark.parametrize("order", ORDERS)
def test_everything_saved_is_whole_and_loaded_with_the_package(root, model_type, order):
    folders = saved_folders(root / model_type / order)
    assert len(folders) == 6 + len(ONLY_CONFIGURATION)
    for folder in folders:
        check_loading(folder)
        assert {path.name: path.read_text() for path in folder.glob("*.py")} == code_of(model_type)
        assert json.loads((folder / "config.json").read_text())["auto_map"] == auto_map_of(model_type)
        if folder.name not in ONLY_CONFIGURATION:
            assert check_folder(folder)["code"] == len(code_of(model_type))


@pytest.fixture
def model(tmp_path):
    build("longhorn", "LonghornForCausalLM").save_pretrained(tmp_path / "exported", export_code=True)
    return AutoModelForCausalLM.from_pretrained(tmp_path / "exported")


def test_code_can_be_left_out(model, tmp_path):
    model.save_pretrained(tmp_path / "plain", export_code=False)
    assert "auto_map" not in json.loads((tmp_path / "plain/config.json").read_text())
    assert check_folder(tmp_path / "plain")["code"] == 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "plain").save_pretrained(tmp_path / "plain again")
    assert check_folder(tmp_path / "plain again")["code"] == 0


def test_other_code_is_kept_at_the_end_of_a_training_and_refused_when_asked_to_export(model, tmp_path, caplog):
    other = tmp_path / "exported" / "layers.py"
    other.write_text("# mine\n")
    model.save_pretrained(tmp_path / "exported")
    assert other.read_text() == "# mine\n" and "layers.py was not written by export_code" in caplog.text
    before = (tmp_path / "exported/model.safetensors").stat().st_mtime_ns
    with pytest.raises(ValueError, match=r"layers\.py was not written by export_code"):
        model.save_pretrained(tmp_path / "exported", export_code=True)
    assert (tmp_path / "exported/model.safetensors").stat().st_mtime_ns == before


def test_a_process_that_does_not_save_writes_no_code(model, tmp_path):
    model.save_pretrained(tmp_path / "other rank", is_main_process=False)
    assert list((tmp_path / "other rank").iterdir()) == []


def test_a_derived_class_is_not_exported(tmp_path):
    kind = type(build("longhorn", "LonghornForCausalLM"))
    derived = type("Mine", (kind,), {})(build("longhorn", "LonghornForCausalLM").config)
    with pytest.raises(ValueError, match="Mine is not a class of the family 'longhorn'"):
        derived.save_pretrained(tmp_path / "mine", export_code=True)
    assert not (tmp_path / "mine").exists()
