"""The command `hf-hybrid-ssm`: one module for each of its commands, imported when it is asked for."""

import argparse
import importlib
import sys

import hf_hybrid_ssm
from hf_hybrid_ssm.cli.errors import EXPECTED, print_what_can_be_shown, status_of
from hf_hybrid_ssm.cli.settings import closest
from hf_hybrid_ssm.cli.threads import share_processors

TASKS = {
    "start here": {
        "doctor": "show what is installed, which kernels run here, and why others do not",
        "demo": "train, evaluate, save, reload and score a small model on this machine",
        "upcycle": "give a pretrained transformer a cache that stops growing, and measure it",
    },
    "use a model": {
        "generate": "continue a text, or answer it, with a checkpoint",
        "chat": "talk with a checkpoint that has a chat template",
        "read": "read a text once, and save the state after it to a file",
        "eval": "score checkpoints with lm-eval",
    },
    "train a model": {
        "recipes": "list the recipes and their configurations",
        "recipe": "run a recipe: train, fine-tune, upcycle, compare, publish",
        "plan": "show the memory and the operations of a training step, without running it",
    },
    "share a model": {
        "check": "find missing, truncated and foreign files in a checkpoint folder",
        "export": "add the code to a folder that loads it without this package",
        "card": "write the model card of a folder",
        "convert": "convert an official checkpoint",
    },
    "use other programs": {
        "run": "run a script, a module or another command with the families registered",
        "completion": "print the completion of this command for bash, zsh or fish",
    },
}
COMMANDS = {name: summary for commands in TASKS.values() for name, summary in commands.items()}
# what a script raises keeps its traceback; recipes print their own errors
PASSING_ON = ("run", "recipe", "demo")


def build_parser() -> argparse.ArgumentParser:
    """The parser of what stands before a command, whose help lists the commands by task."""
    tables = [
        "\n".join([f"{task}:", *(f"  {name:<12}{summary}" for name, summary in commands.items())])
        for task, commands in TASKS.items()
    ]
    parser = argparse.ArgumentParser(
        prog="hf-hybrid-ssm",
        usage="%(prog)s COMMAND ...",
        description="Make, train, run and share state-space/attention hybrids for transformers.",
        epilog="\n\n".join([*tables, "`hf-hybrid-ssm COMMAND --help` explains one."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"hf-hybrid-ssm {hf_hybrid_ssm.__version__}"
    parser.add_argument("--version", action="version", version=version, help="show the version and exit")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run a command, or print them all if none is named.

    Returns:
        The exit status: 0; 1 after an error that was printed; 130 after Ctrl-C. argparse exits with 2.
    """
    parser = build_parser()
    parser.add_argument("command", metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        parser.print_help()
        return 0
    args = parser.parse_args(arguments)
    if args.command not in COMMANDS:
        parser.error(f"there is no command {args.command!r}{closest(args.command, COMMANDS)}")
    share_processors()

    def run() -> int:
        return importlib.import_module(f"{__name__}.{args.command}").main(args.rest)

    if args.command == "run":  # exactly as `python SCRIPT`
        return run()
    print_what_can_be_shown()
    expected = () if args.command in PASSING_ON else EXPECTED
    return status_of(f"hf-hybrid-ssm {args.command}", run, expected)
