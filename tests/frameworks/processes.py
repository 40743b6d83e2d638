"""A script on several processes of this machine, each with an environment of its own."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def free_ports(count):
    """Ports that nobody listens on."""
    taken = [socket.socket() for _ in range(count)]
    for each in taken:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in taken]
    for each in taken:
        each.close()
    return ports


def told(script, environments, folder, patience=200):
    """What each process wrote into the file that it was given, as JSON."""
    outs = [folder / f"{i}.json" for i in range(len(environments))]
    running = [
        subprocess.Popen(
            [sys.executable, str(HERE / script), str(out)],
            env=os.environ | environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for out, environment in zip(outs, environments, strict=True)
    ]
    try:
        errors = [process.communicate(timeout=patience)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    assert all(out.exists() for out in outs), "\n".join(error[-3000:] for error in errors)
    return [json.loads(out.read_text()) for out in outs]
