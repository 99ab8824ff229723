"""Compiled code is kept, and nothing that is damaged or may be somebody else's is loaded."""

import importlib.util
import logging
import os
import shutil
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from hf_hybrid_ssm.ops.core import cache_folder, native_build

pytestmark = pytest.mark.skipif(native_build.missing_compiler() is not None, reason="no C compiler")


REMEMBERED = (native_build._compiler, native_build._private_folder, native_build._say_once)


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HYBRID_SSM_CACHE", str(tmp_path / "cache"))
    for remembered in REMEMBERED:
        remembered.cache_clear()
    path = tmp_path / f"answer{os.getpid()}.c"
    path.write_text("int answer(void) { return 42; }\n", encoding="utf-8")
    yield path
    for remembered in REMEMBERED:
        remembered.cache_clear()


def libraries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.so"))


def started_elsewhere(*sources: Path) -> subprocess.Popen:
    code = (
        "import sys, logging; logging.basicConfig(level=logging.WARNING); from pathlib import Path\n"
        "from hf_hybrid_ssm.ops.core.native_build import compile_and_load\n"
        "for source in sys.argv[1:]: print(compile_and_load(Path(source)).answer())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, sources)], env=environment, stdout=pipe, stderr=pipe, text=True
    )


def test_is_compiled_once_into_a_folder_of_the_users_own(source, tmp_path, monkeypatch):
    assert native_build.compile_and_load(source).answer() == 42
    (kept,) = libraries(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [kept.name]
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    monkeypatch.setattr(native_build, "_compile", None)
    assert native_build.compile_and_load(source).answer() == 42


def compiled(source: Path) -> Path:
    """The file that is kept of `source`, not loaded yet."""
    target = native_build._place() / f"{source.stem}-{native_build._fingerprint(source)}.so"
    native_build._compile(source, target)
    return target


def test_damaged_files_are_compiled_again(source, tmp_path):
    """Cut anywhere, or with another content; in a process of its own, which would die of one that is loaded."""
    kept = []
    for number, left in enumerate((0, 1, 20, 1000, -1, None)):
        kept.append((source.with_name(f"part{number}.c"), left))
        kept[-1][0].write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
        file = compiled(kept[-1][0])
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 255 if left is None else 0
        file.write_bytes(content[:left])
    process = started_elsewhere(*(path for path, _ in kept))
    stdout, stderr = process.communicate()
    assert stdout.split() == ["42"] * len(kept), stderr
    assert all(native_build._is_whole(path.read_bytes()) for path in libraries(tmp_path / "cache"))


def test_a_whole_file_that_does_not_load_is_compiled_again(source, tmp_path, caplog):
    target = native_build._place() / f"{source.stem}-{native_build._fingerprint(source)}.so"
    nonsense = b"not a library"
    target.write_bytes(nonsense + native_build.hashlib.sha256(nonsense).digest())
    with caplog.at_level(logging.WARNING):
        assert native_build.compile_and_load(source).answer() == 42
    assert "it is compiled again" in caplog.text


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_to_is_not_used(source, tmp_path, mode, caplog):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    with caplog.at_level(logging.WARNING):
        assert native_build.compile_and_load(source).answer() == 42
    assert f"others may write to {tmp_path / 'cache'} (chmod go-w" in caplog.text and not libraries(tmp_path / "cache")
    private = native_build._private_folder()
    assert stat.S_IMODE(private.stat().st_mode) == 0o700 and len(libraries(private)) == 1
    shutil.rmtree(private)


def test_a_folder_of_another_user_is_not_used(source, tmp_path, monkeypatch, caplog):
    (tmp_path / "cache").mkdir()
    if os.getuid() == 0:  # root's own folders are everybody's to read
        os.chown(tmp_path / "cache", 12345, 12345)
    else:
        monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with caplog.at_level(logging.WARNING):
        assert native_build.compile_and_load(source).answer() == 42
    assert "belongs to user" in caplog.text and not libraries(tmp_path / "cache")


@pytest.mark.parametrize("mode, is_used", [(0o777, False), (0o775, False), (0o1777, True), (0o755, True)])
def test_folders_above_count_too(source, tmp_path, monkeypatch, mode, is_used):
    """Who can write to one of them can put another folder in its place, unless it has the sticky bit."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(mode)
    monkeypatch.setenv("HF_HYBRID_SSM_CACHE", str(tmp_path / "shared" / "own" / "cache"))
    assert native_build.compile_and_load(source).answer() == 42
    assert bool(libraries(tmp_path / "shared" / "own" / "cache")) == is_used


def test_a_file_that_others_may_write_to_is_not_loaded(source, tmp_path, caplog):
    kept = compiled(source)
    kept.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert native_build.compile_and_load(source).answer() == 42
    assert f"{kept} is not loaded: others may write to {kept}" in caplog.text
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700  # a new one took its place


def test_a_folder_of_root_that_is_not_writable_is_read(source, tmp_path, monkeypatch):
    """As in an image that was prepared for all of its users."""
    kept, access = compiled(source), os.access
    kept.chmod(0o755)
    monkeypatch.setattr(native_build, "_compile", None)
    monkeypatch.setattr(os, "access", lambda path, mode: path != kept.parent and access(path, mode))
    monkeypatch.setattr(cache_folder.os, "getuid", lambda: 12345)
    if os.stat(tmp_path).st_uid == 0:
        assert native_build.compile_and_load(source).answer() == 42
        assert not native_build._private_folder.cache_info().currsize
    kept.unlink()
    with pytest.raises(TypeError):  # what is missing there is compiled elsewhere
        native_build.compile_and_load(source)
    assert native_build._private_folder.cache_info().currsize


def test_without_a_home_directory_kernels_are_compiled(source, monkeypatch, caplog):
    for name in ("HF_HYBRID_SSM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def nobody():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    with caplog.at_level(logging.WARNING):
        assert native_build.compile_and_load(source).answer() == 42
    assert "there is no home directory (name a folder in HF_HYBRID_SSM_CACHE)" in caplog.text


def test_the_folder_follows_its_variables(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HYBRID_SSM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder.cache_folder() == tmp_path / "hf_hybrid_ssm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder.cache_folder() == tmp_path / "home" / ".cache" / "hf_hybrid_ssm"
    monkeypatch.setenv("HF_HYBRID_SSM_CACHE", str(tmp_path / "named"))
    assert cache_folder.cache_folder() == tmp_path / "named"


def slow_compiler(tmp_path, monkeypatch, seconds: float) -> Path:
    """A compiler that waits first, and says so in a file beside it."""
    (real, *arguments) = native_build._compiler()
    wrapper = tmp_path / "slow"
    wrapper.write_text(f'#!/bin/sh\necho "$*" >> "$0.log"\nsleep {seconds}\nexec {real} "$@"\n', encoding="utf-8")
    wrapper.chmod(0o755)
    monkeypatch.setenv("CC", " ".join([str(wrapper), *arguments]))
    native_build._compiler.cache_clear()
    return wrapper.with_name("slow.log")


def test_a_killed_compilation_leaves_nothing_for_good(source, tmp_path, monkeypatch):
    log = slow_compiler(tmp_path, monkeypatch, 30)
    process = started_elsewhere(source)
    while not log.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert list((tmp_path / "cache").glob("unfinished-*"))
    monkeypatch.delenv("CC")
    native_build._compiler.cache_clear()
    assert native_build.compile_and_load(source).answer() == 42
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".so"]


def test_first_users_wait_for_one_compilation(source, tmp_path, monkeypatch):
    log = slow_compiler(tmp_path, monkeypatch, 0.5)
    with ThreadPoolExecutor(4) as threads:  # a lock of a folder is as good between threads as between processes
        found = list(threads.map(lambda _: native_build.compile_and_load(source).answer(), range(4)))
    assert found == [42] * 4
    assert log.read_text(encoding="utf-8").count(" -c ") == 1


def test_a_folder_that_cannot_be_made_is_not_needed(source, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("HF_HYBRID_SSM_CACHE", str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING):
        assert native_build.compile_and_load(source).answer() == 42
    assert "Compiled code cannot be kept in" in caplog.text


def test_the_compiler_may_be_a_command_with_arguments(source, tmp_path, monkeypatch):
    """As `CC="ccache gcc"`: the compiler is the wrapper's argument."""
    (real, *arguments) = native_build._compiler()
    wrapper = tmp_path / "wrap per"
    wrapper.write_text('#!/bin/sh\necho "$@" >> "$0.log"\nexec "$@"\n', encoding="utf-8")
    wrapper.chmod(0o755)
    for command in (f"'{wrapper}' {' '.join([real, *arguments])}", f"{real} -DUSELESS=1", real):
        monkeypatch.setenv("CC", command)
        native_build._compiler.cache_clear()
        assert native_build.compile_and_load(source).answer() == 42
    assert wrapper.with_name("wrap per.log").read_text(encoding="utf-8").startswith(f"{real} ")
    assert len(libraries(tmp_path / "cache")) == 3  # each under the name of its command


def test_a_compiler_in_a_path_with_spaces(tmp_path, monkeypatch):
    program = tmp_path / "my cc"
    program.write_text("#!/bin/sh\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("CC", str(program))
    native_build._compiler.cache_clear()
    assert native_build._compiler() == (str(program),)
    native_build._compiler.cache_clear()


def test_a_missing_compiler_is_passed_over(monkeypatch):
    monkeypatch.setenv("CC", "no_such_compiler --fast")
    native_build._compiler.cache_clear()
    assert native_build.missing_compiler() is None and "no_such" not in native_build._compiler()[0]
    native_build._compiler.cache_clear()


@pytest.mark.parametrize("command", ["gcc 'unfinished", '"', "   "])
def test_a_command_that_is_none_is_passed_over(source, monkeypatch, caplog, command):
    monkeypatch.setenv("CC", command)
    native_build._compiler.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert native_build.compile_and_load(source).answer() == 42
        assert native_build.compile_and_load(source).answer() == 42
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"CC={command!r} is not a command (") and "\n" not in line
    monkeypatch.delenv("CC")
    native_build._compiler.cache_clear()


@pytest.mark.parametrize("place", ["folder", "file"])
def test_a_link_that_is_moved_after_the_check_leads_nowhere_else(source, tmp_path, monkeypatch, place):
    """Whoever may write where a link lies can point it elsewhere between the check and the load."""
    own, others, link = tmp_path / "own", tmp_path / "others", tmp_path / "link"
    own.mkdir(mode=0o700)
    link.symlink_to(own)
    monkeypatch.setenv("HF_HYBRID_SSM_CACHE", str(link if place == "folder" else own))
    kept = compiled(source)
    shutil.copytree(own, others)
    (hostile,) = libraries(others)
    if place == "file":
        kept = kept.rename(tmp_path / "answer.so")
        link.unlink()
        link = own / hostile.name
        link.symlink_to(kept)
    check, places = cache_folder.unsafe, []

    def checked_and_moved(path):
        places.append(path)
        reason = check(path)
        if path.suffix == ".so" or place == "folder":
            link.unlink(missing_ok=True)
            link.symlink_to(hostile if place == "file" else others)
        return reason

    monkeypatch.setattr(native_build, "unsafe", checked_and_moved)
    library = native_build.compile_and_load(source)
    assert library.answer() == 42 and Path(library._name).samefile(kept) and not Path(library._name).samefile(hostile)
    assert places and all(path == path.resolve() for path in places)


def test_another_header_is_another_library(source, tmp_path, monkeypatch):
    (tmp_path / "include").mkdir()
    monkeypatch.setattr(native_build, "INCLUDES", tmp_path / "include")
    source.write_text('#include "shared.h"\nint answer(void) { return ANSWER; }\n', encoding="utf-8")
    for answer in (42, 43):
        (tmp_path / "include" / "shared.h").write_text(f"#define ANSWER {answer}\n", encoding="utf-8")
        assert native_build.compile_and_load(source).answer() == answer
    assert len(libraries(tmp_path / "cache")) == 2


def test_what_fails_to_compile_leaves_nothing(source, tmp_path):
    source.write_text("int answer(void) { return nothing; }\n", encoding="utf-8")
    with pytest.raises(OSError, match="nothing"):
        native_build.compile_and_load(source)
    assert list((tmp_path / "cache").iterdir()) == []


def test_measured_sizes_of_a_kernel_lie_in_the_same_folder(tmp_path, monkeypatch):
    name = "hf_hybrid_ssm.ops.longhorn_scan.triton_sizes"
    importlib.import_module(name.rpartition(".")[0])  # and torch, which would look into triton
    # the module asks triton for nothing while sizes are looked up
    if "triton" not in sys.modules and importlib.util.find_spec("triton") is None:
        monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
        monkeypatch.setitem(sys.modules, name, None)  # so that what is imported now is forgotten
        del sys.modules[name]
    sizes = importlib.import_module(name)
    monkeypatch.delenv("HF_HYBRID_SSM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert sizes.tuned_path("Some GPU").parent == tmp_path / "hf_hybrid_ssm"
    monkeypatch.delenv("XDG_CACHE_HOME")

    def nobody():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    sizes.tuned.cache_clear()
    assert sizes.tuned("Some GPU") == {}
    sizes.tuned.cache_clear()
