"""The metrics of all nodes as one text, from Ray's agents."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import ray

from rayspec.serve.metric_table import UNREACHABLE_NODES

logger = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_OURS = ("ray_rayspec_", "ray_serve_")
_COMMENT = re.compile(r"# (HELP|TYPE) (\S+) ?(.*)")


@dataclass(slots=True)
class _Family:
    """A metric: its series and their values. Of the same series from several agents, the first counts."""

    help: str = ""
    kind: str = "untyped"
    samples: dict[str, str] = field(default_factory=dict)

    def lines(self, name: str) -> Iterable[str]:
        yield f"# HELP {name} {self.help}"
        yield f"# TYPE {name} {self.kind}"
        for series, value in self.samples.items():
            yield f"{series} {value}"


async def scrape(*, timeout_s: float = 2.0) -> str:
    """Return the metrics of rayspec and Serve on all nodes, in Prometheus' text format (CONTENT_TYPE).

    A node that has not answered after `timeout_s` is left out and counted.
    """
    return await scrape_agents(agents(await asyncio.to_thread(ray.nodes)), timeout_s=timeout_s)


def agents(nodes: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the addresses (host:port) of the agents of `ray.nodes()`, without nodes that Ray knows to be dead."""
    hosts = [(node["NodeManagerAddress"], node["MetricsExportPort"]) for node in nodes if node["Alive"]]
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in hosts]


async def scrape_agents(addresses: Sequence[str], *, timeout_s: float) -> str:
    """Query the agents at these addresses (host:port) in parallel, and merge their metrics as `scrape` does."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session:
        texts = await asyncio.gather(*(_text_of(session, address) for address in addresses))
    return merged([text for text in texts if text is not None], num_unreachable=texts.count(None))


def merged(texts: Sequence[str], *, num_unreachable: int = 0) -> str:
    """Merge the metrics of rayspec and Serve into one valid exposition: each family and each series occurs once."""
    families: dict[str, _Family] = {}
    for text in texts:
        for name, family in _families(text).items():
            known = families.setdefault(name, family)
            if known.kind == family.kind:
                for series, value in family.samples.items():
                    known.samples.setdefault(series, value)
    families[UNREACHABLE_NODES] = _Family(
        help="Nodes whose metrics are missing here.", kind="gauge", samples={UNREACHABLE_NODES: str(num_unreachable)}
    )
    return "".join(f"{line}\n" for name, family in families.items() for line in family.lines(name))


def _families(text: str) -> dict[str, _Family]:
    """Parse a text in which samples follow the comments of their family, as in all exports of Ray."""
    families: dict[str, _Family] = {}
    family: _Family | None = None
    for line in text.split("\n"):  # not splitlines, which also splits at other characters that label values may contain
        if comment := _COMMENT.fullmatch(line):
            what, name, rest = comment.groups()
            family = families.setdefault(name, _Family()) if name.startswith(_OURS) else None
            if family is not None and what == "HELP":
                family.help = rest
            elif family is not None:
                family.kind = rest
        elif line and family is not None:
            series, _, value = line.rpartition(" ")
            family.samples.setdefault(series, value)
    return families


async def _text_of(session: aiohttp.ClientSession, address: str) -> str | None:
    """Return the export of an agent; None where the agent does not answer."""
    try:
        async with session.get(f"http://{address}/metrics", raise_for_status=True) as response:
            return await response.text(encoding="utf-8")
    except (aiohttp.ClientError, asyncio.TimeoutError, UnicodeDecodeError) as error:
        logger.info("the metrics of node %s are missing: %s: %s", address, type(error).__name__, error)
        return None
