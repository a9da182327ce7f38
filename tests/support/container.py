"""Stand-ins for apptainer and pyxis: programs that really run a command under another root folder.

An image is a file with a line `SOURCE TARGET` for each of its files and folders. Only they, and what is asked
for, exist inside. The real apptainer also mounts the home and `/tmp`; the stand-in does not, so that a test
finds a mount that is missing.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from support.command_line import ROOT

PYTHON = "/opt/base/bin/python3"
"""The interpreter of the image."""

_APPTAINER = """\
#!/bin/bash
set -eu
[ -n "${HPO_STAND_IN:-}" ] || HPO_STAND_IN=1 exec unshare --mount "$0" "$@"
unset HPO_STAND_IN
[ "$1" = exec ]; shift
places=()
while [[ "$1" == --* ]]; do
    case "$1" in
        --nv) shift ;;
        --bind) places+=("$2"); shift 2 ;;
        --pwd) folder=$2; shift 2 ;;
        *) echo "FATAL: unknown flag $1" >&2; exit 255 ;;
    esac
done
image=$1; shift
root=$image.root
mkdir -p "$root"
mount -t tmpfs none "$root"
bind() {
    [ -e "$1" ] || { echo "FATAL: mount $1: no such file or directory" >&2; exit 255; }
    if [ -d "$1" ]; then mkdir -p "$root$2"; else mkdir -p "$(dirname "$root$2")"; touch "$root$2"; fi
    mount --rbind "$1" "$root$2"
}
for name in bin lib lib64 sbin; do [ ! -L "/$name" ] || ln -s "usr/$name" "$root/$name"; done
while read -r source target; do bind "$source" "$target"; done < "$image"
for place in "${places[@]}"; do bind "$place" "$place"; done
export PATH=/opt/base/bin:/usr/bin LD_LIBRARY_PATH=/opt/base/lib PYTHONPATH=/opt/source:/opt/packages
exec /usr/sbin/chroot "$root" sh -c 'cd "$0" && exec "$@"' "$folder" "$@"
"""

_SRUN = """\
#!/bin/bash
set -eu
options=(); apptainer=(apptainer exec)
while [[ "$1" == --* ]]; do
    case "$1" in
        --container-image=*) image=${1#*=} ;;
        --container-workdir=*) apptainer+=(--pwd "${1#*=}") ;;
        --container-mounts=*)
            IFS=, read -ra places <<< "${1#*=}"
            for place in "${places[@]}"; do apptainer+=(--bind "${place%%:*}"); done ;;
        *) options+=("$1") ;;
    esac
    shift
done
[ -n "$image" ]
exec SRUN "${options[@]}" "${apptainer[@]}" "$image" "$@"
"""


def why_no_container() -> str:
    """Why this machine cannot change the root folder of a program; empty: it can."""
    tried = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True
    )
    return "" if tried.returncode == 0 else "mounts of one's own need the rights of root"


def make_programs(folder: Path) -> None:
    """Write `apptainer` and a `srun` with pyxis' options."""
    for name, text in (("apptainer", _APPTAINER), ("srun", _SRUN)):
        program = folder / name
        program.write_text(text.replace("SRUN", shutil.which("srun") or "false"))
        program.chmod(0o755)


def make_image(folder: Path, **more: Path) -> Path:
    """Write an image with hpo; `more` are files to have under `/opt`."""
    packages = sysconfig.get_path("purelib")
    image = folder / "image"
    content = {sys.base_prefix: "/opt/base", packages: "/opt/packages", str(ROOT / "hpo"): "/opt/source/hpo"}
    content |= {"/usr": "/usr", "/etc/passwd": "/etc/passwd", "/dev": "/dev", "/proc": "/proc"}
    content |= {str(path): f"/opt/{name}" for name, path in more.items()}
    image.write_text("".join(f"{source} {target}\n" for source, target in content.items()))
    return image


def path_with(folder: Path) -> str:
    return f"{folder}{os.pathsep}{os.environ['PATH']}"
