"""The plan of a task: which files its readers will read, in which order, and how far they are.

Readers announce their part to their node's master, and masters to each other, so that a cache can
replace the chunks that are needed last and fetch those that are needed next. `messages.py` has the
bytes, `publisher.py` chooses the messages for one receiver, `sender.py` sends them from a training
process. In a master, `task_plan.py` collects all plans, and `future_build.py` turns them into reads
of chunks.
"""
