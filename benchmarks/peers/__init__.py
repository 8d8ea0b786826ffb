"""What the benchmarks compare: one file a contender, each run in a process of its own by contender.py.

A contender's file has `open_contender(task)`, which builds the model and returns a `task.Contender`. None but
ours.py, with budgets.py, imports infinity, so that a peer may run under an interpreter that does not have it.
The disk's peer is no contender: fio.py says what it gives to a program that does nothing else.
"""
