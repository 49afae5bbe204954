"""The products of a layer: those before its attention, and those after it."""

from dataclasses import dataclass

from torch import Tensor

from loong.model.device import Device
from loong.model.parameters import LayerParameters, normed_out
from loong.model.tensor_parallel import Shard, TensorParallel


@dataclass(frozen=True, slots=True)
class LayerProducts:
    """The products of any layer of a model. They add to the residual stream, `hidden` [T, E], in place.

    `added` [T, E] is what is still to be added there; None: nothing.
    """

    shard: Shard
    tensor_parallel: TensorParallel
    device: Device

    def normed(self, hidden: Tensor, added: Tensor | None, weight: Tensor, out: Tensor) -> Tensor:
        """Add, and write the norm of the residual stream to `out` [T, E], which is returned."""
        self.device.add_rms_norm(hidden, weight, self.shard.config.rms_norm_eps, out=out, added=added)
        return out

    def queries(
        self,
        layer: LayerParameters,
        normed: Tensor,
        angles: tuple[Tensor, Tensor],
        kv: Tensor,
        rows: Tensor,
    ) -> Tensor:
        """Return this rank's q [T, H, D], rotated, and write its keys and values to `rows` of kv."""
        config, num_heads = self.shard.config, self.shard.num_heads
        num_all = num_heads + 2 * self.shard.num_kv_heads
        qkv = layer.qkv.apply(normed, self.device).view(len(normed), num_all, config.head_dim)
        q = qkv.new_empty(len(qkv), num_heads, config.head_dim)
        self.device.rotate_and_store(
            qkv,
            *angles,
            q=q,
            kv=kv,
            rows=rows,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=config.rms_norm_eps,
        )
        return q

    def output(self, layer: LayerParameters, attended: Tensor) -> Tensor:
        """Return what attention [T, H, D] adds."""
        added = self.tensor_parallel.all_reduce(layer.o.apply(attended.flatten(1), self.device))
        return normed_out(added, layer.attention_out_norm, self.device, self.shard.config.rms_norm_eps)

    def mlp(self, layer: LayerParameters, hidden: Tensor, added: Tensor, normed: Tensor) -> Tensor:
        """Return what the rest of the layer adds. `normed` [T, E] is overwritten."""
        self.normed(hidden, added, layer.mlp_norm, normed)
        added = self.tensor_parallel.all_reduce(layer.mlp.apply(normed, self.device))
        return normed_out(added, layer.mlp_out_norm, self.device, self.shard.config.rms_norm_eps)
