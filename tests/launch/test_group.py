"""One start: output, exit codes, first causes, signals, and that nothing is left behind. Workers are tiny programs."""

import os
import signal
import socket
import sys
import time

import pytest
from launching import processes, variables_of, wait_for

from mxtrain.signals import SAME_SECONDS
from trainings import SCRIPT as TRAIN

RANK = "import os, sys, time, signal; rank = int(os.environ['MXTRAIN_RANK']); "
SAVES = RANK + """
def save(number, frame):
    time.sleep(0.3)
    print("saved", flush=True)
    sys.exit(128 + number)
for number in (1, 2, 15):
    signal.signal(number, save)
"""
WAITS = "\nprint('ready', flush=True)\ntime.sleep(60)"
DEAF = "signal.signal(15, signal.SIG_IGN); "


def lines(text, prefix):
    return [line for line in text.splitlines() if line.startswith(prefix)]


def last(text):
    return text.rstrip("\n").rpartition("\n")[2]


def wait_ready(process, workers):
    """Reads stdout until so many workers are ready -> what was read."""
    return [process.stdout.readline() for _ in range(workers)]


def test_all_workers_run_with_their_numbers(launch):
    names = ["MXTRAIN_LAUNCH", "MXTRAIN_RANK", "MXTRAIN_SIZE", "MXTRAIN_LOCAL_RANK", "MXTRAIN_LOCAL_SIZE",
             "MXTRAIN_RESTART", "DMLC_ROLE", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_PS_ROOT_URI"]
    code, out, _ = launch("-n", 3, "-s", 2, "--grace", 1, code=f"import os; print(*map(os.environ.get, {names}))")
    assert code == 0
    assert sorted(lines(out, "[worker")) == [
        f"[worker {n}] ps {n} 3 {n} 3 0 worker 3 2 127.0.0.1" for n in range(3)]


def test_lines_of_both_streams_are_passed_on_whole(launch):
    code = RANK + """
for part in ("one ", "line\\n", "two\\nno end"):
    sys.stdout.write(part); sys.stdout.flush(); time.sleep(0.02)
sys.stderr.write("grumble\\n")
"""
    _, out, err = launch("-n", 2, code=code)
    for n in range(2):
        assert lines(out, f"[worker {n}]") == [f"[worker {n}] {text}" for text in ("one line", "two", "no end")]
        assert lines(err, f"[worker {n}]") == [f"[worker {n}] grumble"]


def test_a_progress_bar_becomes_its_last_state(launch):
    code = RANK + """
for i in range(5):
    sys.stderr.write(f"\\r{i}/4"); sys.stderr.flush(); time.sleep(0.01)
sys.stderr.write("\\nepoch done\\n\\n"); sys.stderr.flush()
sys.stderr.write("\\r1/4\\r2/4 and killed"); sys.stderr.flush()
"""
    _, _, err = launch("-n", 1, code=code)
    assert lines(err, "[worker 0]") == ["[worker 0] 4/4", "[worker 0] epoch done", "[worker 0] 2/4 and killed"]


def test_a_worker_alone_has_no_prefix():
    from mxtrain.launch.processes import Output

    read, write = os.pipe()
    Output(prefixes=False).line(write, "worker 0", b"text")
    Output(prefixes=True).line(write, "worker 0", b"text")
    assert os.read(read, 100) == b"text\n[worker 0] text\n"
    os.close(read)
    Output(prefixes=False).line(write, "worker 0", b"text")  # nobody reads: no reason to fail
    os.close(write)


def test_a_failure_ends_all_and_is_named_last(launch):
    code = RANK + "\nif rank == 1: print('disk full', file=sys.stderr); sys.exit(5)" + WAITS
    start = time.monotonic()
    result, _, err = launch("-n", 3, code=code)
    assert result == 5 and time.monotonic() - start < 10
    assert last(err) == "launch.py: error: worker 1 on localhost ended with exit code 5: disk full"
    assert err.count("launch.py: error") == 1


def test_a_worker_killed_by_a_signal(launch):
    code = RANK + "\nif rank == 1: os.kill(os.getpid(), 9)" + WAITS
    result, _, err = launch("-n", 2, code=code)
    assert result == 137
    assert last(err) == "launch.py: error: worker 1 on localhost ended with exit code 137 (SIGKILL)"


def test_the_traceback_is_passed_on_and_its_last_line_is_the_cause(launch):
    result, _, err = launch("-n", 2, code=RANK + "\nif rank == 0: raise ValueError('no such thing')" + WAITS)
    assert result == 1 and len(lines(err, "[worker 0] Traceback")) == 1
    assert last(err).endswith("worker 0 on localhost ended with exit code 1: ValueError: no such thing")


def test_who_lost_its_peer_is_not_the_cause(launch):
    code = RANK + "\nif rank == 0: sys.exit(75)\ntime.sleep(0.5)\nsys.exit(6)"
    result, _, err = launch("-n", 2, code=code)
    assert result == 6 and "worker 1" in last(err)
    assert launch("-n", 2, code="raise SystemExit(75)")[0] == 75


def test_a_worker_that_saves_has_the_grace_and_no_more(launch):
    saves = SAVES + "if rank == 1: time.sleep(0.3); sys.exit(4)" + WAITS
    result, out, _ = launch("-n", 2, "--grace", 10, code=saves)
    assert result == 4 and lines(out, "[worker 0]")[-1] == "[worker 0] saved"
    start = time.monotonic()
    assert launch("-n", 2, "--grace", 0.5, code=RANK + DEAF + "\nif rank: time.sleep(0.3); sys.exit(4)" + WAITS)[0] == 4
    assert 0.5 < time.monotonic() - start < 8


def test_children_of_a_worker_end_with_it(launch):
    code = RANK + "\nimport subprocess; subprocess.Popen(['sleep', '60'])\nif rank: sys.exit(1)" + WAITS
    assert launch("-n", 2, "--grace", 0.5, code=code)[0] == 1  # the fixture looks for what is left


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_the_workers_save(launched, number):
    process = launched("-n", 2, code=SAVES + WAITS)
    wait_ready(process, 2)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert sorted(out.splitlines()) == ["[worker 0] saved", "[worker 1] saved"]
    assert last(err) == f"launch.py: ended by {number.name}"


def test_a_signal_that_comes_twice_at_once_lets_the_workers_save(launched):
    process = launched("-n", 2, code=SAVES.replace("sleep(0.3)", "sleep(1)") + WAITS)
    wait_ready(process, 2)
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 143
    assert sorted(out.splitlines()) == ["[worker 0] saved", "[worker 1] saved"]


def test_a_signal_that_ends_a_server_too_is_a_failure(launched, token):
    """The workers cannot save without it, and would wait."""
    process = launched("-n", 2, "--grace", 0.5, code=RANK + DEAF + WAITS)
    wait_ready(process, 2)
    process.send_signal(signal.SIGTERM)
    server, = [pid for pid in processes(token) if variables_of(pid).get("DMLC_ROLE") == "server"]
    os.kill(server, signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 143 and last(err).endswith("server 0 on localhost ended with exit code 143 (SIGTERM)")


def test_a_second_signal_ends_at_once(launched):
    process = launched("-n", 2, code=RANK + DEAF + WAITS)
    wait_ready(process, 2)
    process.send_signal(signal.SIGTERM)
    time.sleep(SAME_SECONDS + 0.3)
    assert process.poll() is None
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 143 and time.monotonic() - start < 5


def test_a_failure_while_saving_is_a_failure(launched):
    code = SAVES + "if rank: signal.signal(15, lambda *_: sys.exit('disk full'))" + WAITS
    process = launched("-n", 2, "--restarts", 2, code=code)
    wait_ready(process, 2)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 1 and "[worker 0] saved" in out
    assert last(err) == "launch.py: error: worker 1 on localhost ended with exit code 1: disk full"


def test_nothing_is_left_when_the_launcher_is_killed(launched, token):
    code = RANK + DEAF + "import subprocess; subprocess.Popen(['sleep', '60'])" + WAITS
    process = launched("-n", 2, "--grace", 0.5, code=code)
    wait_ready(process, 2)
    process.kill()
    process.wait()
    wait_for(lambda: not processes(token))


def test_workers_save_when_the_launcher_is_killed(launched, tmp_path):
    code = SAVES.replace("print(", f"open('{tmp_path}/' + str(rank), 'w').write(").replace(", flush=True", "") + WAITS
    process = launched("-n", 2, "--grace", 1, code=code)
    wait_ready(process, 2)
    process.kill()
    wait_for(lambda: sorted(os.listdir(tmp_path)) == ["0", "1"])


def test_a_worker_killed_from_outside(launched, token):
    process = launched("-n", 2, code=RANK + WAITS)
    wait_ready(process, 2)
    workers = {variables_of(pid).get("MXTRAIN_RANK"): pid for pid in processes(token)}
    os.kill(workers["1"], signal.SIGKILL)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 137 and "worker 1" in last(err)


def test_a_killed_guard_leaves_nothing_behind(launched, token):
    code = RANK + "import subprocess; subprocess.Popen(['sleep', '60'])" + WAITS
    process = launched("-n", 2, "--grace", 0, code=code)
    wait_ready(process, 2)
    guards = [pid for pid in processes(token) if b"guard.py" in open(f"/proc/{pid}/cmdline", "rb").read()]
    os.kill(guards[-1], signal.SIGKILL)
    process.communicate(timeout=20)
    assert process.returncode == 137


def test_the_reader_of_the_output_may_go(launched, token):
    process = launched("-n", 1, code="import time\nfor i in range(50): print(i, flush=True); time.sleep(0.01)")
    process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    assert process.wait(20) == 0


def test_a_port_in_use_is_named(launch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        result, out, _ = launch("-n", 1, "--port", port, code="print('started')")
    assert result.startswith(f"UserError: --port {port}: is in use on 127.0.0.1; give another one")
    assert "started" not in out


def test_a_mistake_of_all_is_said_once(launch):
    """And by the launcher, last."""
    result, _, err = launch("-n", 3, command=[sys.executable, str(TRAIN), "--kvstore", "dist_sync", "--lr", "much"])
    assert result == 2 and "train.py: error: --lr much: must be a number" in last(err)
    assert [line for line in err.splitlines() if "error" in line and line != last(err)] == [
        "[worker 0] train.py: error: --lr much: must be a number"]


def test_two_launches_with_one_port(launched, launch):
    """The second is refused, and the first goes on."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    first = launched("-n", 1, "--port", port, code=RANK + "print('ready', flush=True); time.sleep(2)")
    wait_ready(first, 1)
    result, out, _ = launch("-n", 1, "--port", port, code="print('started')")
    assert result.startswith(f"UserError: --port {port}: is in use on 127.0.0.1") and "started" not in out
    assert first.wait(20) == 0


def test_two_launches_take_two_ports(launched):
    both = [launched("-n", 1, code="import os; print(os.environ['DMLC_PS_ROOT_PORT'])") for _ in range(2)]
    ports = {process.communicate(timeout=30)[0] for process in both}
    assert len(ports) == 2
