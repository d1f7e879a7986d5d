"""Starting again after a failure, with the same workers, fewer, or more; and hosts, through a stand-in for ssh."""

import json
import os

import pytest
from launching import processes, variables_of, wait_for  # noqa: F401

from mxtrain.launch import main as program
from mxtrain.launch.worker import announce_run, folder_to_resume, launched as is_launched

TELLS = """
import json, os, signal, sys, time
rank, start = int(os.environ["MXTRAIN_RANK"]), int(os.environ["MXTRAIN_RESTART"])
names = ("MXTRAIN_SIZE", "MXTRAIN_RESUME", "MXTRAIN_TEST_HOST", "DMLC_NUM_WORKER")
print(json.dumps([start, rank, *map(os.environ.get, names)]), flush=True)
def meet():
    "Waits until all workers of this start have come here: none may be ended before it has told."
    folder = os.environ["MXTRAIN_TEST_FOLDER"]
    open(f"{folder}/{start}.{rank}", "w")
    while sum(name.startswith(f"{start}.") for name in os.listdir(folder)) < int(os.environ["MXTRAIN_SIZE"]):
        time.sleep(0.01)
meet()
"""


@pytest.fixture(autouse=True)
def no_pause(monkeypatch, tmp_path):
    monkeypatch.setattr(program, "_LONGEST_PAUSE", 0)
    (tmp_path / "met").mkdir()
    monkeypatch.setenv("MXTRAIN_TEST_FOLDER", str(tmp_path / "met"))


def told(out):
    """What the workers told -> sorted lists of (start, rank, size, folder to resume, host)."""
    return sorted(json.loads(line.partition("] ")[2]) for line in out.splitlines() if line.startswith("[worker"))


def started(out):
    """Number of workers at each start."""
    starts = [row[0] for row in told(out)]
    return [starts.count(start) for start in sorted(set(starts))]


def test_a_failure_is_followed_by_a_start_with_the_run_folder(launch, caplog):
    code = TELLS + """
if rank == 0 and start == 0:
    os.write(2, b"\\n\\x1emxtrain run /runs/x\\n"); sys.exit(1)
if rank == 1 and start == 1: sys.exit(1)
if start < 2: time.sleep(60)
"""
    result, out, err = launch("-n", 2, "--restarts", 3, "--grace", 1, code=code)
    assert result == 0 and started(out) == [2, 2, 2]
    assert [row[3] for row in told(out)] == [None, None, "/runs/x", "/runs/x", "/runs/x", "/runs/x"]
    assert "\x1e" not in err and "restart 1 of 3 in 0 s, from /runs/x" in caplog.text


def test_announcing_goes_through_stderr(capfd, monkeypatch, tmp_path):
    monkeypatch.delenv("MXTRAIN_LAUNCH", raising=False)
    announce_run(tmp_path)
    assert capfd.readouterr().err == "" and not is_launched() and folder_to_resume() is None
    monkeypatch.setenv("MXTRAIN_LAUNCH", "ps")
    monkeypatch.setenv("MXTRAIN_RESUME", str(tmp_path))
    monkeypatch.chdir(tmp_path.parent)
    announce_run(tmp_path.name)
    assert capfd.readouterr().err == f"\n\x1emxtrain run {tmp_path}\n" and is_launched()
    assert folder_to_resume() == tmp_path


def test_restarts_are_counted_and_the_last_failure_counts(launch):
    result, out, err = launch("-n", 1, "--restarts", 2, code=TELLS + "sys.exit(7 + start)")
    assert result == 9 and started(out) == [1, 1, 1]
    assert err.rstrip().endswith("launch.py: error: worker 0 on localhost ended with exit code 9")


def test_a_users_mistake_is_not_repeated(launch):
    result, out, _ = launch("-n", 2, "--restarts", 5, "--grace", 1, code=TELLS + "sys.exit(2)")
    assert result == 2 and started(out) == [2]


def test_a_killed_service_is_a_failure(launched, token):
    process = launched("-n", 1, "--restarts", 1, "--grace", 0, code=TELLS + "\nif start == 0: time.sleep(60)")
    process.stdout.readline()

    def server():
        return [pid for pid in processes(token) if variables_of(pid).get("DMLC_ROLE") == "server"]

    os.kill(wait_for(server)[0], 9)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0 and "server 0 on localhost ended with exit code 137 (SIGKILL); restart 1 of 1" in err


def test_a_signal_in_the_pause_ends_the_launch(launched):
    process = launched("-n", 1, "--restarts", 9, code=TELLS + "sys.exit(1)")
    while "restart 2 of 9 in 2 s" not in process.stderr.readline():
        pass
    process.terminate()
    out, err = process.communicate(timeout=10)
    assert process.returncode == 1 and err.rstrip().endswith("exit code 1")


def test_elastic_a_failed_worker_is_left_out_and_taken_in_again(launch):
    code = TELLS + """
if start == 0 and rank == 2: sys.exit(1)     # three, the last one fails
if start == 1 and rank == 0: sys.exit(1)     # two, the first one fails
if start < 2: time.sleep(60)                 # the last one is back, for the first one
"""
    result, out, _ = launch("-n", 3, "--restarts", 5, "--min-workers", 2, "--grace", 0, code=code)
    assert result == 0 and started(out) == [3, 2, 2]
    assert {row[5] for row in told(out) if row[0] == 1} == {"2"}


def test_elastic_never_below_the_smallest_number(launch):
    code = TELLS + "\nif start < 2 and rank == 0: sys.exit(1)\nif start < 2: time.sleep(60)"
    _, out, _ = launch("-n", 2, "--restarts", 2, "--min-workers", 2, "--grace", 0, code=code)
    assert started(out) == [2, 2, 2]


# Addresses that nobody has (TEST-NET-2), so that they count as other hosts.
B, C = "198.51.100.2", "198.51.100.3"


@pytest.fixture
def hosts_file(tmp_path):
    def write(*lines):
        path = tmp_path / "hosts"
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    return write


def test_workers_of_another_host_go_through_ssh(launch, ssh, hosts_file, monkeypatch, tmp_path):
    monkeypatch.setenv("A_VARIABLE", "with 'quotes', $signs and\na line break")
    monkeypatch.chdir(tmp_path)
    code = "import os; print(repr([os.environ.get('MXTRAIN_TEST_HOST'), os.environ['A_VARIABLE'], os.getcwd()]))"
    result, out, _ = launch("-n", 3, "--hosts", hosts_file("localhost slots=2", f"{B} slots=1"), code=code)
    assert result == 0
    rest = repr([os.environ["A_VARIABLE"], str(tmp_path)])[1:]
    assert sorted(line for line in out.splitlines() if line.startswith("[worker")) == [
        f"[worker 0] [None, {rest}", f"[worker 1] [None, {rest}", f"[worker 2] ['{B}', {rest}"]
    calls = (ssh / "calls").read_text()
    assert "A_VARIABLE" not in calls and "quotes" not in calls  # a command line can be read by all users of a host


def test_a_failure_and_a_stop_reach_another_host(launch, ssh, hosts_file):
    code = TELLS + "\nif rank == 0: time.sleep(0.5); sys.exit(3)\ntime.sleep(60)"
    result, _, err = launch("-n", 2, "--hosts", hosts_file("localhost", B), "--grace", 1, code=code)
    assert result == 3


def test_the_host_of_the_cause_is_named(launch, ssh, hosts_file):
    result, _, err = launch("-n", 2, "--hosts", hosts_file("localhost", B), "--grace", 1,
                            code=TELLS + "\nif rank == 1: sys.exit('out of disk')\ntime.sleep(60)")
    assert result == 1 and err.rstrip().endswith(f"worker 1 on {B} ended with exit code 1: out of disk")


def test_the_rest_of_another_host_ends_when_the_launcher_is_killed(launched, ssh, hosts_file, token):
    process = launched("-n", 2, "--hosts", hosts_file("localhost", B), "--grace", 0.5, code=TELLS + "time.sleep(60)")
    process.stdout.readline(), process.stdout.readline()
    process.kill()
    wait_for(lambda: not processes(token))


def test_elastic_hosts_come_and_go(launch, ssh, hosts_file, caplog):
    """B does not answer at first, then comes back; C goes when its worker fails: 2 workers, then 2, then 3."""
    (ssh / B).touch()
    code = TELLS + f"""
host = os.environ.get("MXTRAIN_TEST_HOST")
if start == 0 and host == "{C}":
    os.rename({str(ssh / B)!r}, {str(ssh / C)!r}); sys.exit(1)
if start == 1 and host == "{B}":
    os.remove({str(ssh / C)!r}); sys.exit(1)
if start < 3: time.sleep(60 if start < 2 else 0.2)
sys.exit(1 if start == 2 and rank == 0 else 0)
"""
    flags = ["--hosts", hosts_file("localhost", B, C)]
    result, out, _ = launch("-n", 3, *flags, "--min-workers", 1, "--restarts", 5, "--grace", 0, code=code)
    used = {start: [row[4] for row in told(out) if row[0] == start] for start in range(4)}
    assert used == {0: [None, C], 1: [None, B], 2: [None, C], 3: [B, C]} and result == 0
    assert f"{B} does not answer: ssh: connect to host {B} port 22: No route to host; going on" in caplog.text


def test_too_few_hosts_are_waited_for_by_restarts(launch, ssh, hosts_file):
    code = TELLS + f"open({str(ssh / B)!r}, 'w'); sys.exit(1)"
    result, out, err = launch("-n", 1, "--hosts", hosts_file(B), "--restarts", 2, code=code)
    assert result == 1 and started(out) == [1]
    assert err.rstrip().endswith("launch.py: error: too few hosts answer")
