# SPDX-License-Identifier: Apache-2.0
"""All releases: which peers this server may connect to, where its operator says so.

A client's `kv_transfer_params` name a host and a port, and a decode server connects there to shake
hands. On stock that may be any host and any port that it can reach. In `--kv-transfer-config`::

    "kv_connector_extra_config": {"allowed_peers": ["10.8.0.0/16:5600-5663", "*.prefill.svc"]}

An entry is an address, a network, a name, or `*.` and the end of names, and may go on with `:port`
or `:first-last`; an IPv6 address that does stands in brackets. A host that is given as an address
is looked for among addresses, and one that is given as a name among names: nothing is resolved.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.logger import init_logger

from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.handshake_line import (
    max_handshake_wait,
)
from vllm_overlay.distributed.kv_transfer.kv_connector.v1.nixl.params import (
    Problem,
    asks_for_blocks,
    printable,
    unbracketed,
)

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

logger = init_logger(f"vllm.{__name__}")

_OPTION = "allowed_peers"

_ENTRY = re.compile(
    r"(?:\[(?P<bracketed>[^]]+)\]|(?P<plain>[^:[\]]+))(?::(?P<low>\d{1,5})(?:-(?P<high>\d{1,5}))?)?"
)

_NAME = re.compile(r"(?:\*\.)?(?P<name>(?=.*[a-z])[a-z0-9_-]+(?:\.[a-z0-9_-]+)*)")
"""With a letter: `127.1` is an address to whoever connects. Nothing of ZMQ's own syntax."""

_ALL = range(1, 65536)


class _Entry(NamedTuple):
    """What one entry allows: a network, or a name that is whole or, with a dot before it, an end.

    Attributes:
        network: None if it is a name.
        name: in lower case; empty if it is a network.
        ports: of the side channel.
    """

    network: IPv4Network | IPv6Network | None
    name: str
    ports: range


class Peers:
    """The peers that are allowed.

    Raises:
        ValueError: An entry is none.
    """

    def __init__(self, *entries: str) -> None:
        self._entries = [_read(entry) for entry in entries]

    def allow(self, host: str, port: int) -> bool:
        """Whether one of the entries allows to connect to a host and port."""
        address, name = _address(unbracketed(host)), host.lower().removesuffix(".")
        if address is None and (not _NAME.fullmatch(name) or name.startswith("*")):
            return False
        return any(
            port in entry.ports
            and (
                _is_called(name, entry.name)
                if entry.network is None
                else address is not None and address in entry.network
            )
            for entry in self._entries
        )


def _is_called(name: str, known: str) -> bool:
    return name.endswith(known) if known.startswith(".") else name == known


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(host)
    except ValueError:
        return None
    # The same machine as without the prefix.
    return (isinstance(address, IPv6Address) and address.ipv4_mapped) or address


def _read(entry: str) -> _Entry:
    network = _network(entry)
    if network is not None:
        return _Entry(network, "", _ALL)
    found = _ENTRY.fullmatch(entry)
    if found is not None:
        low = int(found["low"] or _ALL[0])
        high = int(found["high"] or found["low"] or _ALL[-1])
        host = found["bracketed"] or found["plain"]
        network = _network(host)
        name = None if found["bracketed"] else _NAME.fullmatch(host.lower().removesuffix("."))
        if low in _ALL and high in _ALL and low <= high and (network or name):
            known = "" if name is None else name[0].removeprefix("*")
            return _Entry(network, "" if network else known, range(low, high + 1))
    raise ValueError(
        f"kv_connector_extra_config.{_OPTION} has {entry!r}. Expected an address, a network, a "
        "name or *.name, each with or without :port or :first-last, such as '10.8.0.0/16', "
        "'[fd00::/8]:5600-5663' or '*.prefill.svc'"
    )


def _network(text: str) -> IPv4Network | IPv6Network | None:
    try:
        return ip_network(text)
    except ValueError:
        return None


def allowed_peers(config: KVTransferConfig) -> Peers | None:
    """Return the peers that a scheduler's connector is configured to allow; None for any.

    Raises:
        ValueError: The option is no list of entries, or that of the workers is no number. The
            engine does not start.
    """
    max_handshake_wait(config)  # workers would find out at their first handshake
    entries: Any = config.get_from_extra_config(_OPTION, None)
    if entries is None:
        logger.warning(
            "A client's kv_transfer_params can have this server connect to any host and port that "
            "it can reach. Name the prefill servers in kv_connector_extra_config.%s, or see to it "
            "that only your router can send requests.",
            _OPTION,
        )
        return None
    if not isinstance(entries, list | tuple) or not all(isinstance(e, str) for e in entries):
        raise ValueError(
            f"kv_connector_extra_config.{_OPTION} is {entries!r}. Expected a list of strings"
        )
    return Peers(*entries)


def peer_not_allowed(scheduler: object, params: dict[str, Any]) -> Problem | None:
    """Say why a scheduler's connector may not connect to the peer that parameters name.

    They name one, as `peer_problem` would have it, or ask for no blocks.
    """
    # By the name: vLLM's own tests make schedulers without their constructor.
    peers: Peers | None = vars(scheduler).get("_allowed_peers")
    if peers is None or not asks_for_blocks(params):
        return None
    host, port = params["remote_host"], params["remote_port"]
    if peers.allow(host, port):
        return None
    return Problem("remote_host", f"names {printable(host)}:{port}, which {_OPTION} does not")
