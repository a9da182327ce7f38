"""Where the time of a training step goes: kernels, launches, and how long the device is idle."""

import re
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hpo.device import DeviceInfo, synchronize
from hpo.outcome import Progress
from hpo.trial.telemetry import Callbacks

NUM_STEPS = 10
"""Number of profiled steps."""
NUM_KERNELS = 24


def profile_steps(
    run: Callable[[Callbacks], object], num_steps: int, device: DeviceInfo
) -> tuple[Any, float]:
    """Profile the last of the `num_steps` of the trial that `run` makes: earlier steps record CUDA graphs.

    Return the profiler's events and the seconds of a step.
    """
    last = num_steps - 1
    profiler = torch.profiler.profile(acc_events=True)
    seconds = 0.0

    def on_progress(progress: Progress) -> None:
        nonlocal seconds
        if progress.step == last - NUM_STEPS:
            synchronize(device)
            profiler.start()
            seconds -= time.perf_counter()
        if progress.step == last:
            synchronize(device)
            seconds += time.perf_counter()
            profiler.stop()

    run(Callbacks(on_progress=on_progress))
    return profiler.key_averages(), seconds / NUM_STEPS


def describe_profile(events: Iterable[Any], profiled: float, unprofiled: float | None) -> list[str]:
    """Lines for people. A CPU has no kernels: there the operators take their place.

    A step takes `profiled` seconds under the profiler, and `unprofiled` seconds without it. None: not known.
    """
    known = [event for event in events if not event.is_user_annotation]
    kernels = [event for event in known if event.device_type == torch.autograd.DeviceType.CUDA]
    seconds_of = "self_device_time_total" if kernels else "self_cpu_time_total"  # in microseconds
    kernels = sorted(kernels or known, key=lambda event: -getattr(event, seconds_of))
    launches = [event for event in known if re.match("cu(da)?LaunchKernel", event.key)]

    def milliseconds(of: Iterable[Any], name: str = seconds_of) -> float:
        return sum(getattr(event, name) for event in of) / 1000 / NUM_STEPS

    step, busy = 1000 * (unprofiled or profiled), milliseconds(kernels)
    launching = milliseconds(launches, "self_cpu_time_total")
    num_launches = sum(event.count for event in launches) / NUM_STEPS
    return [
        f"profile of {NUM_STEPS} steps; each takes {step:.2f} ms, and {1000 * profiled:.2f} ms when profiled",
        f"  kernels run for {busy:.2f} ms; the device is idle for {max(0.0, 1 - busy / step):.0%} of a step",
        f"  the CPU takes {launching:.2f} ms for {num_launches:.0f} kernel launches when profiled",
        "  if the device is mostly idle, launches limit it: `cuda_graphs` replays them at once",
        *(
            f"  {milliseconds([event]):8.3f} ms, {event.count / NUM_STEPS:6.1f} times: {event.key[:66]}"
            for event in kernels[:NUM_KERNELS]
        ),
    ]
