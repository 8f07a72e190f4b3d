"""A network of hosts on this machine, whose switch is this process: ``python wire.py HOSTS RATE``, with RATE in bytes per second. Needs root.

::

    NAME-h0: nic 10.78.0.1  --tap--  switch, here: a frame at a time, RATE bytes per second from every host
    NAME-h1: nic 10.78.0.2  --tap--

It prints the hosts' namespaces, and serves until its input ends. ``corrupt from 0`` or ``corrupt to 2`` exchanges two words in the middle of the next long
frame of that host: TCP's checksum is a sum, and does not notice; that is what a bad NIC or switch does, which writes the checksum itself.
"""

import fcntl
import os
import queue
import struct
import subprocess
import sys
import threading
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
MTU = 9000
# Of a sender's queue: what waits there is not under way any more once it is killed.
QUEUED_FRAMES = 16
LONG = 4000
LATE_S = 0.005
ETHERNET, MAC = 14, 6


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def host(name, number):
    """A namespace with a NIC, and the descriptor that its frames come from and go to."""
    namespace, nic = f"{name}-h{number}", f"{name}n{number}"
    ip("netns", "add", namespace)
    tap = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH14x", nic.encode(), IFF_TAP | IFF_NO_PI))
    ip("link", "set", nic, "netns", namespace)
    inside = lambda *words: ip("-n", namespace, *words)  # noqa: E731
    inside("link", "set", "lo", "up")
    inside("addr", "add", f"10.78.0.{number + 1}/24", "dev", nic)
    inside("link", "set", nic, "mtu", str(MTU), "txqueuelen", str(QUEUED_FRAMES), "up")
    return namespace, tap


class Switch:
    def __init__(self, taps, rate):
        self.taps, self.rate = taps, rate
        self.where = {}  # from an address to the host that it was seen at
        self.corrupts = queue.SimpleQueue()  # (direction, host): of the next long frame there
        self.next = None
        for number in range(len(taps)):
            threading.Thread(target=self.carry, args=(number,), daemon=True).start()

    def carry(self, number):
        """What a host sends, at its NIC's rate."""
        free_at = 0.0
        while True:
            try:
                frame = os.read(self.taps[number], MTU + ETHERNET)
            except OSError:
                return  # its namespace is gone
            # Who woke late catches up.
            free_at = max(free_at, time.monotonic() - LATE_S) + len(frame) / self.rate
            time.sleep(max(0.0, free_at - time.monotonic()))
            self.where[frame[MAC : 2 * MAC]] = number
            to = self.where.get(frame[:MAC])
            everybody = [other for other in range(len(self.taps)) if other != number]
            for other in everybody if to is None else [to]:
                self.deliver(self.corrupted(frame, number, other), other)

    def corrupted(self, frame, number, to):
        if self.next is None and not self.corrupts.empty():
            self.next = self.corrupts.get()
        if self.next not in (("from", number), ("to", to)) or len(frame) < LONG:
            return frame
        middle = len(frame) // 4 * 2
        for at in range(middle, len(frame) - 4, 2):
            one, two = frame[at : at + 2], frame[at + 2 : at + 4]
            if one != two:
                self.next = None
                print("corrupted", flush=True)
                return frame[:at] + two + one + frame[at + 4 :]
        return frame

    def deliver(self, frame, to):
        try:
            os.write(self.taps[to], frame)
        except OSError:
            pass  # its NIC is not up yet, or no more


def main():
    name, count, rate = f"xw{os.getpid()}", int(sys.argv[1]), float(sys.argv[2])
    made = []
    try:
        for number in range(count):
            made.append(host(name, number))
        switch = Switch([tap for _, tap in made], rate)
        print(*[namespace for namespace, _ in made], flush=True)
        for line in sys.stdin:
            _, direction, number = line.split()
            switch.corrupts.put((direction, int(number)))
    finally:
        for number in range(count):
            subprocess.run(["ip", "netns", "del", f"{name}-h{number}"], capture_output=True)


if __name__ == "__main__":
    main()
