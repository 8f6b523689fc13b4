"""The user's alternatives to recomputing saved tensors: places to move them to, codecs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from ctdr_lightning.basics.devices import DEVICES, DeviceModel
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.memory.codecs import CODECS
from ctdr_lightning.memory.holders.base import HOLDERS, HolderOptions, Holders
from ctdr_lightning.memory.holders.measure import measure_codecs, measure_links
from ctdr_lightning.memory.traces.facts import facts_of
from ctdr_lightning.memory.traces.machine import CodecCost, Link
from ctdr_lightning.memory.traces.trace import Trace

# Sustained rates of pinned copies, 80 % of the bus: PCIe 3 x16 for Volta and Turing, 4 for Ampere and Ada, 5 later.
_HOST_BYTES_PER_S = {7: 12e9, 8: 24e9, 9: 50e9, 10: 50e9, 12: 50e9}  # by the compute capability's major number
_NVME = Link("disk", 2e9, 3e9, latency_s=1e-4, granule=4096)  # one NVMe drive, sustained
# A codec of a few elementwise passes reads and writes about six times its input.
_PASSES = 6
_CODECS_OF = {"cdma": "zvc", "cswap": "zvc", "gist": "exact"}


def _table_cost(name: str, device: DeviceModel) -> CodecCost:
    codec, rate, call_s = CODECS[name], _PASSES / device.bytes_per_s, _PASSES * device.launch_s
    return CodecCost(
        name, codec.exact, codec.needs, codec.payload_bits, codec.side_bits, codec.drops_zeros, rate, rate,
        encode_call_s=call_s, decode_call_s=call_s,
    )  # fmt: skip


def _names(argument: str, given: str | Sequence[str] | None, known: Sequence[str]) -> tuple[str, ...]:
    names = () if given is None else (given,) if isinstance(given, str) else given
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{argument}={given!r} is neither a name nor a list of names.", f"Valid names: {', '.join(known)}."
        )
    for name in names:
        if name not in known:
            raise ConfigError(f"{argument}={name!r} is not known.", f"Valid names: {', '.join(known)}.")
    return tuple(dict.fromkeys(names))


def codecs_of(policy: str, *, budgeted: bool) -> str | None:
    """The codecs of a plan for which the user names none.

    Args:
        policy: The policy's name. Published systems that are about codecs take their exact ones.
        budgeted: Whether there is a budget.
    """
    return "auto" if budgeted and policy == "auto" else _CODECS_OF.get(policy)


@dataclass(frozen=True)
class Places:
    """Places where saved tensors may wait, and the codecs that may compress them.

    Attributes:
        offload: Names of holders.
        codecs: Names of codecs.
        folder: Where the disk's file is; None takes the system's folder for temporary files.
        device: Type of the device that the steps run on.
        by_default: Whether ``"auto"`` chose the codecs. Default codecs are never used to meet a budget, because
            the result would depend on measured codec times; and they are for processors only, because they have not run
            on a GPU yet.

    Example:
        >>> Places.read("disk", None, "exact").offload
        ('disk',)
    """

    offload: tuple[str, ...] = ()
    codecs: tuple[str, ...] = ()
    folder: Path | None = None
    device: str = "cpu"
    by_default: bool = False

    @classmethod
    def read(
        cls,
        offload: str | Sequence[str] | None,
        disk_folder: str | Path | None,
        codecs: str | Sequence[str] | None,
    ) -> Places:
        """Check the user's arguments.

        Args:
            offload: ``"host"``, ``"disk"``, a list of these, or None.
            disk_folder: A folder, or None.
            codecs: ``"exact"`` for all codecs that leave gradients unchanged, ``"auto"`` for those of them whose bytes
                do not depend on contents, a list of names, or None.

        Raises:
            ConfigError: If a name is not known, or the folder is given without the disk.
        """
        places = _names("offload", offload, list(HOLDERS))
        if disk_folder is not None and not isinstance(disk_folder, str | Path):
            raise ConfigError(f"disk_folder={disk_folder!r} is not a folder.", "Write a path.")
        if disk_folder is not None and "disk" not in places:
            raise ConfigError(f"disk_folder={str(disk_folder)!r} without offload='disk'.", "Write offload='disk'.")
        exact = [name for name in CODECS if CODECS[name].exact]
        sure = [name for name in exact if not CODECS[name].drops_zeros]
        groups = {"exact": exact, "auto": sure}
        asked = _names("codecs", codecs, [*CODECS, *groups])
        chosen = tuple(dict.fromkeys(chain(*(groups.get(name, [name]) for name in asked))))
        folder = None if disk_folder is None else Path(disk_folder)
        return cls(places, chosen, folder, by_default=asked == ("auto",))

    def on(self, device: str) -> Places:
        """The same for steps on a type of device, without the codecs that are not for it by default.

        Raises:
            ConfigError: If the host is asked for and the steps run in host memory anyway.
        """
        if device != "cuda" and "host" in self.offload:
            raise ConfigError(
                f"offload='host': the steps run on {device!r}, whose memory is the host's.", "Write offload='disk'."
            )
        codecs = () if self.by_default and device != "cpu" else self.codecs
        return replace(self, device=device, codecs=codecs)

    @property
    def drops_zeros(self) -> bool:
        """Whether a codec leaves zeros out, so that recorded steps are to count them."""
        return any(CODECS[name].drops_zeros for name in self.codecs)

    def holders(self) -> Holders:
        """The holders, each made when it is first used."""
        return Holders(HolderOptions(self.folder, None, self.device))

    def links(self) -> list[Link]:
        """Measure this machine's links.

        Raises:
            ConfigError: If the disk's folder cannot be used.
        """
        return measure_links(self.offload, HolderOptions(self.folder, None, self.device))

    def codec_costs(self, trace: Trace) -> list[CodecCost]:
        """Costs of the codecs that the step can use on this machine; each is measured once per process.

        Args:
            trace: The recorded step.
        """
        costs = measure_codecs(_useful(self.codecs, trace), self.device)
        return [replace(cost, only_faster=self.by_default) for cost in costs]

    def of_device(self, name: str, trace: Trace) -> tuple[list[Link], list[CodecCost]]:
        """Costs of the links and codecs of a named device, by its table; nothing is measured.

        Args:
            name: A name in the device table, such as ``"a100"``.
            trace: The recorded step.
        """
        device = DEVICES[name]
        assert device.compute_capability is not None
        rate = _HOST_BYTES_PER_S[device.compute_capability[0]]
        host = Link("host", rate, rate, latency_s=1e-5, granule=512)
        costs = [_table_cost(codec, device) for codec in _useful(self.codecs, trace)]
        return [{"host": host, "disk": _NVME}[to] for to in self.offload if to in ("host", "disk")], costs

    def equip(self, trace: Trace, device_name: str | None = None) -> Trace:
        """A trace on a machine with these links and codecs.

        Args:
            trace: The recorded step.
            device_name: A device of the table; None measures this machine.
        """
        if not self.offload and not self.codecs:
            return trace
        if device_name is not None and device_name.lower() in DEVICES:
            return trace.with_machine(*self.on("cuda").of_device(device_name.lower(), trace))
        here = self.on(trace.device)
        return trace.with_machine(here.links(), here.codec_costs(trace))


def _useful(codecs: Sequence[str], trace: Trace) -> list[str]:
    """The codecs for which a step has values."""
    kinds = frozenset[str]().union(*(facts.kinds for facts in facts_of(trace))) if codecs else ()
    return [name for name in codecs if CODECS[name].needs in kinds]
