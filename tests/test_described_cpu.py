"""Each kind of CPU, described in /proc/cpuinfo: the probe finds its instructions."""

import platform
from pathlib import Path

import pytest
from support.described_cpu import CPUS, describe_cpu

from hpo.device import probe_device

FEATURES = {
    "avx2": {"avx2"},
    "avx512_bf16": {"avx2", "avx512", "avx512_bf16"},
    "avx512_fp16": {"avx2", "avx512", "avx512_fp16"},
    "amx": {"avx2", "avx512", "avx512_bf16", "avx512_fp16", "amx_bf16"},
    "arm": {"arm_bf16", "arm_fp16"},
}


@pytest.mark.parametrize("cpu", CPUS)
def test_instructions_of_each_cpu(tmp_path: Path, cpu: str) -> None:
    file = tmp_path / "proc" / "cpuinfo"
    file.parent.mkdir()
    file.write_text(
        describe_cpu(cpu, "processor : 0\nmodel name : Example CPU\nflags : fpu avx2 amx_bf16\n\n")
    )
    device = probe_device("cpu", tmp_path)
    assert device.cpu_features == FEATURES[cpu]
    assert device.name == (platform.machine() if cpu == "arm" else "Example CPU")
