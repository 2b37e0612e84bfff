"""The processes of a server.

`supervisor.py` starts workers, restarts those that end, and passes signals on. `worker.py` is the
program of one worker, and `worker_config.py` the config that the supervisor sends it. `wiring.py`
puts together the handlers and stores of a worker. `metadata_watch.py` runs in one worker, and
commits again what a Redis has lost at a restart.
"""
