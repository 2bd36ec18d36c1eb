"""Read which device every node of every graph was put on.

The lines are those of `GGML_SCHED_DEBUG=2` with `-lv 5`, printed without prefixes
(llama-server b10068 and 86a2835, observed; the format is ggml's, `ggml_backend_sched_print_
assignments`, and the same for every backend):

    ## SPLIT #1: Vulkan0 # 6 inputs: [embd (   0K)] ...
    node #  3 (   MUL_MAT):               Qcur-0 (   0K) [Vulka         ] use=1,c=1: ...

Backend names are cut to five characters in node lines, so a node is held against the start of the
device's name and every split against the whole of it. No-op views are not listed.
"""

from __future__ import annotations

import re

import msgspec

from onebit_serve.core.gate.verdict import Finding, failed, not_run, passed

__all__ = ["Allowed", "Graph", "Node", "judge", "parse"]

_SPLIT = re.compile(r"## SPLIT #(\d+): (\S+) # (\d+) inputs")
# The name is printed with %20.20s and may hold anything, parentheses and brackets included.
_NODE = re.compile(r"node #\s*(\d+) \(\s*(\S+?)\):\s(.{20}) \(\s*\S+\) \[\s*(\S*?)\s*\] use=\d+")
_NODE_START = re.compile(r"node #\s*\d+ \(")
_NAME_SHOWN = 5
_SHOWN = 8


class Node(msgspec.Struct, frozen=True):
    """One operation of a graph.

    Args:
        operation: ggml's name, cut to ten characters by the log (`FLASH_ATTN`).
        name: The tensor's name, cut to twenty characters by the log.
        backend: The backend's name, cut to five characters by the log.
        split: The whole name of the backend of its split.
    """

    operation: str
    name: str
    backend: str
    split: str


class Graph(msgspec.Struct, frozen=True):
    """One graph as the scheduler placed it.

    Args:
        nodes: Its operations, in order.
        splits: How many parts it was cut into.
        unread: Lines that begin like a node and could not be read, cut-off ones for example.
    """

    nodes: tuple[Node, ...]
    splits: int
    unread: tuple[str, ...] = ()


class Allowed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An operation that may run on the CPU.

    Args:
        op: ggml's name of the operation.
        name: A regular expression that the whole tensor name must match.
        why: Why this is no fault.
    """

    op: str
    name: str = ".*"
    why: str = ""


def parse(text: str) -> list[Graph]:
    """Read every graph from a log.

    Args:
        text: The log; other lines are skipped.

    Returns:
        One graph for each `SPLIT #0`, in order.
    """
    graphs: list[Graph] = []
    nodes: list[Node] = []
    unread: list[str] = []
    splits = 0
    backend = ""

    def close() -> None:
        if splits:
            graphs.append(Graph(tuple(nodes), splits, tuple(unread)))

    for line in text.splitlines():
        if split := _SPLIT.search(line):
            if split[1] == "0":
                close()
                nodes, unread, splits = [], [], 0
            splits += 1
            backend = split[2]
        elif node := _NODE.search(line):
            nodes.append(Node(node[2], node[3].strip(), node[4], backend))
        elif _NODE_START.search(line):
            unread.append(line)
    close()
    return graphs


def _on(node: Node, device: str) -> bool:
    # With one device the cut name decides; where two devices share their first five letters
    # (ROCm10, ROCm11) the name of the split, which is whole, does.
    return node.backend == device[:_NAME_SHOWN] and node.split == device


def judge(
    graphs: list[Graph],
    device: str,
    allowed: tuple[Allowed, ...],
    *,
    served: int,
    min_served: int = 2,
) -> Finding:
    """Hold every node against the device that was asked for.

    Args:
        graphs: What `parse` returned.
        device: The device as the scheduler names it (`HRX0`, `Vulkan0`, `CPU`).
        allowed: What may run on the CPU.
        served: How many of the graphs came after the model was loaded. Those before are only
            reserved, not computed.
        min_served: How many of these there must be at least: a prefill and a decode.

    Returns:
        FAIL with the strays, NOT RUN where the log holds no or too few graphs.
    """
    if not graphs:
        return not_run(
            "the log holds no scheduler output; this build may not print it (GGML_SCHED_DEBUG)"
        )
    unread = [line for graph in graphs for line in graph.unread]
    if unread:
        return not_run(
            f"{len(unread)} node lines could not be read, the format may have changed",
            detail="\n".join(unread[:_SHOWN]),
        )
    rules = [(rule.op, re.compile(rule.name)) for rule in allowed]
    total = 0
    strays: dict[Node, int] = {}
    excused: dict[str, int] = {}
    for graph in graphs:
        for node in graph.nodes:
            total += 1
            if _on(node, device):
                continue
            if node.backend == "CPU" and any(
                node.operation == op and name.fullmatch(node.name) for op, name in rules
            ):
                key = f"{node.operation} {node.name}"
                excused[key] = excused.get(key, 0) + 1
                continue
            strays[node] = strays.get(node, 0) + 1
    figure = f"{total - sum(strays.values())}/{total} nodes in {len(graphs)} graphs on {device}"
    splits = max(graph.splits for graph in graphs)
    data: dict[str, object] = {
        "graphs": len(graphs),
        "served_graphs": served,
        "nodes": total,
        "most_splits": splits,
        "allowed_on_cpu": excused,
    }
    if served < min_served or not total:
        return not_run(f"only {served} graphs of requests were printed, {total} nodes", data=data)
    if strays:
        shown = [
            f"{node.operation} {node.name} on {node.split or node.backend} in {times} graphs"
            for node, times in list(strays.items())[:_SHOWN]
        ]
        first = next(iter(strays))
        return failed(
            f"{len(strays)} operations are not on {device}, first: {first.operation} {first.name} "
            f"on {first.split}",
            figure,
            "every node",
            detail="\n".join(shown),
            data=data,
        )
    return passed(figure, "every node", data=data)
