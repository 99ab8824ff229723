"""Recipes one after the other in this process, which takes imports once: for each, its command line as a list of
strings, all in one JSON list."""

import json
import runpy
import sys
from pathlib import Path

for command in json.loads(sys.argv[1]):
    sys.path[0] = str(Path(command[0]).parent)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")
