"""Run a command with another CPU described in /proc/cpuinfo.

Use: `python tests/support/described_cpu.py CPU COMMAND ...`.

`hpo` reads the instructions of a CPU there. The command and all the processes that it starts see the changed
file, because they run in a mount namespace of their own. PyTorch asks the CPU itself, and computes as before.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CPUS = {
    "avx2": "flags : fpu avx2",
    "avx512_bf16": "flags : fpu avx2 avx512f avx512_bf16",
    "avx512_fp16": "flags : fpu avx2 avx512f avx512_fp16",
    "amx": "flags : fpu avx2 avx512f avx512_bf16 avx512_fp16 amx_bf16",
    "arm": "Features : asimd asimdhp bf16",
}
"""The line of /proc/cpuinfo that tells the instructions of each CPU."""


def describe_cpu(cpu: str, cpuinfo: str) -> str:
    """Return a /proc/cpuinfo with other instructions. On Arm it has no `model name`.

    The real ones follow under another key: Chromium on Debian starts only if it finds `sse3` in the file.
    """
    if cpu == "arm":
        cpuinfo = re.sub(r"^model name.*\n", "", cpuinfo, flags=re.MULTILINE)
    return re.sub(r"^(flags|Features)\s*:", rf"{CPUS[cpu]}\nreal \1 :", cpuinfo, flags=re.MULTILINE)


def main() -> None:
    if len(sys.argv) < 3 or sys.argv[1] not in CPUS:
        sys.exit(f"usage: described_cpu.py {{{','.join(CPUS)}}} COMMAND ...")
    user = [] if os.geteuid() == 0 else ["--user", "--map-current-user", "--keep-caps"]
    script = 'mount --bind "$0" /proc/cpuinfo && exec "$@"'
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(describe_cpu(sys.argv[1], Path("/proc/cpuinfo").read_text()))
        file.flush()
        Path(file.name).chmod(0o444)
        command = ["unshare", *user, "--mount", "sh", "-c", script, file.name, *sys.argv[2:]]
        sys.exit(subprocess.call(command))


if __name__ == "__main__":
    main()
