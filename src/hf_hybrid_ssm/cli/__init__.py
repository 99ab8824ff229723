"""The command `hf-hybrid-ssm`: one module for each of its commands, imported when it is asked for."""

import argparse
import importlib
import sys

import hf_hybrid_ssm
from hf_hybrid_ssm.cli.errors import EXPECTED, print_what_can_be_shown, status_of
from hf_hybrid_ssm.cli.threads import share_processors

COMMANDS = {
    "run": "run a script, a module or another command with the families registered",
    "enable": "register the families whenever this environment's Python imports transformers",
    "disable": "undo enable",
    "read": "read a text once, and keep what the model remembers of it in a file",
    "generate": "continue a text with a checkpoint",
    "eval": "score checkpoints with lm-eval",
    "check": "find missing, truncated and foreign files in a checkpoint folder",
    "export": "add the code to a folder that loads it without this package",
    "card": "write the model card of a folder",
    "convert": "convert an official checkpoint",
    "upcycle": "turn a pretrained transformer into a hybrid",
    "plan": "memory and operations of a training step, without running it",
    "doctor": "what is installed, which kernels run here, and why others do not",
    "recipes": "list the recipes and their configurations",
    "recipe": "run a recipe: train, fine-tune, upcycle, compare, publish",
    "demo": "train, evaluate, save, reload and score a small model on this machine",
}
# what a script raises keeps its traceback; recipes print their own errors
PASSING_ON = ("run", "recipe", "demo")


def main(arguments: list[str] | None = None) -> int:
    """Run a command, or print them all if none is named.

    Returns:
        The exit status: 0; 1 after an error that was printed; 130 after Ctrl-C. argparse exits with 2.
    """
    table = "\n".join(f"  {name:<10}{summary}" for name, summary in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="hf-hybrid-ssm",
        usage="%(prog)s COMMAND ...",
        description="State-space/attention hybrids for transformers.",
        epilog=f"commands:\n{table}\n\n`hf-hybrid-ssm COMMAND --help` explains one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hf-hybrid-ssm {hf_hybrid_ssm.__version__}")
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        parser.print_help()
        return 0
    given = parser.parse_args(arguments)
    share_processors()

    def run() -> int:
        return importlib.import_module(f"{__name__}.{given.command}").main(given.rest)

    if given.command == "run":  # exactly as `python SCRIPT`
        return run()
    print_what_can_be_shown()
    expected = () if given.command in PASSING_ON else EXPECTED
    return status_of(f"hf-hybrid-ssm {given.command}", run, expected)
