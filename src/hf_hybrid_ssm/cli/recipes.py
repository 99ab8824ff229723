"""List the recipes, which `hf-hybrid-ssm recipe NAME` runs, and the configurations that come with them.

Examples:
    hf-hybrid-ssm recipes
    hf-hybrid-ssm recipes --all
    hf-hybrid-ssm recipes --all --long
"""

import argparse
import ast
import json
import shutil
import textwrap
from pathlib import Path

from hf_hybrid_ssm.cli.parsing import add_json, parser_of
from hf_hybrid_ssm.cli.recipe import config_names, recipe_names, recipes_folder


def summary_of(path: Path) -> str:
    """The first line of a script's docstring; nothing is imported for it."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def comment_of(path: Path) -> str:
    """The first sentence of the comment that a settings file begins with."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = []
    for line in lines:
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").strip())
    return " ".join(comment).partition(". ")[0].rstrip(".")


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("recipes", __doc__)
    parser.add_argument("--all", action="store_true", help="list the configurations too")
    parser.add_argument("--long", action="store_true", help="show whole descriptions, however wide the terminal")
    add_json(parser)
    return parser


def main(arguments: list[str]) -> int:
    args = build_parser().parse_args(arguments)
    folder = recipes_folder()
    recipes = {name: summary_of(folder / f"{name}.py") for name in recipe_names()}
    configs = {name: comment_of(folder / "configs" / f"{name}.yaml") for name in config_names()}
    if args.json:
        print(json.dumps({"folder": str(folder), "recipes": recipes, "configurations": configs}, indent=2))
        return 0
    print(table("recipes", recipes, args.long), end="\n\n")
    if args.all:
        print(table("configurations", configs, args.long), end="\n\n")
    print("hf-hybrid-ssm recipe NAME [CONFIG] [KEY=VALUE ...]")
    if not args.all:
        print(f"CONFIG is a YAML file of your own, or one of {len(configs)} that `recipes --all` lists.")
    return 0


def table(title: str, summaries: dict[str, str], is_long: bool) -> str:
    """Names and summaries, each on one line, which the terminal's width cuts unless all of it is wanted."""
    width = max(map(len, summaries))
    room = max(shutil.get_terminal_size().columns - width - 4, 20)
    shown = {
        name: text if is_long else textwrap.shorten(text, room, placeholder=" ...") for name, text in summaries.items()
    }
    return "\n".join([f"{title}:", *(f"  {name:<{width}}  {text}" for name, text in shown.items())])
