"""`benchmarks/long_*.py` of runs that take hours: what was stopped is continued, and tables grow with it."""

import pytest

from benchmarks import long_decoding, long_serving, long_training
from benchmarks.speed_tables import long_decoding as table


@pytest.mark.parametrize("variant", ["Longhorn, a window in layer 1", "BST SH", "LMU-ISA"])
def test_a_run_is_continued_where_it_was_stopped(variant, tmp_path, monkeypatch):
    monkeypatch.setattr(long_decoding, "SAVE_EVERY", 4)
    whole, parts = [], []
    long_decoding.drift(variant, (3, 10), tmp_path / "whole", lambda found: whole.append(dict(found["errors"])))

    def stop(run, tokens, is_mark, read=long_decoding.Run.read):
        if run.found["read"] == 4:  # saved, and no mark
            raise KeyboardInterrupt
        read(run, tokens, is_mark)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(long_decoding.Run, "read", stop)
        long_decoding.drift(variant, (3, 10), tmp_path / "parts", lambda found: parts.append(found))
    assert [list(found["errors"]) for found in parts] == [["3"]]
    long_decoding.drift(variant, (3, 10), tmp_path / "parts", lambda found: parts.append(dict(found["errors"])))
    assert parts[-1].keys() == {"3", "10"} and parts[-1] == pytest.approx(whole[-1], rel=1e-6)
    assert 0 < parts[-1]["10"] < 1e-5
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) == 2


def test_the_table_has_what_has_come_so_far():
    models = {
        "one": {"errors": {"100": 1e-7, "1000": 2e-7}, "megabytes": {"100": 300.0, "1000": 301.0}},
        "other": {"errors": {"100": 3e-7}, "megabytes": {"100": 299.6}},
    }
    lines = table({"models": models}).splitlines()
    assert lines[0].endswith("| 100 | 1,000 | resident MB, first to last |")
    assert lines[2:] == ["| one | 1.0e-07 | 2.0e-07 | 300 to 301 |", "| other | 3.0e-07 |  | 300 to 300 |"]


@pytest.mark.parametrize("mode", long_training.MODES)
def test_a_training_is_continued_where_it_was_stopped(mode, tmp_path):
    whole = long_training.trained(mode, (0, 20), tmp_path / "whole")
    long_training.trained(mode, (0, 10), tmp_path / "parts")
    assert long_training.trained(mode, (0, 20), tmp_path / "parts")["20"] == whole["20"]
    first, last = whole.values()
    assert first["parameters"] == pytest.approx(first["state"], abs=1e-8) == pytest.approx(0.99, abs=2e-4)
    assert (first == last) == (mode == "all in bfloat16")  # whose steps round to nothing


def test_a_folder_stays_within_its_bound(monkeypatch):
    monkeypatch.setattr(long_serving, "FOLDER_BYTES", 100_000)
    monkeypatch.setattr(long_serving, "RESTART_EVERY", 8)
    found = long_serving.keep(17)
    assert 0 < found["most_bytes"] <= 100_000 and found["restarts"] == found["went_on"] == 2
    assert found["other_answers"] == found["foreign_lost"] == 0
