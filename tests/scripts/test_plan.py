"""scripts/bench/plan.py: cases worked out by hand, and what must not decrease when something gets better."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mxtrain.parallel.compression import digits

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "plan.py"


def load():
    spec = importlib.util.spec_from_file_location("bench_plan", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


plan = load()

# 1,000 bytes of gradients, in one group; a step of 10 s
NETWORK = plan.Network("test", parameters=250, flops=5.0e12, batch=4, utilization=0.5)
CLUSTER = plan.Cluster(gpus_per_host=4, intra=100.0, inter=10.0, latency=0.0, teraflops=4.0, overlap=0.0, group=1000.0)


def test_compute_is_from_flops_or_as_measured():
    assert NETWORK.compute(4.0) == 10.0  # 5e12 * 4 / (4e12 * 0.5)
    assert replace(NETWORK, step_seconds=3.0).compute(4.0) == 3.0


@pytest.mark.parametrize("gpus, seconds", [
    (1, 0.0),
    (4, 2 * 3 / 4 * 1000 / 100),  # within a host
    (5, 2 * 4 / 5 * 1000 / 10),  # a second host: its network is the slowest link
    (8, 2 * 7 / 8 * 1000 / 10)])
def test_ring(gpus, seconds):
    row = plan.predict(NETWORK, CLUSTER, gpus, "ring")
    assert row["reduction_seconds"] == row["visible_reduction_seconds"] == pytest.approx(seconds)
    assert row["step_seconds"] == pytest.approx(10 + seconds)
    assert row["samples_per_second"] == pytest.approx(4 * gpus / (10 + seconds))
    assert row["efficiency"] == pytest.approx(10 / (10 + seconds))


def test_a_ring_over_hosts_is_as_slow_as_links_within_them_when_these_are_slower():
    row = plan.predict(NETWORK, replace(CLUSTER, intra=5.0), 8, "ring")
    assert row["reduction_seconds"] == pytest.approx(2 * 7 / 8 * 1000 / 5) and row["limit"] == "links within hosts"


def test_latency_counts_each_message_of_each_group():
    parts = plan.ring(NETWORK, replace(CLUSTER, latency=0.5, group=300.0), 4)
    assert parts.groups == 4 and parts.latency == 4 * 6 * 0.5
    parts = plan.servers(NETWORK, replace(CLUSTER, latency=0.5), 8)
    assert parts.latency == (6 + 2) * 0.5


def test_bytes_of_each_compression():
    assert plan.predict(NETWORK, CLUSTER, 8, "ring")["bytes_sent_per_update"] == 2 * 7 / 8 * 1000
    assert plan.predict(NETWORK, CLUSTER, 8, "ring", "fp16")["bytes_sent_per_update"] == 2 * 7 / 8 * 500
    # Two hosts: 10 digits to the base 5 are less than 2**24; eight GPUs: 5 to the base 17.
    assert plan.predict(NETWORK, CLUSTER, 8, "servers", "2bit")["bytes_sent_per_update"] == 250 * 4 / 10
    assert plan.predict(NETWORK, CLUSTER, 8, "ring", "2bit")["bytes_sent_per_update"] == 2 * 7 / 8 * 250 * 4 / 5


@pytest.mark.parametrize("processes", [1, 2, 3, 8, 20, 64, 1024, 5000])
def test_2bit_is_what_mxtrain_packs(processes):
    assert plan.bytes_per_parameter("2bit", processes) == 4 / digits(processes)


@pytest.mark.parametrize("count, seconds", [
    (1, 200.0),  # two hosts send it 1,000 bytes each, at 10 a second
    (2, 100.0),
    (8, 100.0)])  # now the network of the workers' hosts is slower
def test_servers(count, seconds):
    row = plan.predict(NETWORK, CLUSTER, 8, "servers", count=count)
    assert row["servers"] == count
    assert row["reduction_seconds"] == pytest.approx(2 * 3 / 4 * 1000 / 100 + seconds)


def test_a_single_server_is_the_limit_of_many_hosts():
    assert plan.predict(NETWORK, CLUSTER, 64, "servers", count=1)["limit"] == "servers' network"
    assert plan.predict(NETWORK, CLUSTER, 64, "servers", count=16)["limit"] == "network between hosts"


def test_what_can_be_hidden():
    whole = plan.ring(NETWORK, CLUSTER, 4)
    assert whole.reduction == pytest.approx(15)
    half = plan.ring(NETWORK, replace(CLUSTER, overlap=0.5, group=100.0), 4)
    assert half.visible == pytest.approx(15 - 5)
    # All of it would be hidden, but the last of ten groups is there only at the end.
    hidden = plan.ring(replace(NETWORK, step_seconds=1000.0), replace(CLUSTER, overlap=0.5, group=100.0), 4)
    assert hidden.visible == pytest.approx(1.5) and hidden.limit == "compute"


@pytest.mark.parametrize("network, cluster, gpus, limit", [
    ({}, {"intra": 1e9}, 4, "compute"),
    ({}, {"intra": 1.0}, 4, "links within hosts"),
    ({}, {}, 8, "network between hosts"),
    ({}, {"latency": 100.0}, 8, "latency"),
    ({"step_seconds": 1e6}, {}, 8, "compute")])
def test_limit(network, cluster, gpus, limit):
    assert plan.ring(replace(NETWORK, **network), replace(CLUSTER, **cluster), gpus).limit == limit


@pytest.mark.parametrize("way", ["ring", "servers"])
@pytest.mark.parametrize("name", list(plan.NETWORKS))
@pytest.mark.parametrize("gpus", [8, 64, 1024])
def test_better_is_never_slower(name, gpus, way):
    network, cluster = plan.NETWORKS[name], plan.Cluster()

    def step(cluster=cluster, compression="none"):
        return plan.predict(network, cluster, gpus, way, compression)["step_seconds"]

    better = [{"intra": 2 * cluster.intra}, {"inter": 2 * cluster.inter}, {"latency": cluster.latency / 2},
              {"teraflops": 2 * cluster.teraflops}, {"overlap": 1.0}]
    assert all(step(replace(cluster, **change)) <= step() for change in better)
    assert step(compression="fp16") <= step()


@pytest.mark.parametrize("name", list(plan.NETWORKS))
def test_more_gpus_are_more_samples_a_second_at_less_efficiency(name):
    rows = [plan.predict(plan.NETWORKS[name], plan.Cluster(), gpus, "ring") for gpus in (1, 8, 64, 1024)]
    rates, efficiencies = ([row[key] for row in rows] for key in ("samples_per_second", "efficiency"))
    assert rates == sorted(rates) and efficiencies == sorted(efficiencies, reverse=True) and efficiencies[0] == 1


def test_more_servers_are_never_slower():
    steps = [plan.predict(plan.NETWORKS["gpt"], plan.Cluster(), 64, "servers", count=s)["step_seconds"]
             for s in (1, 2, 4, 8, 16)]
    assert steps == sorted(steps, reverse=True) and steps[0] > steps[-1]


def test_numbers_of_the_known_networks():
    assert plan.gpt_parameters(1, 2, 10, 3) == 12 * 4 + 13 * 2 + (10 + 3 + 2) * 2
    assert plan.gpt_flops(1, 2, 10, 3) == 3 * (6 * (12 * 4 + 10 * 2) + 12 * 3 * 2)
    gpt = plan.NETWORKS["gpt"]
    assert 1.25e9 < gpt.parameters < 1.35e9
    assert 6 <= gpt.flops / gpt.parameters / 2048 < 7.5  # six operations per weight and token, and attention


def start(*flags):
    return subprocess.run([sys.executable, "-S", str(SCRIPT), *flags], capture_output=True, text=True, timeout=60)


def test_a_network_of_ones_own():
    """-S: neither mxnet nor any other package is needed."""
    done = start("--network", "mine", "--parameters", "250", "--gflops", "5000", "--batch", "4", "--utilization", "0.5",
                 "--tflops", "4", "--gpus-per-host", "4", "--gpus", "4", "--intra-gbytes", "1e-7",
                 "--latency-us", "1e-9", "--overlap", "0", "--compression", "none", "--json")
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    ring = output["rows"][0]
    assert output["model"] is True and (ring["way"], ring["gpus"]) == ("ring", 4)
    assert ring["step_seconds"] == pytest.approx(10 + 15)


def test_the_table_says_that_it_is_a_model():
    done = start()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("A model, not a measurement")
    for text in ("ResNet-50", "GPT", " 1024 ring", " 1024 servers (128)"):
        assert text in done.stdout


@pytest.mark.parametrize("flags, words", [
    (["--network", "mine", "--batch", "4"], "needs --parameters and --batch"),
    (["--network", "mine", "--batch", "4", "--parameters", "9"], "or --step-seconds"),
    (["--batch", "4"], "say by --network"),
    (["--network", "gpt", "--step-seconds", "1", "--utilization", "0.5"], "--utilization: has no effect"),
    (["--gpus", "0"], "0: must be a whole number from 1 on"),
    (["--inter-gbytes", "-1"], "must be a number above 0"),
    (["--overlap", "1.5"], "must be from 0 to 1")])
def test_mistakes(flags, words):
    done = start(*flags)
    assert done.returncode == 2 and words in done.stderr.splitlines()[-1] and not done.stdout
