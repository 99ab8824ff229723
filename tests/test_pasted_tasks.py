"""README.md's tasks as a reader does them: its blocks pasted into bash and zsh, in a new environment and a new clone.

With the versions that `python -m tools.smoke pasted` brings, which runs it; by itself it takes minutes a shell.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_pasted_blocks import SHELLS, blocks_of
from tests.test_readme import (
    OWN_TASKS_ALONE,
    ROOT,
    answer_of_a_server,
    can_serve,
    new_environment,
    shortened,
    texts_in,
    variables_of,
)

VARIABLE = "HF_HYBRID_SSM_PASTE"
TASKS = ["generate", "recipe", "recipe", "eval", "export", "card", "check", "run"]
STAND_IN = """#!{python}
import sys
sys.path.insert(0, {root!r})
from tests.test_pasted_tasks import stand_in_for
sys.exit(stand_in_for({name!r}, sys.argv[1:]))
"""


def stand_in_for(name, words):
    """Runs the environment's program of that name, for fewer steps, and notes its status; of a server, an answer."""
    there = Path(os.environ["OWN_ENVIRONMENT"]) / "bin"
    _, *words = shortened([name, *words])
    if name == "pip":
        command = [there / "python", "-m", "pip", *words, "--no-build-isolation"]
    elif words[0] == "eval":
        command = [there / "python", OWN_TASKS_ALONE, *words]
    else:
        command = [there / name, *words]
    if words[:3] == ["run", "transformers", "serve"]:
        status = 0 if not can_serve() or answer_of_a_server(command, dict(os.environ), Path.cwd())["choices"] else 1
    else:
        status = subprocess.run(command, check=False, stdin=subprocess.DEVNULL).returncode
    with open(os.environ["NOTES"], "a", encoding="utf-8") as notes:
        notes.write(json.dumps([name, words[0], status]) + "\n")
    return status


def paste(shell, text, folder, variables):
    command = [shutil.which(shell), *SHELLS[shell]]
    options = {"cwd": folder, "env": variables, "capture_output": True, "text": True}
    return subprocess.run(command, input=f"{text}\nexit\n", timeout=900, check=False, **options)


@pytest.mark.skipif(VARIABLE not in os.environ, reason=f"takes minutes: python -m tools.smoke pasted sets {VARIABLE}")
@pytest.mark.parametrize("shell", SHELLS)
def test_the_blocks_of_the_first_page_do_what_they_say(shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    clone, install, tasks = (
        next(block for block in blocks_of(ROOT / "README.md", "bash") if words in block)
        for words in ("git clone", "pip install", "hf-hybrid-ssm export")
    )
    environment, programs = new_environment(tmp_path / "venv"), tmp_path / "programs"
    variables = variables_of(environment) | {"NOTES": str(tmp_path / "notes"), "OWN_ENVIRONMENT": str(environment)}
    variables |= {"PATH": f"{programs}{os.pathsep}{variables['PATH']}", "TERM": "dumb", "HOME": str(tmp_path)}
    programs.mkdir()
    for name in ("pip", "hf-hybrid-ssm"):
        (programs / name).write_text(STAND_IN.format(python=sys.executable, root=str(ROOT), name=name))
        (programs / name).chmod(0o755)

    said = paste(shell, clone.replace("ADDRESS", str(ROOT)), tmp_path, variables)
    folder = tmp_path / "hf-hybrid-ssm"
    assert (folder / "README.md").is_file(), said.stderr
    texts_in(folder)
    said = paste(shell, install + tasks, folder, variables)
    notes = [json.loads(line) for line in (tmp_path / "notes").read_text(encoding="utf-8").splitlines()]
    wanted = [["pip", "install", 0]] + [["hf-hybrid-ssm", verb, 0] for verb in ("doctor", "demo", *TASKS)]
    assert notes == wanted, said.stdout[-3000:] + said.stderr[-3000:]
    assert (folder / "runs/own/modeling_longhorn.py").is_file()
    (there,) = environment.glob("lib/python*/site-packages")
    assert list(there.glob("hf_hybrid_ssm-*.dist-info"))  # not the sources of the clone
