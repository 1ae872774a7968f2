#!/usr/bin/env python3
"""The matrix: uroce on h0 against Linux rxe in a guest, program by program.

  matrix.sh [REGEX]     runs the cells whose names match (all): ROW-ROLE-FAMILY-MTU-KERNEL, ROLE being uroce's
  matrix.sh --list      the cells' names
  matrix.sh --shape     the table without results; --check: whether README.md has these rows and columns
  matrix.sh --readme [REGEX]   runs them, and writes the newest result of every cell into README.md

Options: --kernel 6.12|6.1 (both, side by side), --keep (leave the guests running), --captures DIR (one a cell),
--seconds N (a cell's limit, 30), --segments N (packets of a superframe, uroce's own choice without; 1: none).

Prints `ok NAME SECONDS s`, `rxe NAME why` where rxe is the cause and the case has proved it, or `FAIL NAME` with both
sides' logs; then the table, and `N passed, N failed`. Exit status: 0 none failed, 1 a cell failed, 2 the run could not
begin. Needs root, build.sh's guests, and the release builds of uroce and ops_peer (or UROCE and OPS_PEER).
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback

import gsh
import rows

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
CACHE = os.environ.get("RXE_VM_CACHE") or os.path.join(
    os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "rxe-vm"
)
RUN = os.path.join(CACHE, "run")
UROCE = os.environ.get("UROCE") or os.path.join(ROOT, "target/release/uroce")
OPS_PEER = os.environ.get("OPS_PEER") or os.path.join(ROOT, "target/release/ops_peer")
README = os.path.join(ROOT, "README.md")
RESULTS = os.path.join(RUN, "matrix.json")
BEGIN, END = "<!-- matrix: written by tests/rxe-vm/matrix.sh --readme -->", "<!-- end of matrix -->"

HOST_IF, HOST4, HOST6 = "h0", "10.77.0.100", "fd77::100"
OOB_PORT = 18515
# A guest a kernel, each in a namespace of its own: both have the same h0.
GUESTS = {"6.12": (2, "rxelab"), "6.1": (3, "rxelab61")}
# The links' MTU for a RoCE path MTU.
LINK = {4096: 4500, 1024: 1500, 256: 400}
READY = 20
SAY = threading.Lock()


class Failed(Exception):
    """A cell did not do what it must."""


class RxeFault(Exception):
    """A cell cannot pass, and what happened shows that rxe is the cause."""


def say(text):
    with SAY:
        print(text, flush=True)


class Lab:
    """One guest, and the namespace it shares with uroce."""

    def __init__(self, kernel, options):
        self.kernel = kernel
        self.number, self.ns = GUESTS[kernel]
        self.options = options
        self.env = dict(os.environ, NS=self.ns, NO_NFT="1")
        self.guest4, self.guest6 = f"10.77.0.{self.number}", f"fd77::{self.number}"
        self.mtu = None
        self.host = self.guest = self.captured = None
        self.started = False
        self.logs = os.path.join(RUN, f"matrix-{kernel}")
        os.makedirs(self.logs, exist_ok=True)

    # ---- the guest

    def run_sh(self, *args):
        done = subprocess.run(
            [os.path.join(HERE, "run.sh"), *args], env=self.env, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise Failed(f"run.sh {' '.join(args)}: {done.stdout}{done.stderr}")
        return done.stdout

    def boot(self):
        said = self.run_sh("start", str(self.number), self.kernel)
        self.started = "runs already" not in said
        self.mtu = None

    def stop(self):
        self.end()
        if self.started and not self.options.keep:
            self.run_sh("stop", str(self.number))
            self.run_sh("net-down")

    def sh(self, script, limit=20):
        """Runs `script` in the guest; returns what it printed and its status."""
        end = time.monotonic() + limit
        prefix = f"{RUN}/g{self.number}"
        try:
            port, lock = gsh.free_port(prefix, end)
            with lock:
                output, status = gsh.ask(f"{prefix}.p{port}", script, end)
        except SystemExit as e:
            raise Failed(str(e)) from e
        return output.decode(errors="replace"), status

    def in_ns(self, *args):
        return subprocess.run(
            ["ip", "netns", "exec", self.ns, *args], capture_output=True, text=True, check=False
        ).stdout

    def set_path_mtu(self, mtu):
        if self.mtu == mtu:
            return
        link = LINK[mtu]
        # IPv6 leaves a link of less than 1280 bytes, and comes back without the addresses.
        host = f"ip link set {HOST_IF} mtu {link}; ip addr replace {HOST6}/64 dev {HOST_IF} nodad"
        guest = f"ip link set eth0 mtu {link}; ip addr replace {self.guest6}/64 dev eth0 nodad"
        self.in_ns("sh", "-c", f"{host} 2>/dev/null || true")
        # rxe asks the neighbour table once and gives up: the neighbours shall be known.
        self.sh(f"{guest} 2>/dev/null; for a in {HOST4} {HOST6}; do ping -c 1 -W 2 $a; done >/dev/null 2>&1; true")
        self.mtu = mtu

    # ---- the two sides of a cell

    def path(self, name):
        return os.path.join(self.logs, name)

    def start_host(self, *args, program=None):
        with open(self.path("host"), "w", encoding="utf-8") as log:
            print("$", os.path.basename(program or UROCE), *args, file=log, flush=True)
            self.host = subprocess.Popen(
                ["ip", "netns", "exec", self.ns, "timeout", "-k", "2", str(self.options.seconds), program or UROCE, *args],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def start_guest(self, command):
        """The program's stderr comes behind its stdout: mixed, lines would break in two."""
        seconds = self.options.seconds
        script = f"""timeout --foreground -k 2 {seconds} stdbuf -oL {command} 2>/tmp/case.err & echo $! >/tmp/case.pid
            wait $!; status=$?; rm /tmp/case.pid; cat /tmp/case.err; exit $status"""
        self.guest = threading.Thread(target=self._guest, args=(command, script, seconds + 10))
        self.guest_said, self.guest_status = "", None
        self.guest.start()

    def _guest(self, command, script, limit):
        try:
            self.guest_said, self.guest_status = self.sh(script, limit)
        except Failed as e:
            self.guest_said, self.guest_status = str(e), 255
        with open(self.path("guest"), "w", encoding="utf-8") as log:
            print(f"$ {command}\n{self.guest_said}", file=log)

    def end(self):
        if self.host and self.host.poll() is None:
            self.host.send_signal(signal.SIGTERM)
            try:
                self.host.wait(4)
            except subprocess.TimeoutExpired:
                self.host.kill()
        if self.guest and self.guest.is_alive():
            try:
                self.sh("kill $(cat /tmp/case.pid) 2>/dev/null; true", 5)
            except Failed:
                pass
            self.guest.join(5)
        self.host = self.guest = None

    def finish(self, grace=10):
        """Waits for both; when one has ended the other has `grace` seconds left, less after a failure."""
        end = time.monotonic() + self.options.seconds + 12
        while time.monotonic() < end:
            host, guest = self.host.poll(), None if self.guest.is_alive() else self.guest_status
            if host is not None and guest is not None:
                break
            if host is not None or guest is not None:
                bad = (host or 0) != 0 or (guest or 0) != 0
                end = min(end, time.monotonic() + (2 if bad else grace))
                while time.monotonic() < end and (self.host.poll() is None or self.guest.is_alive()):
                    time.sleep(0.02)
                break
            time.sleep(0.02)
        host_status = self.host.poll()
        self.end()
        return host_status, self.guest_status

    def log(self, side):
        try:
            with open(self.path(side), encoding="utf-8", errors="replace") as f:
                return f.read()
        except FileNotFoundError:
            return ""

    def start_capture(self, name):
        self.env.update(CAPIF=f"tap{self.number}", CAPDIR=os.path.abspath(self.options.captures or self.logs))
        self.run_sh("cap-start", name)
        self.captured = name

    def stop_capture(self):
        """The file, when one is being written."""
        if not self.captured:
            return None
        name, self.captured = self.captured, None
        self.run_sh("cap-stop", name)
        return os.path.join(self.env["CAPDIR"], f"{name}.pcap")

    # ---- is the server listening?

    def host_packet_socket(self):
        """A connection manager in user space leaves no trace in the kernel but its packet socket."""
        index = self.in_ns("cat", f"/sys/class/net/{HOST_IF}/ifindex").strip()
        lines = self.in_ns("cat", "/proc/net/packet").splitlines()[1:]
        return any(line.split()[4] == index for line in lines)

    def host_listens_tcp(self, port):
        return f":{port} " in self.in_ns("ss", "-ltnH", f"sport = :{port}")

    def wait_host(self, ready):
        end = time.monotonic() + READY
        while time.monotonic() < end and self.host.poll() is None:
            if ready():
                time.sleep(0.15)
                return
            time.sleep(0.03)

    def wait_guest(self, test):
        ended = "{ p=$(cat /tmp/case.pid 2>/dev/null) && [ ! -e /proc/$p ]; }"
        self.sh(f"for i in $(seq {READY * 20}); do {test} && exit 0; {ended} && exit 1; sleep 0.05; done", READY + 5)
        time.sleep(0.1)

    def addresses(self, family):
        return (HOST4, self.guest4) if family == "v4" else (HOST6, self.guest6)

    def counters(self):
        script = 'cd /sys/class/infiniband/rxe0/ports/1/hw_counters && grep . * | grep -v ":0$" | tr "\\n" " "'
        return self.sh(script, 5)[0]


# ---- cells


class Cell:
    def __init__(self, row, role, family, mtu, kernel):
        self.row, self.role, self.family, self.mtu, self.kernel = row, role, family, mtu, kernel
        self.name = f"{row.name}-{role}-{family}-{mtu}-{kernel}"
        self.absent = row.absent(self)
        self.mark = "-" if self.absent else "?"
        self.why = self.absent

    def say(self, mark, text):
        self.mark = mark
        say(text)


def all_cells(kernels):
    """In the order in which they run: the links' MTU changes twice, and IPv6 does not come back."""
    cells = [
        Cell(row, role, family, mtu, kernel)
        for kernel in kernels
        for mtu in LINK
        for row in rows.ROWS
        for family in ("v4", "v6")
        for role in ("client", "server")
    ]
    return sorted(cells, key=lambda c: (kernels.index(c.kernel), -c.row.link_mtu(c)))


def report_failure(lab, cell, why):
    cell.why = why
    lines = [f"FAIL {cell.name}", f"    {why}"]
    for side in ("host", "guest"):
        lines += [f"    -- {side}:"] + [f"    {line[:160]}" for line in lab.log(side).splitlines()[-30:]]
    try:
        lines.append(f"    -- rxe's counters since the guest's start: {lab.counters()}")
    except Failed as e:
        lines.append(f"    -- {e}")
    cell.say("x", "\n".join(lines))


def attempt(lab, group):
    """Runs what one pair of processes decides: a cell, or all operations of `ops`."""
    row, first = group[0].row, group[0]
    began = time.monotonic()
    for side in ("host", "guest"):
        if os.path.exists(lab.path(side)):
            os.unlink(lab.path(side))
    if lab.options.captures or row.capture:
        lab.start_capture(re.sub(r"[^\w.-]+", "_", first.name))
    try:
        lab.set_path_mtu(row.link_mtu(first))
        row.run(lab, group)
        for cell in group:
            if cell.mark == "?":
                cell.say("+", f"ok {cell.name} {time.monotonic() - began:.2f} s")
    except RxeFault as e:
        first.why = str(e)
        first.say("r", f"rxe {first.name} {e}")
    except Failed as e:
        for cell in group:
            if cell.mark == "?":
                report_failure(lab, cell, str(e))
    finally:
        lab.end()
        lab.stop_capture()


def run_lab(lab, cells):
    try:
        lab.boot()
        while cells:
            batch = [c for c in cells if rows.batch(c) == rows.batch(cells[0])]
            cells = [c for c in cells if c not in batch]
            attempt(lab, batch)
    except Exception:  # pylint: disable=broad-except # whatever it is, the other guest's cells go on
        say(f"FAIL {lab.kernel}: {traceback.format_exc()}")
    finally:
        lab.stop()


# ---- the table

COLUMNS = [(k, f, m, r) for k in GUESTS for f in ("v4", "v6") for m in (256, 1024, 4096) for r in ("client", "server")]


def table(cells):
    """Rows are programs; a column is a kernel, a GID's family, a path MTU, and uroce's role."""
    marks = {(c.row.name, c.kernel, c.family, c.mtu, c.role): c.mark for c in cells}
    width = max(len(r.name) for r in rows.ROWS) + 1

    def line(title, text):
        return title.ljust(width) + "  ".join(
            " ".join("".join(text(k, f, m)).center(4) for m in (256, 1024, 4096)) for k in GUESTS for f in ("v4", "v6")
        )

    lines = [
        line("kernel", lambda k, f, m: k if m == 1024 else ""),
        line("GID", lambda k, f, m: f if m == 1024 else ""),
        line("path MTU", lambda k, f, m: str(m)),
        line("uroce is", lambda k, f, m: "c s"),
    ]
    for row in rows.ROWS:
        lines.append(
            line(row.name, lambda k, f, m: " ".join(marks.get((row.name, k, f, m, r), "?") for r in ("client", "server")))
        )
    return "\n".join(l.rstrip() for l in lines)


def notes(cells):
    """Why each cell without a `+` has none, as a list in Markdown."""
    found = {}
    for c in cells:
        if c.mark in "-r" and c.why:
            rows_of = found.setdefault((c.mark, c.why), [])
            if c.row.name not in rows_of:
                rows_of.append(c.row.name)
    return "\n".join(
        f"- `{mark}` {why}: {'; '.join(names)}." for (mark, why), names in sorted(found.items(), key=lambda f: f[0])
    )


def document(cells):
    legend = (
        "`c`, `s`: uroce is the client (requester), the server (responder). `+`: passes. `-`: there is no such cell."
        " `r`: rxe's fault."
    )
    return f"{BEGIN}\n\n{legend}\n\n```\n{table(cells)}\n```\n\n{notes(cells)}\n\n{END}"


def remember(cells):
    """Merges the results of this run into those of earlier ones, and gives every cell its newest."""
    newest = {}
    if os.path.exists(RESULTS):
        with open(RESULTS, encoding="utf-8") as f:
            newest = json.load(f)
    newest.update({c.name: [c.mark, c.why] for c in cells if c.mark not in "-?"})
    with open(RESULTS, "w", encoding="utf-8") as f:
        json.dump(newest, f)
    for c in cells:
        if not c.absent:
            c.mark, c.why = newest.get(c.name, ("?", None))


def text_of(path):
    with open(path, encoding="utf-8") as f:
        return f.read()


def readme_part():
    text = text_of(README)
    head, _, rest = text.partition(BEGIN)
    body, _, tail = rest.partition(END)
    return head, body, tail


def write_readme(cells):
    head, body, tail = readme_part()
    if BEGIN not in text_of(README) or END not in text_of(README):
        sys.exit("matrix: README.md has no place for the table")
    with open(README, "w", encoding="utf-8") as f:
        f.write(head + document(cells) + tail)


def shape(text):
    """Without results: which rows and columns, and which cells exist."""
    lines = text.split("```")[1].strip("\n").splitlines() if "```" in text else []
    return [re.sub(r"(?<= )[+xr?](?= |$)", "+", line).rstrip() for line in lines]


def check_readme():
    expected = shape(document(all_cells(list(GUESTS))))
    return shape(readme_part()[1]) == expected


# ---- the run


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("regex", nargs="?", default=".")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--shape", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--readme", action="store_true")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--kernel", action="append", choices=list(GUESTS))
    parser.add_argument("--segments", help="packets of a superframe")
    parser.add_argument("--captures")
    parser.add_argument("--seconds", type=int, default=30)
    options = parser.parse_args()
    kernels = options.kernel or list(GUESTS)
    cells = all_cells(kernels)
    chosen = [c for c in cells if not c.absent and re.search(options.regex, c.name)]
    if options.list:
        print("\n".join(c.name for c in chosen))
        return 0
    if options.shape:
        print(table(cells))
        return 0
    if options.check:
        return 0 if check_readme() else 1
    if os.getuid():
        print("matrix: must run as root", file=sys.stderr)
        return 2
    for program in (UROCE, OPS_PEER):
        if not os.access(program, os.X_OK):
            print(f"matrix: no {program}: cargo build --release -p uroce-tools -p uroce-tests --bins", file=sys.stderr)
            return 2
    if options.segments:
        # Both programs on the host take it from here.
        os.environ["UROCE_SEGMENTS"] = options.segments
    began = time.monotonic()
    labs = [Lab(kernel, options) for kernel in kernels]
    threads = [
        threading.Thread(target=run_lab, args=(lab, [c for c in chosen if c.kernel == lab.kernel]))
        for lab in labs
        if any(c.kernel == lab.kernel for c in chosen)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for cell in chosen:
        if cell.mark == "?":
            cell.mark = "x"
            say(f"FAIL {cell.name}\n    it was not run")
    whole = options.regex == "." and not options.kernel
    if whole:
        print(f"\n{table(cells)}\n\n{notes(cells)}\n")
    failed = sum(c.mark == "x" for c in chosen)
    if whole and not options.readme and not check_readme():
        print("FAIL README.md does not show these rows and columns: run matrix.sh --readme")
        failed += 1
    every = all_cells(list(GUESTS))
    ran = {c.name: c for c in cells}
    every = [ran.get(c.name, c) for c in every]
    remember(every)
    if options.readme:
        missing = [c.name for c in every if c.mark in "x?"]
        if missing:
            print(f"FAIL README.md is not written: {len(missing)} cells have not passed, {missing[0]} for one")
            failed += 1
        else:
            write_readme(every)
    passed = sum(c.mark in "+r" for c in chosen)
    print(f"took {time.monotonic() - began:.0f} s")
    print(f"{passed} passed, {failed} failed")
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    # `import matrix` in rows.py is this module.
    sys.modules["matrix"] = sys.modules["__main__"]
    sys.exit(main())
