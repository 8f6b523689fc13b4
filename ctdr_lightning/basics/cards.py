"""NVIDIA's cards by name, from their data sheets and whitepapers.

Rates are sustained, not peak: about 60 % of a sheet's for arithmetic, 80 % for memory. Those of 16-bit products are
with fp32 accumulation and without sparsity. Memory is the size that CUDA reports, with error correction where the card
has it on by default: a few percent less than the card's name says. No rate was measured by this project.
"""

from __future__ import annotations

from typing import NamedTuple

_ARITHMETIC, _MEMORY = 0.6, 0.8  # the shares of a sheet's rates that are sustained


class Card(NamedTuple):
    """A card.

    Attributes:
        name: Name in the table and on the command line.
        capability: Its compute capability.
        tera: Sustained rates of fp32, TF32 and 16-bit arithmetic, in 1e12 a second; 0 without TF32.
        tera_bytes: Sustained memory bandwidth, in 1e12 bytes a second.
        memory_gib: Memory, as CUDA reports it.
    """

    name: str
    capability: tuple[int, int]
    tera: tuple[float, float, float]
    tera_bytes: float
    memory_gib: float

    @property
    def rates(self) -> tuple[float, float, float]:
        """Rates of fp32, TF32 and 16-bit arithmetic, a second."""
        fp32, tf32, half = self.tera
        return fp32 * 1e12, tf32 * 1e12, half * 1e12

    @property
    def bytes_per_s(self) -> float:
        """Memory bandwidth."""
        return self.tera_bytes * 1e12


def _sheet(
    name: str,
    capability: tuple[int, int],
    tera: tuple[float, float, float],
    giga_bytes: float,
    memory_gib: float,
) -> Card:
    """A card by the rates of its sheet: teraflops, and gigabytes a second."""
    fp32, tf32, half = (_ARITHMETIC * rate for rate in tera)
    return Card(name, capability, (fp32, tf32, half), _MEMORY * giga_bytes / 1e3, memory_gib)


CARDS = (
    # NVIDIA's data sheets of V100, T4, A10G (as AWS describes it), A100, H100, H200; the whitepapers of GA102 and Ada.
    # Of these nine the rates were set one by one, before the rest was added.
    Card("v100", (7, 0), (9, 0, 65), 0.75, 15.8),
    Card("t4", (7, 5), (5, 0, 35), 0.25, 14.6),
    Card("rtx3090", (8, 6), (20, 20, 60), 0.75, 23.7),
    Card("rtx4090", (8, 9), (50, 50, 100), 0.8, 23.6),
    Card("l4", (8, 9), (18, 30, 70), 0.25, 22.0),
    Card("a10g", (8, 6), (18, 20, 45), 0.48, 22.0),
    Card("a100", (8, 0), (14, 90, 190), 1.6, 79.2),
    Card("h100", (9, 0), (40, 250, 600), 2.7, 79.1),
    Card("h200", (9, 0), (40, 250, 600), 3.9, 139.4),
    # Turing's whitepaper.
    _sheet("rtx2080ti", (7, 5), (13.4, 0, 53.8), 616, 10.7),
    # The whitepaper of GA102, and the data sheets of the professional cards.
    _sheet("rtx3060", (8, 6), (12.7, 12.7, 25.5), 360, 11.7),
    _sheet("rtx3070", (8, 6), (20.3, 20.3, 40.6), 448, 7.7),
    _sheet("rtx3080", (8, 6), (29.8, 29.8, 59.5), 760, 9.7),
    _sheet("rtx3080ti", (8, 6), (34.1, 34.1, 68.2), 912, 11.7),
    _sheet("rtx3090ti", (8, 6), (40, 40, 80), 1008, 23.6),
    _sheet("rtxa4000", (8, 6), (19.2, 38.3, 76.7), 448, 15.6),
    _sheet("rtxa5000", (8, 6), (27.8, 55.6, 111.1), 768, 23.5),
    _sheet("rtxa6000", (8, 6), (38.7, 77.4, 154.8), 768, 47.4),
    _sheet("a10", (8, 6), (31.2, 62.5, 125), 600, 22.0),
    _sheet("a30", (8, 0), (10.3, 82, 165), 933, 23.5),
    _sheet("a40", (8, 6), (37.4, 74.8, 149.7), 696, 44.4),
    _sheet("a100-40gb", (8, 0), (19.5, 156, 312), 1555, 39.4),
    # Ada's whitepaper, and the data sheets of L40, L40S and RTX 6000 Ada.
    _sheet("rtx4060", (8, 9), (15.1, 15.1, 30.2), 272, 7.7),
    _sheet("rtx4060ti", (8, 9), (22.1, 22.1, 44.1), 288, 15.6),
    _sheet("rtx4070", (8, 9), (29.1, 29.1, 58.3), 504, 11.7),
    _sheet("rtx4070ti", (8, 9), (40.1, 40.1, 80.2), 504, 11.7),
    _sheet("rtx4080", (8, 9), (48.7, 48.7, 97.5), 717, 15.7),
    _sheet("l40", (8, 9), (90.5, 90.5, 181), 864, 44.4),
    _sheet("l40s", (8, 9), (91.6, 183, 362), 864, 44.4),
    _sheet("rtx6000ada", (8, 9), (91.1, 182, 364), 960, 47.4),
    # The data sheets of H100 PCIe and NVL, GH200 and HGX B200.
    _sheet("h100-pcie", (9, 0), (51, 378, 756), 2000, 79.1),
    _sheet("h100-nvl", (9, 0), (60, 417, 835), 3900, 93.1),
    _sheet("gh200", (9, 0), (67, 494, 989), 4000, 94.5),
    _sheet("b200", (10, 0), (75, 1100, 2250), 7700, 178.4),
    # The whitepaper of RTX Blackwell.
    _sheet("rtx5070", (12, 0), (30.9, 30.9, 61.7), 672, 11.7),
    _sheet("rtx5070ti", (12, 0), (43.9, 43.9, 87.9), 896, 15.5),
    _sheet("rtx5080", (12, 0), (56.3, 56.3, 112.6), 960, 15.5),
    _sheet("rtx5090", (12, 0), (104.8, 104.8, 209.5), 1792, 31.4),
)
