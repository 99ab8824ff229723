"""These tests run in the environment that `make vllm` makes; where vLLM is missing they are not collected."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
