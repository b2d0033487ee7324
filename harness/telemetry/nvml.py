"""Reads utilisation, memory, power and temperature of GPUs from NVML, the library of the NVIDIA driver.

Why ctypes: the driver brings the library, and the Python package for it is no dependency. NVML needs no CUDA context,
so reading a GPU takes no memory on it and waits for no kernel. A call releases the GIL.
A value that the driver does not report is None. NVML's own errors never raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, Structure, byref, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass
from typing import Self, final

LIBRARY = "libnvidia-ml.so.1"
SUCCESS = 0
CORE_SENSOR = 0


class _Utilization(Structure):
    _fields_ = [("gpu", c_uint), ("memory", c_uint)]


class _Memory(Structure):
    _fields_ = [("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong)]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLoad:
    """Load of one GPU; None: not measured."""

    utilization: float | None = None
    """Share of the last sampling period of the driver in which a kernel ran."""
    memory_bytes: int | None = None
    power_w: float | None = None
    temperature_c: float | None = None


@final
class Nvml:
    """The GPUs with the given UUIDs."""

    def __init__(self, library: CDLL, uuids: Sequence[str]) -> None:
        self._library = library
        self._handles = [self._find(uuid) for uuid in uuids]

    @classmethod
    def open(cls, uuids: Sequence[str]) -> Self | None:
        """Load the library; None if there is no GPU, no library or no driver."""
        if not uuids:
            return None
        try:
            library = CDLL(LIBRARY)
            return cls(library, uuids) if library.nvmlInit_v2() == SUCCESS else None
        except (OSError, AttributeError):  # AttributeError: a library without one of its functions
            return None

    def read(self) -> list[GpuLoad]:
        """The load of every GPU, in the order of the UUIDs."""
        return [GpuLoad() if handle is None else self._load(handle) for handle in self._handles]

    def _find(self, uuid: str) -> c_void_p | None:
        handle = c_void_p()
        name = (uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}").encode()
        return handle if self._library.nvmlDeviceGetHandleByUUID(name, byref(handle)) == SUCCESS else None

    def _load(self, handle: c_void_p) -> GpuLoad:
        library, rates, memory, milliwatts, degrees = self._library, _Utilization(), _Memory(), c_uint(), c_uint()
        has_rates = library.nvmlDeviceGetUtilizationRates(handle, byref(rates)) == SUCCESS
        has_memory = library.nvmlDeviceGetMemoryInfo(handle, byref(memory)) == SUCCESS
        has_power = library.nvmlDeviceGetPowerUsage(handle, byref(milliwatts)) == SUCCESS
        has_degrees = library.nvmlDeviceGetTemperature(handle, CORE_SENSOR, byref(degrees)) == SUCCESS
        return GpuLoad(
            utilization=rates.gpu / 100 if has_rates else None,
            memory_bytes=memory.used if has_memory else None,
            power_w=milliwatts.value / 1000 if has_power else None,
            temperature_c=float(degrees.value) if has_degrees else None,
        )
