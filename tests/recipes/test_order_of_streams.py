"""Each pass over a stream has an order of its own, of the files and of the rows in the buffer: either alone would do
for a test of the whole."""

from _lib.rows import RowStream
from datasets import IterableDataset

FILES, DOCUMENTS = 8, 6


def _of_files(files):
    for file in files:
        for number in range(DOCUMENTS):
            yield {"input_ids": [DOCUMENTS * file + number]}


def _cut(documents):
    for tokens in documents:
        yield {"input_ids": tokens}


def passes(count, **options):
    """What the first passes over eight files yield."""
    documents = IterableDataset.from_generator(_of_files, gen_kwargs={"files": list(range(FILES))})
    stream = iter(RowStream(documents, _cut, **options))
    return [[next(stream)["input_ids"][0] for _ in range(FILES * DOCUMENTS)] for _ in range(count)]


def test_the_files_come_in_another_order_in_each_pass(monkeypatch):
    monkeypatch.setattr("_lib.rows.shuffled", lambda rows, size, random: rows)  # the buffer keeps the order
    found = passes(3, seed=0, shuffle_buffer=4)
    # read one after the other or in turn, as the version of datasets does
    orders = [list(dict.fromkeys(row // DOCUMENTS for row in rows)) for rows in found]
    assert all(sorted(order) == list(range(FILES)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert passes(1, seed=1, shuffle_buffer=4)[0] != found[0] == passes(1, seed=0, shuffle_buffer=4)[0]


def test_the_buffer_draws_anew_in_each_pass(monkeypatch):
    monkeypatch.setattr(IterableDataset, "shuffle", lambda self, **options: self)  # the files keep their order
    found = passes(3, seed=0, shuffle_buffer=16)
    assert all(sorted(rows) == list(range(FILES * DOCUMENTS)) for rows in found)
    assert len({tuple(rows) for rows in found}) == 3
    assert passes(1, seed=1, shuffle_buffer=16)[0] != found[0] == passes(1, seed=0, shuffle_buffer=16)[0]
