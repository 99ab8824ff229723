"""Let every program of this environment know the families, without `import hf_hybrid_ssm`.

Writes one line to the environment's site-packages, in a file of its own. Python reads it whenever it starts; nothing
is imported until a program imports transformers, and then neither torch nor any model. `hf-hybrid-ssm disable`
removes the file, and nothing else is left.

Examples:
    hf-hybrid-ssm enable
"""

import argparse
import json
import sysconfig
from pathlib import Path

from hf_hybrid_ssm.cli.parsing import add_json, parser_of

FILE = "hf_hybrid_ssm_enabled.pth"
# A finder that finds nothing: asked for transformers, it leaves, and imports the package if it is still installed. One
# line, as `site` executes no more, and without any import, as it runs at every start of Python.
LINE = (
    "import sys; sys.meta_path.insert(0, type('HfHybridSsmEnabled', (), {'find_spec': classmethod("
    "lambda cls, name, path=None, target=None, sys=sys: None if name != 'transformers' else ("
    "sys.meta_path.remove(cls), __import__('importlib.util').util.find_spec('hf_hybrid_ssm') "
    "and __import__('hf_hybrid_ssm'), None)[2])}))\n"
)


def enabling_file() -> Path:
    """The file that `enable` writes."""
    return Path(sysconfig.get_path("purelib"), FILE)


def report(path: Path, done: str, as_json: bool) -> None:
    enabled = path.is_file()
    print(json.dumps({"enabled": enabled, "file": str(path)}) if as_json else f"{done} {path}")


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("enable", __doc__)
    add_json(parser)
    return parser


def main(arguments: list[str]) -> int:
    args = build_parser().parse_args(arguments)
    path = enabling_file()
    path.write_text(LINE, encoding="utf-8")
    report(path, "The families are known from now on; undo it with hf-hybrid-ssm disable. Wrote", args.json)
    return 0
