"""Exported code loads from a folder whose name has letters that no name of torch may have."""

import shutil

import pytest
import torch
from transformers import cache_utils, dynamic_module_utils
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from tests.memory import in_own_memory
from tests.tiny_models import build


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "plain"
    build("longhorn", "LonghornForCausalLM").save_pretrained(folder, export_code=True)
    return folder


@pytest.fixture(autouse=True)
def layers_of_the_cache():
    """Exported code makes its own layers those of transformers' caches; the tests that follow need the package's."""
    tables = [table for name, table in vars(cache_utils).items() if name.endswith("LAYER_TYPE_MAPPING")]
    before = [dict(table) for table in tables]
    assert before
    yield
    for table, own in zip(tables, before, strict=True):
        table.clear()
        table.update(own)


def test_letters_of_any_alphabet(exported, tmp_path, monkeypatch):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    ids, logits, libraries = torch.arange(3, 15)[None], [], set()
    for name in ("café", "cafè", "模型", "plain"):  # the first two differ in an accent alone
        folder = shutil.copytree(exported, tmp_path / name)
        model_class = get_class_from_dynamic_module("modeling_longhorn.LonghornForCausalLM", folder)
        assert name in model_class.__module__ or not name.isascii()
        model = in_own_memory(model_class.from_pretrained(folder).eval())
        with torch.inference_mode():
            logits.append(model(ids).logits)
        scan = __import__("sys").modules[f"{model_class.__module__.rpartition('.')[0]}.longhorn_scan"]
        libraries.add(scan._LIBRARY)
    assert all(torch.equal(found, logits[0]) for found in logits[1:])
    assert len(libraries) == 4 and all(library.isascii() and library.isidentifier() for library in libraries)
