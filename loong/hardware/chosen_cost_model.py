"""Chooses the cost model of a command: a file, or the roofline of its device."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from loong.hardware.cost_model_file import read_cost_model
from loong.hardware.devices import DEVICES
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.cost.roofline import ModelShape, roofline

logger = logging.getLogger(__name__)


def chosen_cost_model(
    path: Path | None,
    shape: ModelShape,
    device: str,
    *,
    num_instances: int,
    tp_size: int,
    host_ids: tuple[int, ...] = (),
    greatest: Mapping[str, float],
) -> WorkCostModel:
    """Return the model in a file, or (None) the roofline of `device`.

    Logs which counts it will extrapolate if an instance's work reaches the `greatest` counts. Raises
    `ConfigError` if the file cannot be read, or is of another model, device or number of devices.
    """
    if path is None:
        logger.info("the cost model is the roofline of %s; `loong profile` measures a better one", device)
        model = roofline(shape, DEVICES[device], tp_size, host_ids)
        return replace(model, first_host_tier_id=num_instances)
    file = read_cost_model(path)
    file.check_fits(shape, tp_size, device)
    logger.info("the cost model is %s, of %s", path, file.date)
    for extrapolation in file.extrapolations(greatest):
        logger.warning("%s extrapolates: %s", path, extrapolation)
    return file.cost_model(num_instances, host_ids)


def chosen_tiles(path: Path | None) -> tuple[int, ...] | None:
    """Return the attention tiles that were best when the file was measured, if any were."""
    tiles = None if path is None else read_cost_model(path).attention_tiles
    return None if tiles is None else msgspec.structs.astuple(tiles)
