"""Changes are typed, tried one after the other, and told as an argument or as an option of the command."""

from ctdr_lightning.memory.account.advice import MEMORY, Change, nearest
from ctdr_lightning.memory.account.batch import BatchAccount
from tests.memory.graphs import chain, graph_trace

ACCOUNT = BatchAccount(graph_trace(chain([8] * 9)))


def change(peak_bytes, **options):
    return Change(MEMORY, "sub_batches", 4, ACCOUNT, peak_bytes, **options)


def test_the_first_that_fits_is_taken_and_no_later_one_tried():
    tried = []

    def changes():
        for peak_bytes in (30, 10, 5):
            tried.append(peak_bytes)
            yield change(peak_bytes)

    assert nearest(changes(), 10).peak_bytes == 10
    assert tried == [30, 10]
    assert nearest([change(30)], 10) is None


def test_words():
    told = "use memory=Memory(..., sub_batches=4), with which it takes 1.0 MiB a part"
    assert str(change(2**20, note=" a part")) == told
    assert change(2**20).as_option == "write --sub-batches 4, with which it takes 1.0 MiB"
