#!/usr/bin/env python3
"""gsh.py RUNDIR N SCRIPT -- runs a shell script in guest N and prints what it prints.

It goes over one of the guest's four virtio-serial ports (guest/agent.c is at the other end), so up
to four scripts run at a time and no network is needed. The exit status is the script's. GSH_TIMEOUT
is the limit in seconds (120). A script that takes longer is ended, as it is when gsh.py is killed.
"""

import base64
import fcntl
import os
import socket
import sys
import time

PORTS = (1, 2, 3, 4)


def free_port(prefix, end):
    """Waits for a port that no other gsh.py uses; returns its number and the lock to hold."""
    while time.monotonic() < end:
        for port in PORTS:
            lock = open(f"{prefix}.p{port}.lock", "w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return port, lock
            except OSError:
                lock.close()
        time.sleep(0.02)
    sys.exit("gsh: no free port")


def ask(path, script, end):
    """Sends "ID script ." and returns the output and the status from "ID output status"."""
    ident = os.urandom(8).hex().encode()
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(path)
        except OSError:
            sys.exit("gsh: the guest does not run")
        sock.sendall(b"\n" + ident + b" " + base64.b64encode(script.encode()) + b" .\n")
        pending = b""
        while True:
            sock.settimeout(max(0.1, end - time.monotonic()))
            try:
                piece = sock.recv(65536)
            except socket.timeout:
                sys.exit("gsh: no answer in time")
            if not piece:
                sys.exit("gsh: the guest is gone")
            pending += piece
            *lines, pending = pending.split(b"\n")
            for line in lines:
                fields = line.split(b" ")
                # A line with another ID is for someone who has hung up.
                if fields[0] == ident:
                    return base64.b64decode(fields[1]), int(fields[2])


def main():
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    prefix = f"{sys.argv[1]}/g{sys.argv[2]}"
    end = time.monotonic() + float(os.environ.get("GSH_TIMEOUT", "120"))
    port, _lock = free_port(prefix, end)
    output, status = ask(f"{prefix}.p{port}", " ".join(sys.argv[3:]), end)
    sys.stdout.buffer.write(output)
    sys.stdout.flush()
    sys.exit(status)


if __name__ == "__main__":
    main()
