"""The bytes of a csv, jsonl or text file, without gzip, zstd or bzip2. The first bytes tell the format."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from hpo.errors import DataError

SUFFIXES = (".gz", ".zst", ".bz2")
_READ = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_READ |= {f"BZh{level}1AY&SY".encode(): "bz2" for level in range(1, 10)}
_REFUSED = {
    b"PK\x03\x04": "a zip archive or an Excel file",
    b"\xd0\xcf\x11\xe0": "an old Excel file",
    b"PAR1\x15": "a parquet file (`source: parquet`)",
    b"\xfd7zXZ": "an xz archive",
    b"7z\xbc\xaf": "a 7-Zip archive",
    b"ARROW1\0": "an Arrow file",
    b"SQLite format 3\0": "a SQLite database",
}


def bare_suffix(path: Path) -> str:
    """Return the suffix in small letters, `.csv` for `texts.csv.gz`."""
    return (path.with_suffix("") if path.suffix.lower() in SUFFIXES else path).suffix.lower()


@contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file for its uncompressed bytes. Raises DataError for an archive, or a compressed file with a
    fault."""
    with path.open("rb") as file:
        head = file.peek(512)
        codec = next((codec for magic, codec in _READ.items() if head.startswith(magic)), None)
        if codec is None:
            _check(path, head)
            yield file
            return
    try:
        with io.BufferedReader(pa.input_stream(str(path), compression=codec)) as unpacked:
            _check(path, unpacked.peek(512))
            yield unpacked
    except OSError as error:
        raise DataError(f"{path}: must be a whole {codec} file, but: {error}. Copy it again.") from None


def _check(path: Path, head: bytes) -> None:
    found = next((form for magic, form in _REFUSED.items() if head.startswith(magic)), None)
    if found or head[257:262] == b"ustar":
        raise DataError(f"{path}: must be text, but is {found or 'a tar archive'}. Unpack or export it.")
