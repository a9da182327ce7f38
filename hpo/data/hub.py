"""Data sets of the Hugging Face hub, read through `datasets`.

Its csv files are read here like any csv file. `datasets` reads them with pandas, which renames a repeated
column, turns the class `007` into a number, reads "NA" as an empty cell, and fills rows that are too short.
"""

import logging
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import datasets

from hpo.config.data_config import HubConfig, SourceConfig
from hpo.data.sources import SPLITS, Reader, csv_reader
from hpo.data.tables import Row, Table, TaskConfigs, class_names
from hpo.errors import DataError, did_you_mean, shorten

_logger = logging.getLogger("hpo.data")

_CSV_OPTIONS = {"sep", "delimiter", "encoding", "keep_default_na", "na_filter", "engine", "chunksize"}
"""Options of a card that change nothing here: `data.csv` or the files give delimiter and encoding."""


def hub_readers(config: SourceConfig, hub: HubConfig, tasks: TaskConfigs) -> dict[str, Reader]:
    datasets.disable_progress_bars()
    _logger.info("loading the data set %s", hub.name)
    try:
        builder = datasets.load_dataset_builder(hub.name, hub.config, revision=hub.revision)
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs an error and raises it too
        _check_csv(config, builder)
        files = _csv_files(builder) if builder.name == "csv" else None
        loaded: Any = files or datasets.load_dataset(hub.name, hub.config, revision=hub.revision)
    except DataError:
        raise
    except Exception as error:  # `datasets` raises its own, the hub client's, and those of every format.
        cause = error.__cause__ or error  # of DatasetGenerationError, which says nothing itself
        remedy = "It must be the id of a public data set, or a local folder."
        if "Arrow type map<" in str(cause):
            remedy = "`datasets` reads no maps. Download the files and use `source: parquet`."
        raise DataError(
            f"data.hub.name: `datasets` cannot load `{hub.name}`: {type(cause).__name__}: "
            f"{shorten(str(cause), 300)} {remedy}"
        ) from None
    splits = {str(ours): theirs for ours, theirs in hub.splits.items()}
    readers: dict[str, Reader] = {}
    for split in SPLITS:
        name = splits.get(split, split)
        if name in loaded:
            classes = class_names(builder.info.features if files else loaded[name].features)
            table = Table(f"{hub.name}[{name}]", split, config.columns, tasks, classes)
            if files:
                readers[split] = csv_reader(files[name], config.csv, table)
            else:
                readers[split] = Reader(table.name, partial(_hub_rows, loaded[name], table))
        elif split in splits or split == "train":
            raise DataError(
                f"data.hub.splits.{split}: `{hub.name}` has no split `{name}`."
                f"{did_you_mean(name, sorted(map(str, loaded)))}"
            )
    return readers


def _check_csv(config: SourceConfig, builder: Any) -> None:
    """Raise DataError for `data.csv` without csv files, or options of the data set's card."""
    if builder.name != "csv":
        if not config.is_default("csv"):
            raise DataError(
                f"data.csv: is read with csv files, but the files are {builder.name}. Leave `data.csv` out."
            )
        return
    ours = {"name", "version", "data_dir", "data_files", "description", "features", *_CSV_OPTIONS}
    options = ((one.name, getattr(builder.config, one.name), one.default) for one in fields(builder.config))
    other = [f"`{key}: {value!r}`" for key, value, default in options if key not in ours and value != default]
    if other:
        raise DataError(
            "data.hub.name: the data set's card has options of csv that are not supported: "
            f"{shorten(', '.join(other), 200)}. Download the files, write them without these options, and "
            "use `source: csv`."
        )


def _csv_files(builder: Any) -> dict[str, list[Path]]:
    manager = datasets.DownloadManager()
    downloaded = manager.download_and_extract(builder.config.data_files)
    return {str(split): [*map(Path, manager.iter_files(urls))] for split, urls in downloaded.items()}


def _hub_rows(loaded: Any, table: Table) -> Iterator[Row]:
    table.check(loaded.column_names)
    for number, cells in enumerate(loaded.select_columns(table.names), start=1):
        yield table.row(f"{table.name} row {number}", number, cells)
