"""What GPUs can do at most, as their makers state it, and what this machine does."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """One device and its links.

    Attributes:
        name: Name on the command line.
        memory: Bytes of its memory.
        bf16: Dense bfloat16 FLOP/s, without sparsity.
        float32: FLOP/s in float32.
        bandwidth: Bytes per second between its memory and its cores.
        link: Bytes per second, in one direction, to another device of the same host.
    """

    name: str
    memory: float
    bf16: float
    float32: float
    bandwidth: float
    link: float

    def flops(self, dtype: torch.dtype) -> float:
        """Peak FLOP/s in a precision."""
        return self.float32 if dtype == torch.float32 else self.bf16


# NVIDIA's data sheets, in GiB, TFLOP/s, TFLOP/s, GB/s and GB/s. Where a sheet states bfloat16 with
# sparsity, half of it. Memory with error correction, as the driver shows it. Links: NVLink, or PCIe
# of 16 lanes.
_SHEETS = {
    "A100-40GB": (40, 312, 19.5, 1555, 300),
    "A100-80GB": (80, 312, 19.5, 2039, 300),
    "H100": (80, 989, 67, 3350, 450),
    "H200": (140, 989, 67, 4800, 450),
    "L4": (22.5, 121, 30.3, 300, 32),
    "A10": (22.5, 125, 31.2, 600, 32),
    "RTX-4090": (24, 165, 82.6, 1008, 32),
}
HARDWARE = {
    name: Hardware(name, gib * GIB, bf16 * 1e12, f32 * 1e12, bandwidth * 1e9, link * 1e9)
    for name, (gib, bf16, f32, bandwidth, link) in _SHEETS.items()
}
THIS_MACHINE = "this-machine"


def hardware_of(name: str) -> Hardware:
    """The named hardware; this machine's processor is measured on the spot.

    Raises:
        ValueError: It is not in the table.
    """
    if name == THIS_MACHINE:
        return _this_machine()
    if name not in HARDWARE:
        known = ", ".join([*HARDWARE, THIS_MACHINE])
        raise ValueError(f"hardware is {name!r}, must be one of {known}: take the one most like it")
    return HARDWARE[name]


def _this_machine() -> Hardware:
    """What the threads that torch has get done in a matrix product, and in a copy."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    size = 1024
    float32, bf16 = (
        2 * size**3 / _seconds(lambda x=torch.ones(size, size, dtype=dtype): x @ x)
        for dtype in (torch.float32, torch.bfloat16)
    )
    room = torch.ones(2**25), torch.ones(2**25)
    bandwidth = 2 * room[0].nbytes / _seconds(lambda: room[0].copy_(room[1]))
    return Hardware(THIS_MACHINE, memory, bf16, float32, bandwidth, bandwidth)


def _seconds(work: Callable[[], object]) -> float:
    """The shortest of a few times."""
    times = []
    for _ in range(5):
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return min(times)
