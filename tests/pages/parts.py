"""A small planned run, and a reader of its page."""

from html.parser import HTMLParser

import torch

from ctdr_lightning import decompose, plan, simulate
from ctdr_lightning.memory import record_fake
from ctdr_lightning.pages.run_page import RunParts
from ctdr_lightning.pages.run_record import RunRecord, layer_rows
from ctdr_recipes.classifier import cnn

VOID = {"meta", "wbr"}


def planned_run(name="digits", share=0.7, accuracy=0.9, **settings):
    """A decomposed network's step, planned for a share of its peak, with a history of three epochs."""
    torch.manual_seed(0)
    net, images = cnn([16, 32, 32, 32], [1, 1, 2, 1]), torch.empty(32, 1, 16, 16, device="meta")
    dense = record_fake(net, images, lambda model, batch: model(batch).sum(), device="a100")
    report = decompose(net, 0.4, select="!head")
    trace = record_fake(net, images, lambda model, batch: model(batch).sum(), device="a100")
    made = plan(trace, int(simulate(trace).peak_bytes * share))
    history = [
        {"epoch": float(epoch), "step": 10.0 * epoch, "val/acc": accuracy - 0.3 / (epoch + 1), "ctdr/step_time_s": 0.01,
         "ctdr/samples_per_s": 3200.0 + epoch, "ctdr/peak_memory_gib": made.peak_bytes / 2**30}
        for epoch in range(3)
    ]  # fmt: skip
    record = RunRecord(
        name, {"rank": "0.4", **settings}, report.parameters_before, report.parameters_after, 0, layer_rows(report),
        tuple(history), ("Recorded a step.", "A warning about <b>layers</b>."),
    )  # fmt: skip
    return RunParts(record, made, simulate(dense))


class Reader(HTMLParser):
    """Every element with its attributes, in order; refuses elements that are not closed."""

    def __init__(self, text):
        super().__init__()
        self.found, self._open, self.texts = [], [], []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self._open[-1] if self._open else "", data))

    def all(self, tag, class_=None):
        return [a for t, a in self.found if t == tag and (class_ is None or class_ in (a.get("class") or "").split())]

    def text(self, tag):
        return [data for opened, data in self.texts if opened == tag]
