"""What the commands' parsers share."""

import argparse
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
EXAMPLES = "\nExamples:\n"


def parser_of(command: str, docstring: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the docstring of the command's module, as it is written there: what the command does
    before the arguments, and the examples after them."""
    description, _, examples = (docstring or "").partition(EXAMPLES)
    return argparse.ArgumentParser(
        prog=f"hf-hybrid-ssm {command}",
        description=description.strip(),
        epilog=f"examples:\n{examples.rstrip()}" if examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    """The model that a command works with (see `loading.loaded`)."""
    parser.add_argument(
        "model", metavar="FOLDER", help="folder of a saved model with its tokenizer, or a name on the Hub"
    )
    add_teacher(parser)
    add_device(parser)
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="dtype of the weights; auto is as saved (default: %(default)s)"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json`, for commands whose output a program may read."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def add_device(parser: argparse.ArgumentParser) -> None:
    """`--device`, for commands that compute with a model."""
    parser.add_argument(
        "--device", metavar="NAME", help="device of torch (default: cuda where there is one, else cpu)"
    )


def add_teacher(parser: argparse.ArgumentParser) -> None:
    """`--teacher`, for commands that load a model which may be a delta."""
    parser.add_argument(
        "--teacher",
        metavar="PATH_OR_NAME",
        help="teacher of a delta: a folder, a name on the Hub, a GGUF file, or `recorded` for the Hub's name that the "
        "delta gives (default: what HF_HYBRID_SSM_TEACHER says)",
    )


def value_of(text: str) -> Any:
    """The value of FIELD=VALUE: JSON where it is JSON, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def check_is_folder(folder: str | Path) -> None:
    """A FileNotFoundError or NotADirectoryError that names what is not a folder."""
    if not Path(folder).exists():
        raise FileNotFoundError(f"there is no folder {str(folder)!r}.")
    if not Path(folder).is_dir():
        raise NotADirectoryError(f"{str(folder)!r} is a file; the folder of a saved model was expected.")


def check_holds_model(folder: str | Path) -> None:
    """What can be said before torch is imported: the folder is there, and its configuration too.

    Raises:
        OSError: names what is missing.
    """
    check_is_folder(folder)
    if not os.path.lexists(Path(folder, "config.json")):
        raise FileNotFoundError(f"{str(folder)!r} has no config.json: the folder of a saved model was expected.")


def check_model_name(name: str) -> None:
    """`check_holds_model` of a name that is that of a folder, or must have been meant as one."""
    if is_path(name) or Path(name).is_dir():
        check_holds_model(name)


def is_path(name: str) -> bool:
    """Whether a name that is not of a folder here must have been meant as one, and cannot be that of a repository."""
    first, *rest = Path(name).parts or (".",)
    is_written_so = Path(name).is_absolute() or name.startswith((".", "~")) or name.endswith("/")
    return is_written_so or len(rest) > 1 or (len(rest) == 1 and Path(first).is_dir())


def check_writable(path: Path, *, is_folder: bool = False) -> None:
    """Before hours of work: a file (or folder) can be written there.

    Raises:
        OSError: names the file that is in the way.
    """
    if is_folder and path.is_file():
        raise NotADirectoryError(f"{str(path)!r} is a file; a folder to write into was expected.")
    if not is_folder and path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder; a file to write was expected.")
    if not is_folder and not path.absolute().parent.exists():
        raise FileNotFoundError(f"there is no folder {str(path.parent)!r} to write {path.name!r} into.")
    for parent in path.absolute().parents:
        if parent.is_dir():
            return
        if parent.exists():
            raise NotADirectoryError(f"{str(path)!r} lies below {str(parent)!r}, which is a file.")


def given_fields(pairs: Iterable[str]) -> dict[str, Any]:
    """`config.FIELD=VALUE` of the command line → value by field.

    Raises:
        ValueError: another form.
    """
    fields = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.startswith("config.") or name == "config.":
            raise ValueError(f"{pair!r}: config.FIELD=VALUE was expected.")
        fields[name.removeprefix("config.")] = value_of(value)
    return fields
