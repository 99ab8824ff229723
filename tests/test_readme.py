"""The commands of README.md: the two that set up everything, and those of a user's own environment."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
import venv
from pathlib import Path

import pytest

from hf_hybrid_ssm.models import FAMILIES
from tests import processes

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHELL = [
    [line.partition(" #")[0].strip() for line in block.replace("\\\n", " ").splitlines()]
    for block in re.findall(r"^```bash\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
]


def block_with(command):
    return next(block for block in SHELL if command in block)


def test_papers_are_those_of_the_families():
    for family in FAMILIES:
        entry = next(text for text in README.split("@") if family.card.arxiv in text and "title = {" in text)
        assert f"title = {{{family.card.title}}}" in entry
        assert re.search(r"author = {(.*)}", entry)[1].split(" and ") == family.card.authors.split("; ")
        for field, value in (("booktitle", family.card.venue), ("year", str(family.card.year))):
            found = re.search(rf"{field} = {{(.*)}}", entry)
            assert (found[1] if found else None) == value


@pytest.fixture(scope="module")
def own_environment(tmp_path_factory):
    return new_environment(tmp_path_factory.mktemp("own") / "venv")


def new_environment(folder):
    """A new environment without this package; pip and what it would fetch lie on its path, in this Python's order."""
    pytest.importorskip("hatchling")
    pytest.importorskip("hatch_fancy_pypi_readme")
    venv.create(folder)
    (there,) = folder.glob("lib/python*/site-packages")
    paths = dict.fromkeys([*(path for path in sys.path if path.endswith("-packages")), sysconfig.get_path("purelib")])
    (there / "requirements.pth").write_text("\n".join(paths), encoding="utf-8")
    return folder


def variables_of(environment):
    """What a shell in that environment has: its programs first, no package index, nothing of this process's path."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "PIP_"))}
    variables |= {"PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    return variables | {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "OMP_NUM_THREADS": "1"}


BUDGETS = {"demo": ["--steps", "2", "--questions", "4", "--documents", "12"], "recipe": ["max_steps=2"]}
OWN_TASKS_ALONE = ROOT / "tests/evaluation/own_tasks_alone.py"
SERVER_SECONDS = 180


def words_of(command, variables):
    """As a shell reads it, with the README's own variables; long runs are cut short by what their options say."""
    words = shlex.split(command, comments=True)
    return shortened([re.sub(r"\$(\w+)", lambda found: variables[found[1]], word) for word in words])


def shortened(words):
    if words[0] == "hf-hybrid-ssm" and "evaluate_lm" not in words:
        more = BUDGETS.get(words[1], [])
        keys = tuple(word.partition("=")[0] + "=" for word in more if "=" in word)
        words = [word for word in words if not (keys and word.startswith(keys))] + more
    return words


def texts_in(folder):
    """The reader's own texts."""
    (folder / "own.txt").write_text(README, encoding="utf-8")
    held_out = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")[:4000]
    (folder / "held_out.txt").write_text(held_out, encoding="utf-8")


def tasks():
    """The lines of the block of tasks: its variables, and its commands."""
    lines = block_with("hf-hybrid-ssm export runs/own")
    variables = dict(line.split("=", 1) for line in lines if re.match(r"[A-Z]+=", line))
    return variables, [line for line in lines if not re.match(r"[A-Z]+=", line)]


def can_serve():
    return all(map(importlib.util.find_spec, ("fastapi", "uvicorn", "openai")))


def answer_of_a_server(words, environment, folder):
    """What the server of that command answers to one request of OpenAI's."""
    port = processes.free_port()
    address, log = f"http://127.0.0.1:{port}/v1/completions", folder / "server.txt"
    body = {"model": words[-1], "prompt": "Return a new", "max_tokens": 4}
    request = urllib.request.Request(address, json.dumps(body).encode(), {"content-type": "application/json"})
    words = [*words, "--port", str(port), "--device", "cpu"]
    with log.open("w") as out, subprocess.Popen(words, cwd=folder, env=environment, stdout=out, stderr=out) as process:
        try:
            for _ in range(SERVER_SECONDS):
                assert process.poll() is None, log.read_text()[-2000:]
                try:
                    return json.loads(urllib.request.urlopen(request, timeout=60).read())
                except urllib.error.HTTPError as error:
                    raise AssertionError(error.read()) from error
                except OSError:  # it does not listen yet
                    time.sleep(1)
        finally:
            process.kill()
    raise AssertionError(log.read_text()[-2000:])


def test_the_tasks_are_those_of_the_heading():
    variables, commands = tasks()
    assert variables == {"MODEL": "runs/demo/model"}
    verbs = [words_of(command, variables)[1] for command in commands]
    assert verbs == ["generate", "recipe", "recipe", "eval", "export", "card", "check", "run"]


@pytest.mark.skipif(os.name != "posix", reason="the folder of scripts has another name")
def test_an_own_environment_does_every_task_without_a_clone(own_environment, tmp_path):
    """`pip install`, then every command of README.md from a folder that is no clone, one after the other."""
    environment = variables_of(own_environment)
    (there,) = own_environment.glob("lib/python*/site-packages")
    installed = {"PYTHONPATH": str(there)}  # before all that this Python has
    first = block_with("hf-hybrid-ssm doctor")
    assert [shlex.split(command)[0] for command in first] == ["pip", "hf-hybrid-ssm", "hf-hybrid-ssm"]
    variables, more = tasks()
    texts_in(tmp_path)
    said = {}
    for command in [*first, *more]:
        words = words_of(command, variables)
        if words[0] == "pip":
            words = ["python", "-m", *words, "--no-build-isolation"]
        if words[:3] == ["hf-hybrid-ssm", "run", "transformers"]:
            if can_serve():
                said["serve"] = answer_of_a_server(words, environment, tmp_path)
            continue
        if "pip" in words:
            done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        else:
            script = OWN_TASKS_ALONE if words[1] == "eval" else own_environment / "bin" / words[0]
            done = processes.run([sys.executable, script, *words[1:]], cwd=tmp_path, env=environment | installed)
        assert done.returncode == 0, f"{command}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
        said[" ".join(words[1:3])] = done.stdout
    # those were forked, from a process that has the libraries, and the server not; this is how a shell finds them
    listed = subprocess.check_output(["hf-hybrid-ssm", "recipes"], cwd=tmp_path, env=environment, text=True)
    assert "pretrain_clm" in listed
    assert "Successfully installed hf-hybrid-ssm" in said["-m pip"]
    assert str(own_environment) in said["doctor"] or "longhorn_scan" in said["doctor"]
    assert "held-out perplexity" in said["demo --steps"] and (tmp_path / "runs/demo/summary.json").is_file()
    assert said["generate runs/demo/model"].strip()
    assert json.loads((tmp_path / "runs/own/results.json").read_text(encoding="utf-8"))["steps"] == 2
    assert (tmp_path / "runs/own/evaluation.json").is_file() and "standard_text_continuation" in said["eval run"]
    assert (tmp_path / "runs/own/modeling_longhorn.py").is_file() and (tmp_path / "runs/own/README.md").is_file()
    assert "serve" not in said or said["serve"]["choices"]
    assert "`runs/demo/model`, which `demo` writes, stands for the folders in `checkpoints/`" in " ".join(
        README.split()
    )
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)):
        script = tmp_path / f"block{number}.py"
        script.write_text(code.replace("checkpoints/longhorn-books", "runs/demo/model"), encoding="utf-8")
        done = processes.run([sys.executable, script], cwd=tmp_path, env=environment | installed)
        assert done.returncode == 0, done.stderr[-1500:]
    assert number == 1
