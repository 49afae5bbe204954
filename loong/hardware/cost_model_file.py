"""A measured cost model as a file: small, readable JSON, for one shape of model on one kind of instance."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TypeVar

import msgspec

from loong.core.cost.cost_model import HostTimes
from loong.core.cost.cuda_graph_limits import CudaGraphLimits
from loong.core.errors import ConfigError
from loong.foreign_json import NOT_JSON
from loong.hardware.devices import DEVICES
from loong.scheduler.cost.cost_model import Coefficients, ServiceLane, WorkCostModel
from loong.scheduler.cost.network import LinkRates, Links, Network
from loong.scheduler.cost.roofline import ModelShape, cuda_graph_limits, roofline, window_reads

FORMAT = 11
FORMER = 10  # whose graph limits have no room for more KV than rows
_NEW = {"relay", "relayed_key"}  # coefficients that former versions do not measure
LEAST_BANDWIDTH, MOST_BANDWIDTH = 1.0, 1e18  # bytes a second

# Sizes that older files lack, because all models had these.
_NEW_SIZES = {
    "num_experts": 0,
    "num_chosen_experts": 0,
    "num_idle_parameters": 0,
    "has_fp8_layers": 0,
    "has_fp8_kv": 0,
    "window": 0,
    "num_window_layers": 0,
}
T = TypeVar("T", ModelShape, Coefficients, CudaGraphLimits, HostTimes, ServiceLane, Links, LinkRates)


class _Format(msgspec.Struct, frozen=True):
    """The part that files of every version have."""

    format: int


class Errors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Relative errors of predictions for samples that the fit has not seen."""

    num_samples: int
    mean: float
    p95: float
    worst: float


class AttentionTiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tiles of attention that a library is to compute: the fields of TileSizes."""

    square: int
    largest_square: int
    least_queries: int
    few_queries: int
    many_queries: int
    most_queries: int
    keys: int
    wide_keys: int
    most_keys: int
    least_pairs: int


class CostModelFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The result of `loong profile`: costs, and the machine and the model that they are of.

    `undetermined` coefficients are a roofline's, since no sample determines them. `graph_limits` (the fields
    of `CudaGraphLimits`, for any shape) and `host` (of `HostTimes`) are the device's, not measured. `lane`
    (of `ServiceLane`) is measured where instances serve each other, and otherwise the device's. `links` are
    those within a host and between hosts, measured where there were several hosts, and otherwise the
    device's. `ranges` is the least and the greatest measured of each count of work; beyond it the model
    extrapolates. `repeat_spread` says how quiet the machine was: how much longer, relative, the median of a
    plan's times was than the fastest. `attention_tiles` were in use, and are to be, where the device has any.
    """

    format: int
    model: str
    shape: dict[str, int]
    tp_size: int
    device: str
    num_instances: int
    date: str
    versions: dict[str, str]
    machine: dict[str, str]
    coefficients: dict[str, float]
    overlap: float
    undetermined: list[str]
    graph_limits: dict[str, int]
    host: dict[str, float]
    lane: dict[str, float]
    ranges: dict[str, tuple[float, float]]
    repeat_spread: float
    errors: dict[str, Errors]
    links: dict[str, dict[str, float]] = {}
    attention_tiles: AttentionTiles | None = None

    def check_fits(self, shape: ModelShape, tp_size: int, device: str) -> None:
        """Raise `ConfigError` unless the file is of such instances."""
        asked = {**asdict(shape), "tp_size": tp_size, "device": device}
        found = {**self.shape, "tp_size": self.tp_size, "device": self.device}
        for name, value in asked.items():
            if found[name] != value:
                raise ConfigError(
                    f"the cost model was measured on {self.model} with {name} {found[name]}, "
                    f"but is to be used with {name} {value}; measure it by `loong profile`"
                )

    def cost_model(self, num_instances: int, host_ids: tuple[int, ...] = ()) -> WorkCostModel:
        """Return the cost model of a cluster, whose host tiers are numbered from `num_instances` on.

        `host_ids` has the host of each instance, and is empty for one host.
        """
        links = Links(**{name: LinkRates(**rates) for name, rates in self.links.items()})
        shape = ModelShape(**self.shape)
        limits = cuda_graph_limits(shape, CudaGraphLimits(**self.graph_limits))
        return WorkCostModel(
            Coefficients(**self.coefficients),
            self.overlap,
            limits,
            num_instances,
            ServiceLane(**self.lane),
            HostTimes(**self.host),
            Network.of(host_ids, links, shape.num_layers),
            windows=window_reads(shape),
        )

    def extrapolations(self, greatest: Mapping[str, float]) -> list[str]:
        """Return a phrase for each of these greatest counts that exceeds the measured range."""
        return [
            f"{name} may reach {value:,.0f}, but at most {self.ranges[name][1]:,.0f} was measured"
            for name, value in greatest.items()
            if name in self.ranges and value > self.ranges[name][1]
        ]


def write_cost_model(file: CostModelFile, path: Path) -> None:
    """Write it whole or not at all. Raises `ConfigError` if the place cannot be written."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(file), indent=2) + b"\n")
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def read_cost_model(path: Path) -> CostModelFile:
    """Read a file. Raises `ConfigError`, which says what is wrong with it."""
    try:
        content = path.read_bytes()
        found = msgspec.json.decode(content, type=_Format).format
        if found not in (FORMAT, FORMER):
            raise ConfigError(
                f"{path} has format {found}, but this version reads format {FORMAT}; "
                "measure it again by `loong profile`"
            )
        file = msgspec.json.decode(content, type=CostModelFile)
        file = msgspec.structs.replace(file, shape={**_NEW_SIZES, **file.shape})
        if found == FORMER:
            rows = file.graph_limits.get("most_kv_rows", 0)
            room = {"most_kv_room": rows, "most_gathered": 10 * rows}  # of more members than were served
            file = msgspec.structs.replace(file, format=FORMAT, graph_limits={**room, **file.graph_limits})
        file = msgspec.structs.replace(file, lane={"crowding": ServiceLane().crowding, **file.lane})
    except OSError as error:
        raise ConfigError(f"cannot read the cost model {path}: {error.strerror}") from error
    except NOT_JSON as error:
        raise ConfigError(f"{path} is no cost model that this version can read: {error}") from error
    _check_names(path, "shape", file.shape, ModelShape)
    if file.device in DEVICES and not file.coefficients.keys() & _NEW:
        file = _with_new(file)
    _check_names(path, "coefficients", file.coefficients, Coefficients)
    _check_names(path, "graph_limits", file.graph_limits, CudaGraphLimits)
    _check_names(path, "host", file.host, HostTimes)
    _check_names(path, "lane", file.lane, ServiceLane)
    _check_names(path, "links", file.links, Links)
    for name, rates in file.links.items():
        _check_names(path, f"links.{name}", rates, LinkRates)
        for rate, least in (("bandwidth", LEAST_BANDWIDTH), ("latency", 0.0)):
            if not least <= rates[rate] <= MOST_BANDWIDTH:
                raise ConfigError(
                    f"{path}: {rate} of {name} must be {least:g} to {MOST_BANDWIDTH:g}, "
                    f"but is {rates[rate]:g}"
                )
    try:
        file.cost_model(1).check()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}; measure again by `loong profile`") from error
    if (tiles := file.attention_tiles) is not None and not _fit(tiles):
        raise ConfigError(f"{path}: {tiles} do not fit each other; measure again by `loong profile`")
    return file


def _with_new(file: CostModelFile) -> CostModelFile:
    """Return the file of a version without some coefficients with those of a roofline."""
    prior = roofline(ModelShape(**file.shape), DEVICES[file.device], file.tp_size)
    new = {name: value for name, value in asdict(prior.coefficients).items() if name in _NEW}
    return msgspec.structs.replace(file, coefficients={**file.coefficients, **new})


def _check_names(path: Path, where: str, values: Mapping[str, object], kind: type[T]) -> None:
    expected = {field.name for field in fields(kind)}
    for name in sorted(expected ^ values.keys()):
        what = "is missing" if name in expected else "is unknown"
        raise ConfigError(
            f"{path}: {where}.{name} {what}; if another version wrote it, measure anew by `loong profile`"
        )


def _fit(tiles: AttentionTiles) -> bool:
    """Return whether the sizes are multiples of one another, as TileSizes requires."""
    if min(msgspec.structs.astuple(tiles)) < 1:
        return False
    pairs = (
        (tiles.square, tiles.many_queries),
        (tiles.square, tiles.keys),
        (tiles.largest_square, tiles.square),
        (tiles.many_queries, tiles.few_queries),
        (tiles.most_queries, tiles.many_queries),
        (tiles.most_keys, tiles.keys),
    )
    return tiles.least_queries >= tiles.few_queries and not any(large % small for large, small in pairs)
