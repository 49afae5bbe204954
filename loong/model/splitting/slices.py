"""The slices of a model between its attention operators, and the least context that each needs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import networkx as nx
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from loong.core.errors import ConfigError
from loong.model.splitting.trace import is_attention

_SOURCE, _SINK = "source", "sink"


@dataclass(frozen=True)
class Cut:
    """One attention of a graph: the values that go to it, the one that comes back, and those that are kept.

    `context` are the values that the next slice needs besides: the minimum cut from all that has to be
    computed before the attention to all that needs its output.
    """

    attention: Node
    context: tuple[Node, ...]

    @property
    def sent(self) -> tuple[Node, ...]:
        """Return queries, keys and values."""
        return tuple([value for value in self.attention.args if isinstance(value, Node)])

    @property
    def context_bytes(self) -> int:
        """Return the bytes of the context, of all tokens of the trace."""
        return sum(map(num_bytes, self.context))

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that go to where the KV is."""
        return sum(map(num_bytes, self.sent))

    @property
    def received_bytes(self) -> int:
        """Return the bytes that come back."""
        return num_bytes(self.attention)


@dataclass(frozen=True)
class SplitModel:
    """A traced model, its cuts, and the modules before, between and behind them."""

    graph: GraphModule
    cuts: tuple[Cut, ...]
    slices: tuple[GraphModule, ...]

    @property
    def vocab_size(self) -> int:
        """Return the number of logits of a token."""
        (output,) = [node for node in self.graph.graph.nodes if node.op == "output"]
        size: int = output.all_input_nodes[0].meta["val"].shape[-1]
        return size

    def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return what the whole model returns, computed slice by slice from its named inputs."""
        known = dict(inputs)
        for cut, module in zip(self.cuts, self.slices, strict=False):
            found = _call(module, known)
            names = [node.name for node in (*cut.context, *cut.sent)]
            context = dict(zip(names, found, strict=True))
            attention = cut.attention
            arguments = [context[a.name] if isinstance(a, Node) else a for a in attention.args]
            kept = {node.name: context[node.name] for node in cut.context}
            assert callable(attention.target), "it is an operator"
            known = {**inputs, **kept, attention.name: attention.target(*arguments)}
        (logits,) = _call(self.slices[-1], known)
        return logits


def split(graph: GraphModule) -> SplitModel:
    """Cut a traced model at each attention. Raises `ConfigError` if it has none."""
    nodes = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output")]
    followers = _followers_of(node for node in graph.graph.nodes if node.name == _first_input(graph))
    free = {node for node in nodes if node not in followers}
    attentions = [node for node in nodes if is_attention(node)]
    if not attentions:
        raise ConfigError("the model has no attention that transformers lets others compute")
    left = [node for node in nodes if node not in free]
    cuts: list[Cut] = []
    parts: list[tuple[list[Node], tuple[Node, ...]]] = []
    given: set[Node] = set()
    for attention in attentions:
        before, context = _least_cut(attention, left, given)
        cut = Cut(attention, context)
        parts.append((before, (*context, *cut.sent)))
        cuts.append(cut)
        placed = {attention, *before}
        left = [node for node in left if node not in placed]
        given = {attention, *context}
    (output,) = [node for node in graph.graph.nodes if node.op == "output"]
    parts.append((left, tuple(output.all_input_nodes)))
    slices = tuple([_module(graph, members, free, outputs) for members, outputs in parts])
    return SplitModel(graph, tuple(cuts), slices)


def num_bytes(node: Node) -> int:
    """Return the bytes of the value of a node, of all tokens of the trace."""
    value = node.meta["val"]
    tensors = value if isinstance(value, tuple | list) else (value,)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor))


def _least_cut(
    attention: Node, left: Sequence[Node], given: Iterable[Node]
) -> tuple[list[Node], tuple[Node, ...]]:
    """Return the nodes to compute before `attention`, and the values with the fewest bytes to keep.

    Each value is an edge with its bytes, from when it is made to when it is used. A node that is computed
    before has all that it needs before. Nodes of which neither follows from the other may be on either side.
    """
    after = _followers_of([attention])
    candidates = {*given, *[node for node in left if node not in after]}
    network = nx.DiGraph()
    for node in candidates:
        network.add_edge(("made", node), ("used", node), capacity=num_bytes(node))
        for user in node.users:
            if user in candidates:
                network.add_edge(("used", node), ("made", user), capacity=inf)
                network.add_edge(("made", user), ("made", node), capacity=inf)
            elif user in after and user is not attention:
                network.add_edge(("used", node), _SINK, capacity=inf)
    for node in (*given, *_ancestors_of(attention, candidates)):
        network.add_edge(_SOURCE, ("made", node), capacity=inf)
    if _SINK not in network:  # nothing but attention goes on
        return [node for node in left if node in candidates], ()
    _, (early, _) = nx.minimum_cut(network, _SOURCE, _SINK)
    context = [n for n in candidates if ("made", n) in early and ("used", n) not in early]
    order = {node: i for i, node in enumerate(attention.graph.nodes)}
    before = [node for node in left if node in candidates and ("made", node) in early]
    return before, tuple(sorted(context, key=order.__getitem__))


def _followers_of(nodes: Iterable[Node]) -> set[Node]:
    found: set[Node] = set()
    rest = list(nodes)
    while rest:
        node = rest.pop()
        if node not in found:
            found.add(node)
            rest += node.users
    return found


def _ancestors_of(attention: Node, within: set[Node]) -> set[Node]:
    found: set[Node] = set()
    rest = list(attention.all_input_nodes)
    while rest:
        node = rest.pop()
        if node in within and node not in found:
            found.add(node)
            rest += node.all_input_nodes
    return found


def _first_input(graph: GraphModule) -> str:
    name: str = next(node.name for node in graph.graph.nodes if node.op == "placeholder")
    return name


def _module(
    graph: GraphModule, members: Sequence[Node], free: set[Node], outputs: Sequence[Node]
) -> GraphModule:
    """Return a module of these nodes. What depends on no token is computed anew, the rest is its input."""
    made: dict[Node, Node] = {}
    new = Graph()
    inputs: dict[str, Node] = {}
    own = {*members}

    def copy(node: Node) -> Node:
        if node not in made:
            is_input = node not in own and node not in free
            made[node] = new.placeholder(node.name) if is_input else new.node_copy(node, copy)
            if is_input:
                inputs[node.name] = made[node]
        return made[node]

    for node in members:
        copy(node)
    new.output(tuple([copy(node) for node in outputs]))
    return GraphModule(graph, new)


def _call(module: GraphModule, known: Mapping[str, Tensor]) -> Sequence[Tensor]:
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    found: Sequence[Tensor] = module(*[known[name] for name in names])
    return found
