"""The metrics of the endpoint as data, and their values on all nodes as one text, from Ray's agents."""

from __future__ import annotations

import asyncio
import csv
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import ray
from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
COMMON_LABELS = ("model", "replica")
UNREACHABLE_NODES = "rayspec_scrape_unreachable_nodes"  # added by `merged`, not recorded by an engine
_OURS = re.compile(r"^(?:# \w+ )?ray_(?:rayspec|serve)_.*\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. kind: counter, gauge or histogram. label: name of its label in addition to COMMON_LABELS, if any.
    buckets: upper bounds of a histogram's, in its unit; vLLM's, so that its dashboards and alerts work here too."""

    kind: str
    name: str
    unit: str
    label: str
    buckets: str
    meaning: str

    @property
    def labels(self) -> tuple[str, ...]:
        return (*COMMON_LABELS, self.label) if self.label else COMMON_LABELS

    @property
    def exported_name(self) -> str:
        """Name under which Ray's agents export the metric."""
        return f"ray_{self.name}_total" if self.kind == "counter" else f"ray_{self.name}"


with Path(__file__).with_name("metrics.csv").open(encoding="utf-8", newline="") as _table:
    METRICS: tuple[MetricSpec, ...] = tuple(MetricSpec(**row) for row in csv.DictReader(_table))


async def scrape() -> str:
    """Return the metrics of rayspec and Serve on all nodes, in Prometheus' text format (CONTENT_TYPE). A node that has
    not answered after two seconds is left out and counted."""
    nodes = [node for node in await asyncio.to_thread(ray.nodes) if node["Alive"]]
    hosts = [(node["NodeManagerAddress"], node["MetricsExportPort"]) for node in nodes]
    addresses = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in hosts]
    return await scrape_agents(addresses, timeout_s=2.0)


async def scrape_agents(addresses: Sequence[str], *, timeout_s: float) -> str:
    """Query the agents at these addresses (host:port) in parallel, and merge their metrics as `scrape` does."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session:
        texts = await asyncio.gather(*(_text_of(session, address) for address in addresses))
    found = [text for text in texts if text is not None]
    return await asyncio.to_thread(merged, found, num_unreachable=texts.count(None))


class _Families(dict[str, Metric], Collector):
    def collect(self) -> Iterable[Metric]:
        return self.values()


def merged(texts: Sequence[str], *, num_unreachable: int = 0) -> str:
    """Merge the metrics of rayspec and Serve into one valid exposition: each family and each series occurs once. Of the
    same series from several agents, the first counts."""
    families, seen = _Families(), set()
    for text in texts:
        for found in text_string_to_metric_families("".join(_OURS.findall(text))):
            family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
            for sample in found.samples if found.type == family.type else ():
                series = (sample.name, *sorted(sample.labels.items()))
                if series not in seen:
                    seen.add(series)
                    family.samples.append(sample)
    missing = Metric(UNREACHABLE_NODES, "Nodes whose metrics are missing here.", "gauge")
    missing.add_sample(UNREACHABLE_NODES, {}, num_unreachable)
    families[UNREACHABLE_NODES] = missing
    return generate_latest(families).decode()


async def _text_of(session: aiohttp.ClientSession, address: str) -> str | None:
    try:
        async with session.get(f"http://{address}/metrics", raise_for_status=True) as response:
            return await response.text(encoding="utf-8")
    except (aiohttp.ClientError, asyncio.TimeoutError, UnicodeDecodeError) as error:
        logger.info("the metrics of node %s are missing: %s: %s", address, type(error).__name__, error)
        return None
