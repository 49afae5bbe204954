"""The speed-up of attention by one pass over shared KV: RelayAttention's formula, and its form for GQA."""

from dataclasses import dataclass


def published_speed_up(num_shared: float, num_alone: float, num_queries: int) -> float:
    """Return p = (s + c + 2) / (s / b + c + 7) of the paper's equation 10: elements of memory, for MHA."""
    return (num_shared + num_alone + 2) / (num_shared / num_queries + num_alone + 7)


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of a model, the bytes of an element of its KV, and the FLOPs a byte at which a device is bound by
    both.
    """

    num_heads: int
    num_kv_heads: int
    element_bytes: int = 2
    flops_a_byte: float = 160.0

    @property
    def group_size(self) -> int:
        """Return g, the query heads that read the keys of a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def ridge(self) -> float:
        """Return the queries that a key of a head must meet before computing takes longer than reading it.

        Such a pair takes 4 FLOPs of each dimension, and its key and value 2 elements.
        """
        return self.flops_a_byte * self.element_bytes / 2

    def speed_up(self, num_shared: float, num_alone: float, num_queries: int) -> float:
        """Return the speed-up of attention for b queries with s shared keys, and c of their own.

            p = (s + c + g) / (max(s / b, s g / r) + c + 3.5 g), with r the `ridge`

        The unit is the key and value of all heads of a token. Queries and outputs are g / 2 of it each: one
        of both without one pass, and 3.5 with it, where partials are written and read again.
        """
        g = self.group_size
        once = max(num_shared / num_queries, num_shared * g / self.ridge)
        apart = max(1.0, g / self.ridge) * (num_shared + num_alone)
        return (apart + g) / (once + num_alone + 3.5 * g)
