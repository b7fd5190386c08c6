"""The measures by name, in the order in which they are taken."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ft_ckpt.values import parse_size
from scripts.bench import (
    clients,
    convert,
    frozen,
    load,
    many,
    memory,
    peaks,
    planning,
    ranks,
    save,
    stall,
    stores,
    writers,
)
from scripts.bench.common import Row, Setting


@dataclass(frozen=True)
class Measure:
    """A measure, its sizes, and the figure that compares its rows: the least is the best."""

    title: str
    run: Callable[[Setting, int], list[Row]]
    limit: str | None = None  # the row that is the machine's limit
    figure: str = "seconds"  # empty: they are not compared
    # the one size it is taken at, or the largest one given if that is less; None: all given
    at: str | None = None

    def sizes(self, requested: Sequence[str]) -> list[str]:
        """Return the sizes at which the measure is taken."""
        if self.at is None:
            return list(requested)
        largest = max(requested, key=parse_size)
        return [min(self.at, largest, key=parse_size)]


MEASURES = {
    "save": Measure(save.TITLE, save.measure, save.LIMIT),
    "stall": Measure(stall.TITLE, stall.measure, figure="lost_seconds"),
    "memory": Measure(memory.TITLE, memory.measure, figure=""),
    "peaks": Measure(peaks.TITLE, peaks.measure, figure="", at="7.5GB"),
    "cold": Measure(load.COLD, load.cold, load.LIMIT),
    "warm": Measure(load.WARM, load.warm),
    "first": Measure(load.FIRST_TENSOR, load.first),
    "many": Measure(many.TITLE, many.measure, at="5.12MB"),
    "convert": Measure(convert.TITLE, convert.measure, convert.LIMIT),
    "ranks": Measure(ranks.TITLE, ranks.measure),
    "adapter": Measure(ranks.ADAPTER_TITLE, ranks.measure_adapter, at="1.2GB"),
    "frozen": Measure(frozen.TITLE, frozen.measure, figure="new_bytes"),
    "planning": Measure(planning.TITLE, planning.measure, at="2.5GB"),
    "writers": Measure(writers.TITLE, writers.measure, at="1GB"),
    "clients": Measure(clients.SAVE_TITLE, clients.measure_save, at="1GB"),
    "clients-load": Measure(clients.LOAD_TITLE, clients.measure_load, at="1GB"),
    "upload": Measure(stores.UPLOAD, stores.measure_upload, stores.LIMIT, at="1GB"),
    "download": Measure(stores.DOWNLOAD, stores.measure_download, stores.LIMIT, at="1GB"),
}
