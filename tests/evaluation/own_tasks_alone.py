"""`hf-hybrid-ssm`, where lm-eval has the tasks of --include_path alone: its own 14,000 files take long to read."""

import functools
import sys

import lm_eval.tasks

from hf_hybrid_ssm.cli import main

lm_eval.tasks.TaskManager = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
