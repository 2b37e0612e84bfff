"""The operator: it makes datasets by Jobs, and runs training jobs on the nodes that suit them.

`OPERATOR.md` is the authority: each field, each object that is made, the state after a crash.

Start at `datasets.py`, which decides the next step for a Dataset, as `training.py` does for a
TrainingJob. `controller.py` reads an object, lets them decide, and does the step. It holds no
state, so it may be killed at any time.

| part | files |
| --- | --- |
| the API's objects | `decoding.py` (from JSON and back), `api_objects.py`, `resources.py` |
| decisions, pure | `datasets.py`, `training.py`; `specs.py`, `holdings.py`, `placement.py` |
| objects that are made | `objects.py` |
| the loop | `handlers.py` (watches), `queue.py` (turns), `controller.py` (steps), `cluster.py` |
| programs | `main.py` (`diesel-operator`), `prepare.py` (in the pod of a preparation) |

One rule: JSON of the API is decoded once, by its reader. Only parts that are passed on unchanged,
such as a user's pod template, stay JSON.
"""
