"""Optional parts of the package: which of their requirements are missing, and what to type."""

import importlib.metadata
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

DISTRIBUTION = "hf-hybrid-ssm"
PROJECT = Path(__file__).parents[2] / "pyproject.toml"  # of a clone


def requirements_of(extra: str, of: str = DISTRIBUTION) -> list[str]:
    """What an extra asks for, such as "datasets>=3.0": from the installed package's own metadata, or from the clone
    whose sources are used without having been installed. `of` is another package than this one.

    Raises:
        ValueError: there is no such extra.
    """
    try:
        requirements = importlib.metadata.requires(of) or []
    except importlib.metadata.PackageNotFoundError:
        if of != DISTRIBUTION:
            raise
        requirements = list(_of_clone())
    named = [re.match(r"(.*?)\s*;.*\bextra\s*==\s*['\"]([^'\"]+)", line) for line in requirements]
    by_extra: dict[str, list[str]] = {}
    for line, match in zip(requirements, named, strict=True):
        if match and _holds_here(line, match[2]):
            by_extra.setdefault(match[2], []).append(match[1])
    if extra not in by_extra:
        raise ValueError(f"extra={extra!r} is not one of {', '.join(map(repr, sorted(by_extra)))}.")
    return by_extra[extra]


def missing_requirements(*extras: str, of: str = DISTRIBUTION) -> list[str]:
    """Of the requirements of these extras, those that are not installed, or in another version than is asked for."""
    wanted = dict.fromkeys(line for extra in extras for line in requirements_of(extra, of))
    return [line for line in wanted if not _is_met(line)]


def missing_modules(*extras: str) -> set[str]:
    """The same as names to import."""
    return {_module(line) for line in missing_requirements(*extras)}


def install_command(*extras: str, of: str = DISTRIBUTION) -> str:
    """What to type for these extras; it works anywhere, since it names what an index has."""
    wanted = missing_requirements(*extras, of=of)
    wanted = wanted or list(dict.fromkeys(line for extra in extras for line in requirements_of(extra, of)))
    return f"pip install {' '.join(map(repr, wanted))}"


def _of_clone() -> Iterator[str]:
    """The same lines as the metadata of the package, once it is built, will have."""
    if PROJECT.is_file():
        project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
        for extra, lines in project["optional-dependencies"].items():
            for line in lines:
                requirement, _, marker = line.partition(";")
                condition = f"({marker.strip()}) and " if marker else ""
                yield f'{requirement.strip()}; {condition}extra == "{extra}"'


def _holds_here(line: str, extra: str) -> bool:
    from packaging.requirements import Requirement  # transformers brings it

    marker = Requirement(line).marker
    return marker is None or marker.evaluate({"extra": extra})


# of what the extras ask for, the packages that are imported by another name than their own
MODULES = {"pyyaml": "yaml", "scikit-learn": "sklearn", "lm-eval": "lm_eval", "rouge-score": "rouge_score"}


def _module(line: str) -> str:
    name = re.split(r"[^\w.-]", line, maxsplit=1)[0].lower()
    return MODULES.get(name, name.replace("-", "_"))


def _is_met(line: str) -> bool:
    from packaging.requirements import Requirement

    wanted = Requirement(line)
    try:
        return wanted.specifier.contains(importlib.metadata.version(wanted.name), prereleases=True)
    except importlib.metadata.PackageNotFoundError:
        return False
