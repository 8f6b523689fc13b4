"""Each wait, each event and each home taken away in turn is noticed by the programs over virtual streams."""

import pytest

from ctdr_lightning.memory.holders import disk, host, lanes
from ctdr_lightning.memory.tape import tape
from tests.virtual_cuda.mutations import Mutation
from tests.virtual_cuda.scenarios import PARCELS, complaints, prepared, whole_tape

TABLE = (
    Mutation("the current stream does not wait", lanes._Recorded, "wait", "current.wait_event(self.event)", "pass"),
    Mutation("the home stream does not wait", lanes._Recorded, "wait", "self._home.wait_event(self.event)", "pass"),
    Mutation("the thread does not wait", lanes._Recorded, "finish", "self.event.synchronize()", "pass"),
    Mutation("a lane does not wait for the step", lanes.StreamLane, "_on", "(asked.events[device], *after)", "after"),
    Mutation(
        "a lane does not wait for earlier copies",
        lanes.StreamLane,
        "_on",
        "(asked.events[device], *after)",
        "(asked.events[device],)",
    ),
    Mutation(
        "the event is before the copies",
        lanes.StreamLane,
        "_on",
        "event.record(stream)",
        "event.record(stream); event.at -= len(pairs)",
    ),
    Mutation(
        "a lane is on the current device", lanes.StreamLane, "_on", "torch.cuda.Stream(device)", "torch.cuda.Stream()"
    ),
    Mutation("the moment is the present", lanes.StreamLane, "copy", "moment if isinstance(moment, _Asked) else ", ""),
    Mutation(
        "the moment is of the current device",
        lanes._Asked,
        "__init__",
        "current_stream(device) for",
        "current_stream() for",
    ),
    Mutation("what is handed out is not recorded", lanes._Asked, "hand_out", "tensor.record_stream(current)", "pass"),
    Mutation(
        "memory is not taken at home", lanes._Asked, "at_home", "stack.enter_context(torch.cuda.stream(home))", "pass"
    ),
    Mutation("gone does not wait", host._Pinned, "gone", "self._out.wait()", "pass"),
    Mutation("fetch does not wait", host._Pinned, "fetch", "self._copies[-1].ticket.wait()", "pass"),
    Mutation("fetch does not hand out", host._Pinned, "fetch", "self._asked.hand_out(landing)", "pass"),
    Mutation("what is dropped is not waited for", host._Pinned, "__del__", "copies.ticket.wait()", "pass"),
    Mutation(
        "host memory is written again too early", host.Host, "follow", "self._given_back[copies.way] = copies", "pass"
    ),
    Mutation("the way back does not wait for the way out", host._Pinned, "start", "[self._out]", "[]"),
    Mutation("a cut tensor loses its second part", host._Pinned, "_pieces", "done += piece.nbytes", "pass"),
    Mutation(
        "the disk does not wait for the step",
        disk._Stored,
        "__init__",
        "list(self._places), self._asked",
        "list(self._places), None",
    ),
    Mutation("the disk lands in memory in use", disk._Stored, "start", "self._written, free", "self._written, None"),
    Mutation("the disk does not hand out", disk._Stored, "fetch", "self._asked.hand_out(landing)", "pass"),
    Mutation("the disk's landing is not at home", disk._Stored, "start", "with self._asked.at_home():", "if True:"),
    Mutation(
        "the disk writes before it has copied", disk.Disk, "write_all", ", moment=ready).finish()", ", moment=ready)"
    ),
    Mutation(
        "the disk reads on before it has copied", disk.Disk, "read_all", ", moment=free).finish()", ", moment=free)"
    ),
    Mutation(
        "the disk does not wait until it is written",
        disk._Stored,
        "gone",
        '_result(self._written, "written to")',
        "pass",
    ),
    Mutation(
        "the tape's own holders are for the processor",
        tape,
        "_own_holders",
        "HolderOptions(device=tape.plan.trace.device)",
        "",
    ),
)


def found_by(monkeypatch, folder):
    """The first program that complains or fails, by name."""
    for program in (*PARCELS, whole_tape):
        for name in ("host", "disk") if program is not whole_tape else ("residual",):
            for schedule, seed in (("late", 0), ("random", 0), ("eager", 0)):
                found = complaints(program, schedule, seed, name, folder, monkeypatch, catch=True)
                if found:
                    return f"{program.__name__} {name} {schedule}: {found[0]}"
    return ""


@pytest.mark.parametrize("mutation", TABLE, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_a_mutation_is_noticed(mutation, tmp_path, monkeypatch):
    prepared("residual")
    mutation.apply(monkeypatch)
    noticed = found_by(monkeypatch, tmp_path)
    assert noticed
