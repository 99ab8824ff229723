"""End to end in a few minutes on two cores, without a network: train a small Longhorn on text that Python carries,
evaluate, save, reload, generate, score with lm-eval.

Writes summary.json, loss.png and the model below --output. Needs the extras: pip install 'hf-hybrid-ssm[train,eval]'.
"""

import importlib.util
from pathlib import Path

from hf_hybrid_ssm.cli.parsing import parser_of
from hf_hybrid_ssm.cli.run import run_file

NEEDED = ("datasets", "lm_eval", "matplotlib", "yaml")


def recipes_folder() -> Path:
    """The recipes: inside of the installed package, and in a clone beside its sources.

    Raises:
        FileNotFoundError: neither is there.
    """
    package = Path(__file__).parents[1]
    for folder in (package / "recipes", package.parents[1] / "recipes"):
        if (folder / "demo.py").is_file():
            return folder
    raise FileNotFoundError(f"no recipes beside {package}: install hf-hybrid-ssm again, or use a clone.")


def main(arguments: list[str]) -> int:
    parser = parser_of("demo", __doc__)
    parser.add_argument("--output", default="runs/demo", metavar="FOLDER", help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=900, metavar="N", help="of training (default: %(default)s)")
    parser.add_argument("--questions", type=int, default=200, metavar="N", help="of lm-eval (default: %(default)s)")
    parser.add_argument("--documents", type=int, metavar="N", help="to train and evaluate on, at the most")
    given = parser.parse_args(arguments)
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise SystemExit(f"{', '.join(missing)} not installed: pip install 'hf-hybrid-ssm[train,eval]'.")
    options = [f"--{name}={value}" for name, value in vars(given).items() if value is not None]
    return run_file(recipes_folder() / "demo.py", options)
