"""Freed memory that stays with the process: counted in page faults, in a process of its own."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, torch
from hf_hybrid_ssm.training.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(2**24)  # 64 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
faults()
default, done = faults(), keep_freed_memory()
for _ in range(5):  # until what is kept has grown enough
    faults()
print(default, done, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")
def test_freed_memory_is_used_again_without_page_faults():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    default, kept, after = done.stdout.split()
    assert kept == "True" and int(after) < 100
    assert int(default) > 4 * int(after)  # even where a page is 2 MiB


def test_other_systems_are_left_alone(monkeypatch):
    from hf_hybrid_ssm.training import memory

    monkeypatch.setattr(memory.platform, "libc_ver", lambda: ("", ""))
    assert memory.keep_freed_memory() is False
