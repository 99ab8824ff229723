"""Print a script that completes the commands, options and names of hf-hybrid-ssm in a shell.

It completes what this version has: print it again after an update. shtab makes it (`pip install shtab`), and is not
needed afterwards. In zsh, `fpath=(~/.zfunc $fpath)` stands before `compinit` in ~/.zshrc.

Examples:
    hf-hybrid-ssm completion bash > ~/.local/share/bash-completion/completions/hf-hybrid-ssm
    hf-hybrid-ssm completion zsh > ~/.zfunc/_hf-hybrid-ssm
    hf-hybrid-ssm completion fish > ~/.config/fish/completions/hf-hybrid-ssm.fish
"""

import argparse
import importlib

from hf_hybrid_ssm.cli.parsing import parser_of
from hf_hybrid_ssm.cli.recipe import config_names, recipe_names
from hf_hybrid_ssm.extras import install_command

SHELLS = ("bash", "zsh", "fish")
FOLDERS = ("FOLDER", "OUT")
FILES = ("FILE", "MODEL", "TEACHER", "PATH_OR_NAME")


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("completion", __doc__)
    parser.add_argument("shell", choices=SHELLS, help="shell that the script is for")
    return parser


def main(arguments: list[str]) -> int:
    args = build_parser().parse_args(arguments)
    try:
        import shtab
    except ImportError as error:
        raise ImportError(f"shtab is needed: {install_command('completion')}") from error
    print(shtab.complete(whole_parser(), args.shell))
    return 0


def whole_parser() -> argparse.ArgumentParser:
    """The parsers of all commands below one, with what their arguments can be."""
    from hf_hybrid_ssm.cli import COMMANDS, build_parser

    whole = build_parser()
    whole.usage = None
    commands = whole.add_subparsers(metavar="COMMAND")
    for name, summary in COMMANDS.items():
        own = importlib.import_module(f"hf_hybrid_ssm.cli.{name}").build_parser()
        for action in own._actions:
            add_candidates(name, action)
        commands.add_parser(name, parents=[own], add_help=False, help=summary, description=summary)
    return whole


def add_candidates(command: str, action: argparse.Action) -> None:
    """What shtab offers for an argument: names of recipes and of configurations, or files of this machine."""
    import shtab

    if command == "recipe" and action.dest == "name":
        action.choices = recipe_names()
    elif command == "recipe" and action.dest == "config":
        action.choices = config_names()
    elif action.metavar in FOLDERS:
        action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    elif action.metavar in FILES:
        action.complete = shtab.FILE  # type: ignore[attr-defined]
