"""Rows of Arrow tables as documents: .parquet files, and folders that `datasets.Dataset.save_to_disk` wrote.

Both are read a few rows at a time, in their order. A DatasetDict is refused, since its splits were made to be kept
apart: name the split. Nothing is fetched from a hub.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mtraining_nns.data.records import Reading, Texts
from mtraining_nns.errors import UserError

BATCH_ROWS = 64
STRINGS = ("string", "large_string", "string_view")


def check_parquet(path: Path, reading: Reading) -> None:
    """UserError where pyarrow is missing."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise UserError(f"{path} needs pyarrow; pip install 'mtraining-nns[parquet]'") from error


def read_parquet(path: Path, reading: Reading) -> Texts:
    """The text of every row, row group by row group."""
    import pyarrow.parquet

    with _errors_of_arrow(), pyarrow.parquet.ParquetFile(path) as file:
        if reading.text_key not in file.schema_arrow.names:
            reading.no_text(str(path))
            return
        row = 1
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=[reading.text_key]):
                yield from _texts_of(batch.column(0), path, row, reading)
                row += len(batch)


def is_saved_dataset(folder: Path) -> bool:
    """Whether `save_to_disk` wrote the folder; UserError when it holds several splits."""
    splits = folder / "dataset_dict.json"
    if splits.is_file():
        names = _names_of_splits(splits)
        raise UserError(
            f"{folder} is a DatasetDict with the splits {', '.join(names)}; name the folder of one, {folder / names[0]}"
        )
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def check_dataset(path: Path, reading: Reading) -> None:
    """UserError where the library `datasets` is missing."""
    try:
        import datasets  # noqa: F401
    except ImportError as error:
        raise UserError(f"{path} needs the library datasets; pip install 'mtraining-nns[datasets]'") from error


def read_dataset(path: Path, reading: Reading) -> Texts:
    """The text of every row of a saved dataset, mapped from disk."""
    import datasets

    with _errors_of_arrow():
        dataset = datasets.load_from_disk(str(path))
        if reading.text_key not in dataset.column_names:
            reading.no_text(str(path))
            return
        row = 1
        for table in dataset.select_columns(reading.text_key).with_format("arrow").iter(BATCH_ROWS):
            yield from _texts_of(table.column(0), path, row, reading)
            row += len(table)


def _texts_of(column, path: Path, first_row: int, reading: Reading) -> Texts:
    """UTF-8 bytes of an Arrow column's strings; a row that is null or no string is left out."""
    if str(column.type).startswith("dictionary"):
        column = column.cast(column.type.value_type)
    is_text = str(column.type) in STRINGS
    for row, scalar in enumerate(column, start=first_row):
        if is_text and scalar.is_valid:
            # Arrow does not promise valid UTF-8; the caller reports what is not.
            yield f"{path}:{row}", scalar.as_buffer().to_pybytes()
        else:
            reading.no_text(f"{path}:{row}")


def _names_of_splits(file: Path) -> list[str]:
    try:
        return list(json.loads(file.read_bytes())["splits"]) or ["none"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is damaged, it names no splits; name the folder of one split") from error


@contextmanager
def _errors_of_arrow() -> Iterator[None]:
    """Files that Arrow cannot read raise OSError, as files that the system cannot read do."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, ValueError, KeyError, TypeError) as error:
        raise OSError(f"damaged, {type(error).__name__}") from error
