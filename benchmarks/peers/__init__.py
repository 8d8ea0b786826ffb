"""What benchmarks/train.py compares: one file a contender, each run in a process of its own by contender.py.

A contender's file has `open_contender(task)`, which builds the model and returns a `task.Contender`. None but
ours.py imports infinity, so that a peer may run under an interpreter that does not have it.
"""
