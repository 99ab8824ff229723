"""Run a recipe, from an installed package as from a clone: train, fine-tune, upcycle, compare, evaluate, publish.

CONFIG is a YAML file of your own, or one of the configurations that `hf-hybrid-ssm recipes --all` lists. KEY=VALUE
pairs win over the file, and may be all there is. `hf-hybrid-ssm recipe NAME --help` shows the keys.

Examples:
    hf-hybrid-ssm recipe pretrain_clm longhorn/books_cpu max_steps=100 output_dir=runs/mine
    hf-hybrid-ssm recipe sft settings.yaml model_name_or_path=FOLDER train_files=talks.jsonl
    hf-hybrid-ssm recipe evaluate_lm --model FOLDER --files text.jsonl
"""

import argparse
from os.path import isfile
from pathlib import Path

from hf_hybrid_ssm.cli.parsing import parser_of
from hf_hybrid_ssm.cli.recipe_fields import setting_names
from hf_hybrid_ssm.cli.run import run_file
from hf_hybrid_ssm.cli.settings import check_settings_known, closest, setting_pairs, starts_with_pair
from hf_hybrid_ssm.extras import install_command, missing_modules

EXTRAS = {"sft": ("train", "sft"), "lm_eval_table": ("train", "eval"), "demo": ("train", "eval")}
"""What a recipe needs beside the extra `train`."""


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


def recipe_names() -> list[str]:
    """The recipes' names: those of their files without `.py`."""
    return sorted(path.stem for path in recipes_folder().glob("*.py"))


def config_names() -> list[str]:
    """The configurations that come with the recipes, such as "longhorn/books_cpu"."""
    folder = recipes_folder() / "configs"
    names = sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))
    return [name for name in names if not name.startswith("accelerate/")]


def settings_file(name: str) -> str:
    """The path of a settings file: one of the user's own, or one of `config_names()`."""
    if isfile(name):
        return name
    known = recipes_folder() / "configs" / f"{name.removesuffix('.yaml')}.yaml"
    return str(known) if isfile(known) else name


def run_recipe(name: str, arguments: list[str]) -> int:
    """The recipe in this process.

    Raises:
        SystemExit: with its own status, or because a package is missing, which the message says how to install.
    """
    extras = EXTRAS.get(name, ("train",))
    try:
        return run_file(recipes_folder() / f"{name}.py", arguments)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in missing_modules(*extras):
            raise
        raise SystemExit(f"{error.name} is not installed; this recipe needs: {install_command(*extras)}") from None


def build_parser() -> argparse.ArgumentParser:
    """The recipe itself reads what follows its name."""
    parser = parser_of("recipe", __doc__)
    parser.add_argument("name", metavar="NAME", help="recipe, one of those that `hf-hybrid-ssm recipes` lists")
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="settings: a YAML file, or a name")
    parser.add_argument("settings", metavar="KEY=VALUE", nargs="*", help="settings that win over those of CONFIG")
    return parser


def main(arguments: list[str]) -> int:
    parser = build_parser()
    args = parser.parse_args(arguments[:1])
    name, rest = args.name.removesuffix(".py"), list(arguments[1:])
    if name not in recipe_names():
        parser.error(f"there is no recipe {args.name!r}{closest(name, recipe_names())}")
    if rest and not rest[0].startswith("-") and "=" not in rest[0]:
        rest[0] = settings_file(rest[0])
    check_settings(name, rest)
    return run_recipe(name, rest)


def check_settings(name: str, arguments: list[str]) -> None:
    """The keys on the command line are the recipe's, said before anything slow is imported; the recipe itself looks
    at those of the file, and at values.

    Raises:
        SystemExit: with the line that says which key is unknown, and what may have been meant.
    """
    known = setting_names(recipes_folder() / f"{name}.py")
    if known is None or not arguments or arguments[0] in ("-h", "--help"):
        return
    try:
        pairs = setting_pairs(arguments if starts_with_pair(arguments) else arguments[1:])
        check_settings_known({key.partition(".")[0] for key, _ in pairs}, known, f"hf-hybrid-ssm recipe {name}")
    except ValueError as error:
        raise SystemExit(f"{name}.py: {error}") from None
