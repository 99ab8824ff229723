"""transformers' own checks of FSDP2: its plan shards every family in any dtype, and training and loading go on.

`FSDPTesterMixin` starts processes for each test; here one launch runs its checks for all models (see `fsdp.py`).
"""

import json
from pathlib import Path

import pytest
from filelock import FileLock

from tests.distributed.launching import in_two_processes
from tests.upstream.fsdp import ALL


@pytest.fixture(scope="module")
def found(tmp_path_factory, testrun_uid, worker_id):
    """One launch for all workers of a run."""
    folder = tmp_path_factory.getbasetemp()
    report = (folder if worker_id == "master" else folder.parent) / f"fsdp-{testrun_uid}.json"
    with FileLock(f"{report}.lock"):
        if not report.is_file():
            in_two_processes(Path(__file__).with_name("fsdp.py"), report)
    return {(case, check): error for case, check, error in json.loads(report.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("case, check", ALL)
def test_fsdp2(found, case, check):
    assert found[case, check] is None, found[case, check]
