"""Compiled code is kept, and nothing that is damaged or may be somebody else's is loaded."""

import logging
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_hybrid_ssm.ops._core import native_library
from tests import processes

pytestmark = pytest.mark.skipif(native_library.missing_compiler() is not None, reason="no C compiler")


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HYBRID_SSM_CACHE", str(tmp_path / "cache"))
    for remembered in (native_library._compiler, native_library._private_folder):
        remembered.cache_clear()
    path = tmp_path / f"answer{os.getpid()}.c"
    path.write_text("int answer(void) { return 42; }\n", encoding="utf-8")
    yield path
    for remembered in (native_library._compiler, native_library._private_folder):
        remembered.cache_clear()


def libraries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.so"))


def loaded_elsewhere(source: Path) -> subprocess.CompletedProcess:
    """In a process of its own: it may die."""
    code = (
        "import sys, logging; logging.basicConfig(level=logging.WARNING); from pathlib import Path\n"
        "from hf_hybrid_ssm.ops._core.native_library import compile_and_load\n"
        "print(compile_and_load(Path(sys.argv[1])).answer())"
    )
    return processes.run([sys.executable, "-c", code, source])


def test_is_compiled_once_into_a_folder_of_the_users_own(source, tmp_path, monkeypatch):
    assert native_library.compile_and_load(source).answer() == 42
    (kept,) = libraries(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [kept.name]
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    monkeypatch.setattr(native_library, "_compile", None)
    assert native_library.compile_and_load(source).answer() == 42


@pytest.mark.parametrize("left", [0, 1, 20, 1000, -1])
def test_a_damaged_file_is_compiled_again(source, tmp_path, left):
    assert loaded_elsewhere(source).stdout == "42\n"
    (kept,) = libraries(tmp_path / "cache")
    whole = kept.read_bytes()
    kept.write_bytes(whole[:left])
    again = loaded_elsewhere(source)
    assert again.stdout == "42\n", again.stderr
    assert native_library._is_whole(kept)


def test_a_file_with_another_content_is_compiled_again(source, tmp_path):
    assert loaded_elsewhere(source).stdout == "42\n"
    (kept,) = libraries(tmp_path / "cache")
    content = bytearray(kept.read_bytes())
    content[len(content) // 2] ^= 255
    kept.write_bytes(content)
    assert loaded_elsewhere(source).stdout == "42\n"


def test_a_whole_file_that_does_not_load_is_compiled_again(source, tmp_path, caplog):
    target = native_library._cache_folder() / f"{source.stem}-{native_library._fingerprint(source)}.so"
    nonsense = b"not a library"
    target.write_bytes(nonsense + native_library.hashlib.sha256(nonsense).digest())
    with caplog.at_level(logging.WARNING):
        assert native_library.compile_and_load(source).answer() == 42
    assert "it is compiled again" in caplog.text


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_to_is_not_used(source, tmp_path, mode, caplog):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    with caplog.at_level(logging.WARNING):
        assert native_library.compile_and_load(source).answer() == 42
    assert "others may write to it (chmod go-w" in caplog.text and not libraries(tmp_path / "cache")
    private = native_library._private_folder()
    assert stat.S_IMODE(private.stat().st_mode) == 0o700 and len(libraries(private)) == 1
    shutil.rmtree(private)


def test_a_folder_of_another_user_is_not_used(source, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with caplog.at_level(logging.WARNING):
        assert native_library.compile_and_load(source).answer() == 42
    assert "it belongs to user" in caplog.text and not libraries(tmp_path / "cache")


def test_a_folder_that_cannot_be_made_is_not_needed(source, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("HF_HYBRID_SSM_CACHE", str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING):
        assert native_library.compile_and_load(source).answer() == 42
    assert "Compiled code cannot be kept in" in caplog.text


def test_the_compiler_may_be_a_command_with_arguments(source, tmp_path, monkeypatch):
    """As `CC="ccache gcc"`: the compiler is the wrapper's argument."""
    (real, *arguments) = native_library._compiler()
    wrapper = tmp_path / "wrap per"
    wrapper.write_text('#!/bin/sh\necho "$@" >> "$0.log"\nexec "$@"\n', encoding="utf-8")
    wrapper.chmod(0o755)
    for command in (f"'{wrapper}' {' '.join([real, *arguments])}", f"{real} -DUSELESS=1", real):
        monkeypatch.setenv("CC", command)
        native_library._compiler.cache_clear()
        assert native_library.compile_and_load(source).answer() == 42
    assert wrapper.with_name("wrap per.log").read_text(encoding="utf-8").startswith(f"{real} ")
    assert len(libraries(tmp_path / "cache")) == 3  # each under the name of its command


def test_a_compiler_in_a_path_with_spaces(tmp_path, monkeypatch):
    program = tmp_path / "my cc"
    program.write_text("#!/bin/sh\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("CC", str(program))
    native_library._compiler.cache_clear()
    assert native_library._compiler() == (str(program),)
    native_library._compiler.cache_clear()


def test_a_missing_compiler_is_passed_over(monkeypatch):
    monkeypatch.setenv("CC", "no_such_compiler --fast")
    native_library._compiler.cache_clear()
    assert native_library.missing_compiler() is None and "no_such" not in native_library._compiler()[0]
    native_library._compiler.cache_clear()


def test_another_header_is_another_library(source, tmp_path, monkeypatch):
    (tmp_path / "include").mkdir()
    monkeypatch.setattr(native_library, "INCLUDES", tmp_path / "include")
    source.write_text('#include "shared.h"\nint answer(void) { return ANSWER; }\n', encoding="utf-8")
    for answer in (42, 43):
        (tmp_path / "include" / "shared.h").write_text(f"#define ANSWER {answer}\n", encoding="utf-8")
        assert native_library.compile_and_load(source).answer() == answer
    assert len(libraries(tmp_path / "cache")) == 2


def test_what_fails_to_compile_leaves_nothing(source, tmp_path):
    source.write_text("int answer(void) { return nothing; }\n", encoding="utf-8")
    with pytest.raises(OSError, match="nothing"):
        native_library.compile_and_load(source)
    assert list((tmp_path / "cache").iterdir()) == []


def fake():
    with FakeTensorMode():
        return torch.empty(3)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("make", [
    lambda: torch.empty(3, device="meta"),
    fake,
    lambda: torch.empty(3, dtype=torch.bfloat16),
    lambda: torch.empty(3, dtype=torch.int32),
    lambda: torch.empty(3, 2).t(),
], ids=["meta", "fake", "bfloat16", "int32", "transposed"])  # fmt: skip
def test_c_gets_no_tensor_that_it_would_misread(source, make):
    """A weight left on the meta device would be a null pointer, a narrow one would be read beyond its end."""
    answer = native_library.compile_and_load(source).answer
    with pytest.raises(TypeError, match="a C kernel takes contiguous tensors in the memory"):
        native_library.call(answer, [None, torch.empty(3), make()])


def test_c_may_be_told_of_strides():
    rows = torch.empty(6, 4, dtype=torch.bfloat16)[::2]
    assert native_library.address(rows, is_strided=True) == rows.data_ptr()
    for wrong in (rows.to("meta"), rows.int()):
        with pytest.raises(TypeError, match="a C kernel takes tensors in the memory"):
            native_library.address(wrong, is_strided=True)
