"""Cost models for tests of policies: of two machines, and one that charges for everything."""

from loong.hardware.devices import DEVICES
from loong.scheduler.cost.cost_model import Coefficients, WorkCostModel
from loong.scheduler.cost.roofline import ModelShape, kv_capacity, roofline

# The sizes of an 8-billion-parameter Llama 3.
SHAPE = ModelShape(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    num_layer_parameters=32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336),
    num_output_parameters=4096 * 128256,
)

H200 = roofline(SHAPE, DEVICES["h200"])
H200_GRAPH_LIMITS = DEVICES["h200"].graph_limits
H200_CAPACITY = kv_capacity(SHAPE, DEVICES["h200"])
CPU = WorkCostModel()
DEAR = WorkCostModel(
    Coefficients(
        batch=0.5e-3,
        sent_request=50e-6,
        step=1e-3,
        member=0.2e-3,
        settle=0.3e-3,
        exchange=1e-3,
        ring=0.5e-3,
        segment=10e-6,
        launch=4e-3,
        exchange_launch=3e-3,
        ring_launch=2e-3,
        hop_launch=1e-3,
        weights=1e-3,
        token=10e-6,
        attend=100e-6,
        decode_key=0.5e-6,
        key=1e-6,
        pair=20e-9,
        ring_key=1e-6,
        sent_query=3e-6,
        kept_key=3e-6,
    ),
    overlap=0.5,
)
