"""What shells offer after `hf-hybrid-ssm completion`: asked in the shells themselves."""

import contextlib
import importlib.metadata
import io
import shutil
import subprocess
import sys

import pytest

from hf_hybrid_ssm.cli import COMMANDS, completion, main

shtab = pytest.importorskip("shtab")

CASES = {
    "upc": {"upcycle"},
    "reci": {"recipe", "recipes"},
    "generate --max": {"--max-new-tokens"},
    "recipe pretrain_": {"pretrain_clm", "pretrain_mlm", "pretrain_seq2seq"},
    "recipe pretrain_clm longhorn/books": {"longhorn/books_cpu"},
    "plan --sharding f": {"fsdp2"},
    "completion z": {"zsh"},
    "check fol": {"folder/"},
}

BASH = """
source {script}
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMP_LINE="${{COMP_WORDS[*]}}"
_shtab_hf_hybrid_ssm
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
ZSH = """
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell 'PS1=; fpath=({folder} $fpath); autoload -U compinit; compinit -u -d {folder}/dump; LISTMAX=0; \
zstyle ":completion:*" verbose no; bindkey "^G" list-choices; echo REA""DY'
zpty -r shell out '*READY*'
zpty -w -n shell $'{words}\\a'
for attempt in {{1..100}}; do
  zpty -r -t shell out && seen+=$out
  [[ $seen == *{wanted}* ]] && break
  sleep 0.1
done
print -r -- $seen
zpty -d shell
"""


def needs(shell):
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """The folder with the completion of each shell, and a folder whose name begins with `fol`."""
    folder = tmp_path_factory.mktemp("completion")
    (folder / "folder").mkdir()
    for shell in completion.SHELLS:  # zsh finds it by its name
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert main(["completion", shell]) == 0
        (folder / {"zsh": "_hf-hybrid-ssm"}.get(shell, shell)).write_text(printed.getvalue(), encoding="utf-8")
    return folder


def said(shell, code, folder):
    done = subprocess.run([shell, *(["-f"] if shell == "zsh" else []), "-c", code], cwd=folder, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


@needs("bash")
@pytest.mark.parametrize("words", CASES)
def test_bash(scripts, words):
    shown = said("bash", BASH.format(script=scripts / "bash", words=f"hf-hybrid-ssm {words}"), scripts)
    assert {word.removesuffix("/") for word in shown.split()} == {word.removesuffix("/") for word in CASES[words]}


@needs("fish")
@pytest.mark.parametrize("words", CASES)
def test_fish(scripts, words):
    shown = said("fish", f"source {scripts / 'fish'}; complete -C 'hf-hybrid-ssm {words}'", scripts)
    assert {line.partition("\t")[0] for line in shown.splitlines()} == CASES[words]


@needs("zsh")
@pytest.mark.parametrize("words", CASES)
def test_zsh(scripts, words):
    """By a terminal of its own, where a line is typed and completed."""
    wanted = sorted(CASES[words])[-1]
    code = ZSH.format(folder=scripts, words=f"hf-hybrid-ssm {words}", wanted=wanted)
    assert wanted in said("zsh", code, scripts)


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_every_command_and_option_is_offered(shell, capsys):
    assert main(["completion", shell]) == 0
    shown = capsys.readouterr().out
    for command in COMMANDS:
        assert command in shown
    for option in ("--max-new-tokens", "--sharding", "--keep-by"):
        assert option.removeprefix("--") in shown


def test_without_shtab_it_says_what_to_type(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["shtab>=1; extra == 'completion'"])
    assert main(["completion", "bash"]) == 1
    assert "shtab is needed: pip install 'shtab" in capsys.readouterr().err
