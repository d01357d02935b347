"""Prompts from Hugging Face datasets: a directory that `save_to_disk` wrote, a directory of data files, or a name.

Needs the package datasets (`pip install 'treadle[datasets]'`), which maps the rows from disk. A name is looked up on
the Hugging Face Hub and then kept in that library's cache; where that holds it, it also works without a network.
Columns as in `treadle.data.columns`.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.config import key
from treadle.data.arrow import ArrowSource
from treadle.data.columns import TableConfig
from treadle.data.files import digest, shards
from treadle.data.source import Order
from treadle.errors import ConfigError, DataError

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

    from treadle.data.rendering import Renderer


class HuggingFaceConfig(TableConfig):
    name: str = key("where prompts come from", default="hf")
    path: str = key("directory, or name on the Hugging Face Hub, e.g. openai/gsm8k", min_length=1)
    subset: str | None = key("the data set's configuration, e.g. main; null: the default one", default=None)
    split: str | None = key("the part of the data set, e.g. train; null: the only one", default=None)

    def check(self) -> None:
        if find_spec("datasets") is None:
            raise ConfigError("the package datasets is missing: pip install 'treadle[datasets]'")


class HuggingFace(ArrowSource):
    Config = HuggingFaceConfig

    def __init__(self, config: HuggingFaceConfig, renderer: Renderer, order: Order) -> None:
        """Raises DataError, with the row, for the first row that cannot be used."""
        super().__init__(config, renderer, order)
        name = Path(config.path).name if Path(config.path).is_dir() else config.path
        self._title = "/".join(part for part in (name, config.subset, config.split) if part)
        found = _split(_loaded(config), config)
        if not len(found):
            raise DataError(f"{self._title}: the data set is empty")
        files = [shard for file in found.cache_files for shard in shards(Path(file["filename"]), "")]
        self._digest = digest(files)
        self._dataset = found.with_format("arrow")
        self._check_names(self._dataset.column_names, self._title)
        number = 0
        for table in self._dataset.iter(batch_size=1024):
            for batch in table.to_batches():  # type: ignore[union-attr]
                self._check(batch, self._title, number)
                number += batch.num_rows

    def __len__(self) -> int:
        return len(self._dataset)

    @property
    def fingerprint(self) -> str:
        return f"{self._title}, {len(self)} rows, digest {self._digest}"

    def _read(self, number: int) -> tuple[str, pa.Table]:
        return f"{self._title}:{number}", self._dataset[number]


def _loaded(config: HuggingFaceConfig) -> datasets.Dataset | datasets.DatasetDict:
    config.check()
    import datasets

    path: Any = Path(config.path)
    single = (path / "state.json").is_file()
    saved = single or (path / "dataset_dict.json").is_file()
    superfluous = {"subset": config.subset if saved else None, "split": config.split if single else None}
    for name, value in superfluous.items():
        if value is not None:
            raise DataError(f"{path}: what save_to_disk wrote here has no {name}s; leave out the source's key `{name}`")
    try:
        if saved:
            return datasets.load_from_disk(config.path, keep_in_memory=False)
        return datasets.load_dataset(config.path, config.subset, split=config.split, keep_in_memory=False)
    except Exception as error:  # the library's own, those of its builders, of files and of the network
        raise DataError(
            f"{config.path}: the package datasets cannot load this: {type(error).__name__}: {error}"
        ) from error


def _split(found: datasets.Dataset | datasets.DatasetDict, config: HuggingFaceConfig) -> datasets.Dataset:
    """The one asked for. Raises DataError that lists what there is."""
    if not isinstance(found, dict):
        return found
    if config.split is None and len(found) == 1:
        return next(iter(found.values()))
    if config.split not in found:
        asked = "say which with the source's key `split`" if config.split is None else f"there is no {config.split!r}"
        raise DataError(f"{config.path}: the splits are {', '.join(map(str, found))}; {asked}")
    return found[config.split]
