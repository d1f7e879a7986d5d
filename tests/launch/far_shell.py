"""A stand-in for ssh that goes over TCP, so that cutting the link between two network namespaces cuts it too.

    far_shell.py serve ADDRESS PORT            on the "other host": runs what is asked for, by a shell
    far_shell.py call PORT [options] HOST COMMAND    in the place of ssh

Like ssh with ServerAlive*, the caller gives up (exit code 255) when nothing has come for some seconds. Like sshd,
the server does not notice a link that is cut. Frames are a letter, four bytes of length, and the data.
"""

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress

ALIVE, PATIENCE = 0.5, 9.0  # seconds; the patience is what hosts.SSH asks of ssh


def send(one, lock, letter, data=b""):
    with lock:
        one.sendall(letter + struct.pack("!I", len(data)) + data)


def receive(one):
    """-> (letter, data), or None at the end."""
    head = exactly(one, 5)
    return head and (head[:1], exactly(one, struct.unpack("!I", head[1:])[0]))


def exactly(one, count):
    data = b""
    while len(data) < count:
        more = one.recv(count - len(data))
        if not more:
            return None
        data += more
    return data


def pump(descriptor, one, lock, letter):
    while True:
        data = os.read(descriptor, 65536)
        send(one, lock, letter, data)
        if not data:
            return


def thread(function, *arguments):
    result = threading.Thread(target=function, args=arguments, daemon=True)
    result.start()
    return result


def serve(address, port):
    listening = socket.create_server((address, port))
    print("serving", flush=True)
    while True:
        thread(answer, listening.accept()[0])


def answer(one):
    lock = threading.Lock()
    _, command = receive(one)
    pipe = subprocess.PIPE
    child = subprocess.Popen(["sh", "-c", command.decode()], stdin=pipe, stdout=pipe, stderr=pipe, cwd="/",
                             start_new_session=True)
    out = [thread(pump, stream.fileno(), one, lock, letter)
           for stream, letter in ((child.stdout, b"O"), (child.stderr, b"R"))]
    thread(keep_alive, one, lock)
    thread(feed, one, child)
    code = child.wait()
    for each in out:
        each.join()
    send(one, lock, b"X", str(code if code >= 0 else 128 - code).encode())


def feed(one, child):
    """Input of the child, until the caller has no more or is gone."""
    try:
        frame = receive(one)
        while frame and frame[1]:
            child.stdin.write(frame[1])
            child.stdin.flush()
            frame = receive(one)
    except OSError:
        pass
    child.stdin.close()


def keep_alive(one, lock):
    with suppress(OSError):
        while True:
            send(one, lock, b"K")
            time.sleep(ALIVE)


def call(port, host, command):
    try:
        one = socket.create_connection((host, port), PATIENCE)
        lock = threading.Lock()
        send(one, lock, b"C", command.encode())
        thread(pump, 0, one, lock, b"I")
        while True:
            letter, data = receive(one)
            if letter == b"X":
                return int(data)
            if letter in b"OR":
                os.write(1 if letter == b"O" else 2, data)
    except (OSError, TypeError) as error:
        print(f"connection to {host} lost ({error})", file=sys.stderr, flush=True)
        return 255


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], int(sys.argv[3]))
    os._exit(call(int(sys.argv[2]), *sys.argv[-2:]))
