"""The processes of a server.

`supervisor.py` starts and restarts workers. `worker.py` is a worker's program, and `wiring.py` puts
its parts together. `metadata_watch.py` runs in one worker, and repeats commits that a Redis has
lost.
"""
