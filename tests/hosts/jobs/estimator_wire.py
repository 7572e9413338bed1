"""A job of two hosts with and without encryption: prints how often its tensor's bytes were on this host's network."""

import sys
import tempfile
import threading
from pathlib import Path
from socket import AF_PACKET, SOCK_RAW, ntohs, socket

from smddp.estimator import PyTorch

PATTERN = b"ON-WIRE!"
TRAIN = f"""
import json, os
import numpy as np, smddp
rank = json.loads(os.environ["SM_HOSTS"]).index(os.environ["SM_CURRENT_HOST"])
os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="h0", MASTER_PORT="7777")
me = smddp.init()
value = np.frombuffer({PATTERN!r} * 4096).copy() if rank == 0 else np.zeros(4096)
me.all_reduce(value)
assert value.tobytes() == {PATTERN!r} * 4096
me.close()
"""


def frames(ended: threading.Event, found: list[bytes]) -> None:
    with socket(AF_PACKET, SOCK_RAW, ntohs(3)) as wire:
        wire.bind(("eth0", 0))
        wire.settimeout(0.1)
        while not ended.is_set():
            try:
                found.append(wire.recv(1 << 17))
            except TimeoutError:
                continue


place = Path(tempfile.mkdtemp(dir=sys.argv[1]))
(place / "train.py").write_text(TRAIN)
for encrypt in (False, True):
    ended, found = threading.Event(), []
    reader = threading.Thread(target=frames, args=(ended, found))
    reader.start()
    PyTorch(
        str(place / "train.py"),
        image_uri="x",
        instance_type="local",
        instance_count=2,
        output_path=str(place / "jobs"),
        encrypt_inter_container_traffic=encrypt,
    ).fit(hosts=["h0:1", "h1:1"], rsh=sys.argv[2], job_name=f"j{int(encrypt)}")
    ended.set()
    reader.join()
    whole = b"".join(found)
    print(f"encrypt={encrypt}: pattern {whole.count(PATTERN) > 0}, bytes {len(whole) > 32768}", flush=True)
