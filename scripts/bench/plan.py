#!/usr/bin/env python3
"""What will limit a data-parallel training on a cluster: a MODEL, which computes; nothing is run or measured.

    python scripts/bench/plan.py                                  # ResNet-50 and a GPT of 1.3 billion parameters
    python scripts/bench/plan.py --gpus 16 32 --gpus-per-host 4 --inter-gbytes 12.5
    python scripts/bench/plan.py --network mine --parameters 60e6 --gflops 40 --batch 64 --utilization 0.3
    python scripts/bench/plan.py --network resnet50 --step-seconds 0.21     # measured on one GPU: no FLOPs needed

Its assumptions, all of which can be changed by flags:

- Every GPU has a batch of its own, and a step computes FLOPs per sample x batch / (peak TFLOP/s x utilization).
- An update sums 4 bytes per parameter (fp16: 2; 2bit: what mxtrain packs, which grows with the number of processes, one
  per GPU in the ring and one per host with servers: 0.4 for 2, 0.8 for 8, 2 for 1,024).
- ring: one ring through all GPUs, in which every GPU sends 2(n-1)/n of the bytes in 2(n-1) messages, one after the
  other, for each group of gradients that is summed at once. The slowest link sets the pace: the network between hosts,
  of which a host has --inter-gbytes in each direction for all its GPUs, once there is more than one host.
- servers: the GPUs of a host sum in a ring within it; then the host sends all bytes to the servers and gets as many
  back, both ways at once. A server, on a host of its own, has --inter-gbytes each way, and an equal part of the bytes.
- The sum hides behind the computing from the first gradient on: --overlap is the backward pass's share of a step.
  The last group of gradients is there at the end of it, so its part of the sum is always seen.

The limit is "compute" while efficiency is 90% or more; else the part of the sum without which a step would be shortest.
Not in the model: memory, reading of
data, stragglers, several rings or trees, copies between a GPU and its host, time that a server or a CPU takes to add.
The utilizations and the cluster are examples, not measurements: put in what scripts/bench/step.py and scaling.py, or a
run on one of your GPUs, say.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from typing import Dict, List, Optional

COMPRESSIONS = ("none", "fp16", "2bit")
_GOOD = 0.9  # efficiency from which on computing is the limit


@dataclass(frozen=True)
class Network:
    name: str
    parameters: float
    """Those that have gradients."""
    flops: float
    """Per sample, forward and backward; a multiplication and an addition are two."""
    batch: int
    """Samples per GPU and step."""
    utilization: float
    """Share of the peak TFLOP/s that its training reaches on one GPU."""
    step_seconds: Optional[float] = None
    """Time of a step on one GPU, when it was measured; else it is computed from the FLOPs."""

    def compute(self, teraflops: float) -> float:
        """Seconds of a step that has nothing to sum."""
        if self.step_seconds is not None:
            return self.step_seconds
        return self.flops * self.batch / (teraflops * 1e12 * self.utilization)


@dataclass(frozen=True)
class Cluster:
    gpus_per_host: int = 8
    intra: float = 250e9
    """Bytes per second of a GPU's links within its host, each way."""
    inter: float = 25e9
    """Bytes per second of a host's network, each way."""
    latency: float = 10e-6
    """Seconds of a message, however short."""
    teraflops: float = 312.0
    """Peak of a GPU, in 10^12 per second."""
    overlap: float = 2 / 3
    """Share of a step's computing that sums can hide behind."""
    group: float = 64e6
    """Bytes of gradients that are summed at once."""


def gpt_parameters(layers: int, width: int, vocabulary: int, context: int) -> int:
    """Weights of a GPT whose output layer is its embedding; biases and norms included."""
    return layers * (12 * width**2 + 13 * width) + (vocabulary + context + 2) * width


def gpt_flops(layers: int, width: int, vocabulary: int, context: int) -> float:
    """Forward and backward, per sequence: 6 per token and weight of a product, and 12 x context x width per token and
    layer for attention (Chowdhery et al., "PaLM", 2022, appendix B)."""
    products = layers * 12 * width**2 + vocabulary * width
    return context * (6.0 * products + 12.0 * layers * context * width)


_GPT = (24, 2048, 50257, 2048)

NETWORKS = {
    # 4.09e9 multiplications and additions forward at 224 x 224; backward takes twice the work of forward
    "resnet50": Network("ResNet-50, 224x224", 25_557_032, 3 * 2 * 4.09e9, 128, 0.2),
    "gpt": Network("GPT of 1.3 billion, 2,048 tokens", gpt_parameters(*_GPT), gpt_flops(*_GPT), 8, 0.4),
}


@dataclass(frozen=True)
class Parts:
    """Seconds of a step, by what it takes them for."""

    compute: float
    intra: float
    """Bytes over links within hosts."""
    inter: float
    """Bytes over the network of the hosts with GPUs."""
    servers: float
    """What the network of the servers adds to that."""
    latency: float
    groups: int
    overlap: float

    @property
    def reduction(self) -> float:
        """Seconds of the sum, hidden or not."""
        return self.intra + self.inter + self.servers + self.latency

    @property
    def visible(self) -> float:
        """Seconds of the sum that are not hidden behind computing."""
        return max(self.reduction - self.overlap * self.compute, self.reduction / self.groups)

    @property
    def step(self) -> float:
        return self.compute + self.visible

    @property
    def limit(self) -> str:
        """"compute" where there is little to gain elsewhere; else the part of the sum that lengthens the step most."""
        if self.compute >= _GOOD * self.step:
            return "compute"
        names = {"intra": "links within hosts", "inter": "network between hosts", "servers": "servers' network",
                 "latency": "latency"}
        # The larger one where a step would be as long without either.
        costs = {name: (self.step - self._without(name).step, getattr(self, name)) for name in names}
        return names[max(costs, key=costs.get)]

    def _without(self, name: str) -> "Parts":
        return Parts(**{**self.__dict__, name: 0.0})


def bytes_per_parameter(compression: str, processes: int) -> float:
    """What is sent of each gradient, and comes back as a sum."""
    if compression == "2bit":  # as many digits to this base as a float32 holds: see mxtrain.parallel.compression
        return 4 / max(1, math.floor(24 / math.log2(2 * processes + 1)))
    return {"none": 4.0, "fp16": 2.0}[compression]


def ring(network: Network, cluster: Cluster, gpus: int, compression: str = "none") -> Parts:
    """One ring through all GPUs."""
    size = network.parameters * bytes_per_parameter(compression, gpus)
    groups = _groups(network, cluster)
    seconds = 2 * (gpus - 1) / gpus * size / (cluster.intra if _hosts(cluster, gpus) == 1 else
                                             min(cluster.inter, cluster.intra))
    slowest_is_inside = _hosts(cluster, gpus) == 1 or cluster.intra < cluster.inter
    return Parts(network.compute(cluster.teraflops), seconds if slowest_is_inside else 0.0,
                 0.0 if slowest_is_inside else seconds, 0.0, groups * 2 * (gpus - 1) * cluster.latency, groups,
                 cluster.overlap)


def servers(network: Network, cluster: Cluster, gpus: int, compression: str = "none",
            count: Optional[int] = None) -> Parts:
    """A parameter server on `count` hosts of its own; by default as many as the hosts that have GPUs."""
    hosts = _hosts(cluster, gpus)
    count = count or hosts
    inside = min(cluster.gpus_per_host, gpus)
    groups = _groups(network, cluster)
    intra = 2 * (inside - 1) / inside * 4 * network.parameters / cluster.intra
    pushed = network.parameters * bytes_per_parameter(compression, hosts)
    worker, server = (pushed * share / cluster.inter for share in (1, hosts / count))
    messages = 2 * (inside - 1) + 2  # of the ring within the host, to the server and back
    return Parts(network.compute(cluster.teraflops), intra, worker, max(server - worker, 0.0),
                 groups * messages * cluster.latency, groups, cluster.overlap)


def _hosts(cluster: Cluster, gpus: int) -> int:
    return -(-gpus // cluster.gpus_per_host)


def _groups(network: Network, cluster: Cluster) -> int:
    return max(1, math.ceil(4 * network.parameters / cluster.group))


def predict(network: Network, cluster: Cluster, gpus: int, way: str, compression: str = "none",
            count: Optional[int] = None) -> Dict:
    """One row: seconds, bytes, speed and limit of a way to sum ("ring" or "servers")."""
    hosts = _hosts(cluster, gpus)
    if way == "ring":
        parts = ring(network, cluster, gpus, compression)
        bytes_sent = 2 * (gpus - 1) / gpus * network.parameters * bytes_per_parameter(compression, gpus)
    else:
        parts = servers(network, cluster, gpus, compression, count)
        bytes_sent = network.parameters * bytes_per_parameter(compression, hosts)
    return {"network": network.name, "gpus": gpus, "hosts": hosts, "way": way, "compression": compression,
            "servers": (count or hosts) if way == "servers" else 0,
            "bytes_sent_per_update": bytes_sent,
            "compute_seconds": parts.compute, "reduction_seconds": parts.reduction,
            "visible_reduction_seconds": parts.visible, "step_seconds": parts.step,
            "samples_per_second": network.batch * gpus / parts.step, "efficiency": parts.compute / parts.step,
            "limit": parts.limit}


def main(argv: Optional[List[str]] = None) -> None:
    options = _options(argv)
    cluster = Cluster(options.gpus_per_host, options.intra_gbytes * 1e9, options.inter_gbytes * 1e9,
                      options.latency_us * 1e-6, options.tflops, options.overlap, options.group_mbytes * 1e6)
    networks = [_changed(NETWORKS.get(name), options) for name in options.network]
    ways = [(way, compression) for way in ("ring", "servers") for compression in options.compression]
    rows = [predict(network, cluster, gpus, way, compression, options.servers)
            for network in networks for gpus in options.gpus for way, compression in ways]
    if options.json:
        print(json.dumps({"model": True, "cluster": cluster.__dict__, "networks": [n.__dict__ for n in networks],
                          "rows": rows}))
        return
    print("A model, not a measurement: see --help for what it assumes.")
    print(f"Cluster: {cluster.gpus_per_host} GPUs a host of {cluster.teraflops:g} TFLOP/s; {cluster.intra / 1e9:g} "
          f"GB/s within hosts, {cluster.inter / 1e9:g} GB/s a host between them, "
          f"{cluster.latency * 1e6:g} us a message")
    for network in networks:
        print(f"\n{network.name}: {network.parameters / 1e6:.4g} million parameters, {network.batch} samples a GPU, "
              f"{_where_from(network, cluster)}")
        print(f"{'GPUs':>5} {'sum':22}{'MB sent':>9}{'compute':>9}{'sum':>9}{'visible':>9}{'step':>9}"
              f"{'samples/s':>11}{'eff.':>6}  limit")
        for row in (row for row in rows if row["network"] == network.name):
            way = row["way"] + (f" ({row['servers']})" if row["servers"] else "")
            way += "" if row["compression"] == "none" else f" {row['compression']}"
            times = "".join(f"{1000 * row[name]:9.1f}" for name in ("compute_seconds", "reduction_seconds",
                                                                    "visible_reduction_seconds", "step_seconds"))
            print(f"{row['gpus']:5} {way:22}{row['bytes_sent_per_update'] / 1e6:9.1f}{times}"
                  f"{row['samples_per_second']:11.0f}{100 * row['efficiency']:5.0f}%  {row['limit']}")
    print("\nTimes in ms. MB sent: by each GPU (ring) or each host (servers) per update. eff.: of n times one GPU.")


def _where_from(network: Network, cluster: Cluster) -> str:
    if network.step_seconds is not None:
        return f"{1000 * network.step_seconds:g} ms a step, as given"
    return (f"{network.flops / 1e9:.4g} GFLOP a sample at {100 * network.utilization:g}% of "
            f"{cluster.teraflops:g} TFLOP/s")


def _changed(known: Optional[Network], options) -> Network:
    """A network with what the flags say of it."""
    given = {"parameters": options.parameters, "flops": options.gflops and options.gflops * 1e9,
             "batch": options.batch, "utilization": options.utilization, "step_seconds": options.step_seconds}
    base = known.__dict__ if known else {"name": "mine", "flops": 0.0, "utilization": 1.0}
    return Network(**{**base, **{name: value for name, value in given.items() if value is not None}})


def _options(argv):
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--network", nargs="+", choices=[*NETWORKS, "mine"], default=list(NETWORKS),
                        help="mine: all of it by the flags below, which otherwise change what is known")
    parser.add_argument("--parameters", type=_positive, help="of the network")
    parser.add_argument("--gflops", type=_positive, help="10^9 operations per sample, forward and backward")
    parser.add_argument("--batch", type=_count, help="samples per GPU")
    parser.add_argument("--utilization", type=_share, help="share of the peak that is reached, above 0 to 1")
    parser.add_argument("--step-seconds", type=_positive, help="a step on one GPU, instead of FLOPs and utilization")
    parser.add_argument("--gpus", nargs="+", type=_count, default=[8, 64, 1024])
    parser.add_argument("--gpus-per-host", type=_count, default=Cluster.gpus_per_host)
    parser.add_argument("--intra-gbytes", type=_positive, default=Cluster.intra / 1e9, metavar="GB/S",
                        help="of a GPU within its host, each way (default: %(default)g)")
    parser.add_argument("--inter-gbytes", type=_positive, default=Cluster.inter / 1e9, metavar="GB/S",
                        help="of a host, each way (default: %(default)g)")
    parser.add_argument("--latency-us", type=_positive, default=1e6 * Cluster.latency, metavar="US",
                        help="of a message (default: %(default)g)")
    parser.add_argument("--tflops", type=_positive, default=Cluster.teraflops,
                        help="peak of a GPU (default: %(default)g)")
    parser.add_argument("--overlap", type=_share_or_none, default=Cluster.overlap,
                        help="share of computing that sums can hide behind; 0: none (default: %(default).2g)")
    parser.add_argument("--group-mbytes", type=_positive, default=Cluster.group / 1e6, metavar="MB",
                        help="of gradients that are summed at once (default: %(default)g)")
    parser.add_argument("--servers", type=_count, help="parameter servers (default: as many as hosts)")
    parser.add_argument("--compression", nargs="+", choices=COMPRESSIONS, default=["none", "fp16"])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    own = ("parameters", "gflops", "batch", "utilization", "step_seconds")
    if "mine" in options.network:
        if options.parameters is None or options.batch is None:
            parser.error("--network mine: needs --parameters and --batch")
        if options.step_seconds is None and (options.gflops is None or options.utilization is None):
            parser.error("--network mine: needs --gflops and --utilization, or --step-seconds")
    elif "gpt" in options.network and "resnet50" in options.network:
        for name in own:
            if getattr(options, name) is not None:
                parser.error(f"--{name.replace('_', '-')}: say by --network of which network")
    if options.step_seconds is not None:
        for name in ("gflops", "utilization"):
            if getattr(options, name) is not None:
                parser.error(f"--{name}: has no effect with --step-seconds")
    return options


def _number(text: str, low: float, high: float, words: str, whole: bool = False):
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text}: must be {words}")
    return value


def _positive(text: str) -> float:
    return _number(text, 1e-300, 1e300, "a number above 0")


def _count(text: str) -> int:
    return _number(text, 1, 10**9, "a whole number from 1 on", whole=True)


def _share(text: str) -> float:
    return _number(text, 1e-300, 1, "above 0 and at most 1")


def _share_or_none(text: str) -> float:
    return _number(text, 0, 1, "from 0 to 1")


if __name__ == "__main__":
    main()
