"""A program that starts as a master does, and then only accepts connections.

`STUB` in the environment selects how it starts: `good`, `error` (as a real master reports it),
`dies`, `silent`. Each start adds a line to the file that `STUB_STARTS` names.
"""

import json
import os
import socket
import sys
import time

from diesel_fs.peers.launch import socket_path
from diesel_fs.peers.members.options import TaskRequest


def main() -> None:
    text = sys.stdin.buffer.read()
    with open(os.environ["STUB_STARTS"], "a", encoding="utf-8") as starts:
        starts.write(json.dumps({"pid": os.getpid(), "request": json.loads(text)}) + "\n")
    print(json.dumps({"pid": os.getpid()}), flush=True)
    print("a line of the log", file=sys.stderr, flush=True)
    how = os.environ["STUB"]
    if how == "dies":
        return
    if how == "silent":
        time.sleep(30)
    if how == "error":
        error = {"error": "MetadataError", "message": "no Redis here", "advice": "start it"}
        print(json.dumps(error), flush=True)
        return
    path = socket_path(TaskRequest.from_json(text))
    with socket.socket(socket.AF_UNIX) as listener:
        folder = os.open(path.parent, os.O_PATH)
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
        listener.listen(64)
        time.sleep(0.2)  # clients that connect meanwhile have to wait
        print(json.dumps({"ready": str(path)}), flush=True)
        os.dup2(2, 1)
        listener.settimeout(60)
        while True:
            listener.accept()[0].close()


if __name__ == "__main__":
    main()
