"""A stand-in for pynvml: cards that serve given values in the driver's own units, lack what they are told to, fail, answer slowly or vanish."""
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import pynvml


@dataclass
class FakeCard:
    power_mw: int = 40_000                 # power now and averaged; or a function of monotonic seconds
    energy_mj: int = 1_000_000             # total-energy counter; or a function of monotonic seconds
    utilisation: int = 37
    memory_used: int = 5 * 2**30
    temperature: int = 54
    clocks: dict = field(default_factory=lambda: {pynvml.NVML_CLOCK_SM: 1590, pynvml.NVML_CLOCK_MEM: 5000})
    throttle: int = pynvml.nvmlClocksEventReasonSwPowerCap
    lacks: set = field(default_factory=set)   # of: power, instant, energy, utilisation, memory, temperature, clock, throttle
    vgpu: bool = False
    mig: bool = False
    fails: str | None = None               # name of an NVML_ERROR_* that every call answers with
    delay_s: float = 0.0                   # how long every call takes


class FakeNvml:
    """The part of pynvml that granite.meters asks, over `FakeCard`s."""

    def __init__(self, cards, init_fails=None):
        self.cards, self.init_fails = cards, init_fails

    def __getattr__(self, name):           # constants and NVMLError are the real module's
        if name.startswith("NVML"): return getattr(pynvml, name)
        raise AttributeError(name)

    @staticmethod
    def _error(name): return pynvml.NVMLError(getattr(pynvml, name))

    def _ask(self, card, what, value):
        if card.delay_s: time.sleep(card.delay_s)
        if card.fails: raise self._error(card.fails)
        if what in card.lacks or (card.mig and what == "utilisation"): raise self._error("NVML_ERROR_NOT_SUPPORTED")
        return value(time.monotonic()) if callable(value) else value

    def nvmlInit(self):
        if self.init_fails: raise self._error(self.init_fails)

    def nvmlDeviceGetCount(self): return len(self.cards)
    def nvmlDeviceGetHandleByIndex(self, index): return self.cards[index]
    def nvmlDeviceGetName(self, card): return "Fake GPU"
    def nvmlDeviceGetTotalEnergyConsumption(self, card): return int(self._ask(card, "energy", card.energy_mj))
    def nvmlDeviceGetPowerUsage(self, card): return int(self._ask(card, "power", card.power_mw))
    def nvmlDeviceGetUtilizationRates(self, card): return SimpleNamespace(gpu=self._ask(card, "utilisation", card.utilisation))
    def nvmlDeviceGetMemoryInfo(self, card): return SimpleNamespace(used=self._ask(card, "memory", card.memory_used))
    def nvmlDeviceGetTemperature(self, card, sensor): return self._ask(card, "temperature", card.temperature)
    def nvmlDeviceGetClockInfo(self, card, which): return self._ask(card, "clock", card.clocks[which])
    def nvmlDeviceGetCurrentClocksEventReasons(self, card): return self._ask(card, "throttle", card.throttle)

    def nvmlDeviceGetFieldValues(self, card, fields):
        if card.fails: raise self._error(card.fails)
        power = 0 if "instant" in card.lacks else int(self._ask(card, "power", card.power_mw))
        code = pynvml.NVML_ERROR_NOT_SUPPORTED if "instant" in card.lacks else 0
        return [SimpleNamespace(nvmlReturn=code, value=SimpleNamespace(uiVal=power)) for _ in fields]

    def nvmlDeviceGetMigMode(self, card):
        if card.mig: return [1, 1]
        raise self._error("NVML_ERROR_NOT_SUPPORTED")

    def nvmlDeviceGetVirtualizationMode(self, card):
        return pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU if card.vgpu else pynvml.NVML_GPU_VIRTUALIZATION_MODE_NONE
