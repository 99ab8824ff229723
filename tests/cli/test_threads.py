"""How many threads there are, and that they do not spin, before torch is loaded."""

import subprocess
import sys

import pytest

from hf_hybrid_ssm.cli import threads
from hf_hybrid_ssm.cli.threads import POLICY, THREADS, processor_quota, share_processors


@pytest.fixture
def groups(tmp_path):
    """Writes control groups: path of a file → text; returns the arguments of `processor_quota`."""

    def write(own, files):
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / "own").write_text(own)
        return tmp_path / "cgroup", tmp_path / "own"

    return write


FIRST_VERSION = "3:cpu,cpuacct:/x\n1:memory:/\n"
PERIOD = {"cpu,cpuacct/x/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    "own, files, quota",
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/cpu.max": "50000 100000\n", "a/b/cpu.max": "max 100000\n"}, 0.5),
        ("0::/a/b\n", {"a/cpu.max": "400000 100000\n", "a/b/cpu.max": "200000 100000\n"}, 2.0),
        (FIRST_VERSION, PERIOD | {"cpu,cpuacct/x/cpu.cfs_quota_us": "-1\n"}, None),
        (FIRST_VERSION, PERIOD | {"cpu,cpuacct/x/cpu.cfs_quota_us": "300000\n"}, 3.0),
        ("0::/\n", {"cpu.max": "what\n"}, None),
        ("0::/\n", {}, None),
    ],
)
def test_quotas_of_both_versions_of_control_groups(groups, own, files, quota):
    assert processor_quota(*groups(own, files)) == quota


def test_where_there_are_no_control_groups(tmp_path):
    assert processor_quota(tmp_path / "none", tmp_path / "neither") is None


@pytest.mark.parametrize("quota, count, wanted", [(None, 8, None), (1.5, 8, "2"), (0.5, 8, "1"), (8.0, 8, None)])
def test_threads_follow_the_quota(monkeypatch, quota, count, wanted):
    for name in (POLICY, THREADS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(threads, "processor_quota", lambda: quota)
    monkeypatch.setattr(threads, "processors", lambda: count)
    share_processors()
    assert threads.os.environ.get(THREADS) == wanted and threads.os.environ[POLICY] == "passive"


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv(POLICY, "active")
    monkeypatch.setenv(THREADS, "7")
    monkeypatch.setattr(threads, "processor_quota", lambda: 0.5)
    share_processors()
    assert threads.os.environ[POLICY] == "active" and threads.os.environ[THREADS] == "7"


@pytest.mark.parametrize("start", ["from hf_hybrid_ssm.cli import main; main(['check', 'NOWHERE'])", "import _lib"])
def test_commands_and_recipes_decide_it_before_torch_is_there(start, tmp_path, monkeypatch):
    monkeypatch.delenv(POLICY, raising=False)
    script = f"import os, sys; sys.path.insert(0, 'recipes'); {start}; "
    script += f"print(os.environ['{POLICY}'], 'torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.stdout == "passive False\n"
