"""The package executes nothing it was not shipped with.

ruff holds most of it: `S` and the banned modules in pyproject.toml; here is what no rule of ruff says.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import hf_hybrid_ssm

PACKAGE = Path(hf_hybrid_ssm.__file__).parent
ROOT = Path(__file__).parents[2]
SOURCES = sorted(PACKAGE.rglob("*.py")) + sorted((ROOT / "recipes").rglob("*.py"))
RUFF = f"ruff check --no-cache --output-format concise -q --config {ROOT / 'pyproject.toml'} --select S,TID251"


def findings(*arguments: str, source: str | None = None) -> str:
    """What ruff's rules of security say."""
    command = [sys.executable, "-m", *RUFF.split(), "--ignore", "S101,S311,S603", *arguments]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=False).stdout


def test_sources_are_safe():
    """`torch.load` takes weights alone, and only C files beside the module that asks for them are compiled."""
    assert findings(str(PACKAGE), str(ROOT / "recipes")) == ""
    compiled = []
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert not [call for call in re.findall(r"torch\.load\(.*", text) if "weights_only=True" not in call], path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "compile_and_load":
                assert path.name == "native_library.py"
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "library_beside":
                assert ast.unparse(node.args[0]) == "__file__"
                assert path.with_suffix(".c").is_file()
                compiled.append(path)
    assert compiled


# the first words of each paragraph and item of SECURITY.md → what fails if it is not so
TESTED = {
    "**Checkpoints** are": ("reliability/test_damaged_files.py", "damaged_folders_are_refused"),
    "**A folder that somebody else made**": ("cli/test_hostile_folders.py", "every_command"),
    "- nothing it names is fetched": ("cli/test_hostile_folders.py", "is_not_loaded_with_code_that_its_folder_names"),
    "- only regular files are read": ("cli/test_hostile_folders.py", "folder_of_the_hubs_cache"),
    "- nothing outside of it is written": ("hub/test_writing.py", "a_link_is_replaced"),
    "  What `results.json`": ("hub/test_cards.py", "what_a_folder_says_is_shown_as_it_is"),
    "`check` reads the weights": ("cli/test_hostile_folders.py", "file_that_is_checked_is_the_one_that_is_loaded"),
    "files. A context of": ("serving/test_context.py", "what_is_no_state_of_the_model"),
    "**Deltas.**": ("upcycle/test_delta.py", "where_the_teacher_is_the_user_says"),
    "**The package** uses": ("reliability/test_security.py", "sources_are_safe"),
    "**Compiling.**": ("ops/test_native_library.py", "compiled_once_into_a_folder_of_the_users_own"),
    "- against damage": ("ops/test_native_library.py", "damaged_files_are_compiled_again"),
    "- against tampering": ("ops/test_native_library.py", "folder_that_others_may_write_to_is_not_used"),
    "Whoever can write as this user": ("ops/test_native_library.py", "file_that_others_may_write_to"),
    "**Arguments of C code.**": ("ops/test_c_function.py", "c_gets_no_tensor_that_it_would_misread"),
}
NOT_TESTED = ("# Security", "**Reporting.**")


def test_every_paragraph_of_the_security_page_has_its_test():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    begins = [part for block in text.split("\n\n") for part in re.split(r"\n(?=- )", block.strip())]
    assert [part for part in begins if not part.startswith((*TESTED, *NOT_TESTED))] == []
    for words, (file, name) in TESTED.items():
        assert re.search(f"^{re.escape(words)}", text, re.MULTILINE), words
        assert name in (ROOT / "tests" / file).read_text(encoding="utf-8"), (file, name)
