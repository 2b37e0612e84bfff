"""The plan of a task: which files its readers will read, in which order, and where they are.

Readers announce it to their node's master, and masters to each other, so that a node's cache can
replace what is needed last and fetch what is needed next. `messages.py` has the bytes,
`publisher.py` decides what one receiver still has to be told, `sender.py` tells it from a training
process, and `task_plan.py` collects all of it in a master.
"""
