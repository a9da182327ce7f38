"""Frames in memory as parquet files, so that workers, a later session and jobs read the same rows."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from hpo.data.sources import SPLITS
from hpo.data.tables import class_names, class_of_number
from hpo.errors import DataError


def write_frames(data: Any, root: Path) -> Path:
    """Write frames by split, or one for training, into a folder of `root` named by their content; return it.

    A frame is a pandas DataFrame, without its index, or a `datasets.Dataset`, whose class numbers become
    names. Raises DataError for other splits or objects, or cells that parquet cannot hold.
    """
    frames = data if isinstance(data, Mapping) else {"train": data}
    if "train" not in frames or not {*frames} <= {*SPLITS}:
        raise DataError(f"data: the splits must be {', '.join(SPLITS)} or less, but got {[*frames]}.")
    tables = {split: _table(frames[split], split) for split in SPLITS if split in frames}
    digest = hashlib.blake2b(digest_size=16)
    for split, table in tables.items():
        digest.update(f"{split} {table.column_names}".encode(errors="surrogatepass"))
        for batch in table.to_batches(max_chunksize=10_000):
            digest.update("".join(map(repr, batch.to_pylist())).encode(errors="surrogatepass"))
    folder = (root / digest.hexdigest()).absolute()
    for split, table in tables.items():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f".{split}-{os.getpid()}"
        pq.write_table(table, unfinished)
        unfinished.replace(folder / f"{split}.parquet")
    return folder


def _table(frame: Any, split: str) -> pa.Table:
    if isinstance(frame, pd.DataFrame):
        try:
            return pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata()
        except (ValueError, TypeError, pa.ArrowException) as error:
            raise DataError(
                f"data[{split!r}]: each column must have a name and a type of its own, but {error}."
            ) from None
    if not isinstance(frame, datasets.Dataset):
        raise DataError(f"data[{split!r}]: must be a DataFrame or a Dataset, but got {type(frame).__name__}.")
    table = frame.with_format("arrow")[:]
    for column, names in class_names(frame.features).items():
        cells = [class_of_number(cell, names) for cell in table[column].to_pylist()]
        table = table.set_column(table.column_names.index(column), column, pa.array(cells))
    return table.replace_schema_metadata()
