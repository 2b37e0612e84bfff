"""iperf3, a program of Debian: the bandwidth that TCP has between two nodes."""

import json
import subprocess

from tests.peers.nodes import NodeHost, end
from tests.server.program import until

from ..samples import PeerMissing
from . import system_program

NAME = "iperf3"
PORT = 5201


def bytes_per_s(sender: NodeHost, receiver: NodeHost, seconds: float) -> float:
    """What the receiver gets from the sender over one connection, measured for some seconds (at
    least one)."""
    program = system_program("iperf3")
    words = ["-s", "-1", "-B", sender.address, "-p", str(PORT)]
    server = sender.start(program, *words, out=subprocess.DEVNULL)
    try:
        until(lambda: any(each.port == PORT for each in sender.sockets(listening=True)), NAME)
        words = ["-c", sender.address, "-p", str(PORT), "-R", "-J", "-t", str(max(seconds, 1))]
        done = receiver.run(program, *words, check=False)
    finally:
        end(server)
    if done.returncode:
        raise PeerMissing(f"iperf3 ended with {done.returncode}: {done.stdout[-300:]}")
    bits_per_s: float = json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"]
    return bits_per_s / 8
