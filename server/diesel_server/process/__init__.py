"""The processes of a server.

`supervisor.py` starts and restarts workers, and passes signals on. `worker.py` is the program of a
worker, `worker_config.py` has its config, and `wiring.py` puts its parts together.
`metadata_watch.py` runs in one worker, and repeats the commits that a Redis has lost at a restart.
"""
