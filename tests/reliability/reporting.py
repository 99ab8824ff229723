"""Where the reports of this folder lie, and what every one of them says about its making."""

import json
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

FOLDER = Path(__file__).parents[2] / "docs" / "reliability"


def made_with() -> dict[str, str]:
    """The versions a finding depends on."""
    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; bars and line ends inside a cell are taken care of."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(content: Any) -> str:
    return " ".join(str(content).split()).replace("|", "\\|")


def write_page(name: str, title: str, *parts: str) -> Path:
    """docs/reliability/<name>.md, with the versions at its end."""
    versions = ", ".join(f"{package} {version}" for package, version in made_with().items())
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.md"
    path.write_text("\n\n".join([f"# {title}", *parts, f"Made with {versions}."]) + "\n", encoding="utf-8")
    print(f"wrote {path.relative_to(FOLDER.parents[1])}")
    return path


def write_json(name: str, content: dict[str, Any]) -> Path:
    """docs/reliability/<name>.json, with the versions."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps({**made_with(), **content}, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path.relative_to(FOLDER.parents[1])}")
    return path
