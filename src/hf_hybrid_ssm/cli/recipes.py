"""List the recipes, which `hf-hybrid-ssm recipe NAME` runs, and the configurations that come with them."""

import ast
import json
from pathlib import Path

from hf_hybrid_ssm.cli.parsing import parser_of
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


def main(arguments: list[str]) -> int:
    parser = parser_of("recipes", __doc__)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    given = parser.parse_args(arguments)
    folder = recipes_folder()
    recipes = {name: summary_of(folder / f"{name}.py") for name in recipe_names()}
    configs = {name: comment_of(folder / "configs" / f"{name}.yaml") for name in config_names()}
    if given.json:
        print(json.dumps({"folder": str(folder), "recipes": recipes, "configurations": configs}, indent=2))
        return 0
    for title, found in (("recipes", recipes), ("configurations", configs)):
        width = max(map(len, found))
        print(f"{title}:", *(f"  {name:<{width}}  {text}" for name, text in found.items()), "", sep="\n")
    print("hf-hybrid-ssm recipe NAME [CONFIG] [key=value ...]; CONFIG is one of these, or a YAML file of your own")
    return 0
