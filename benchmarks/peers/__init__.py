"""Peers: the programs that the benchmarks compare, with one file for each contender.

A contender is a program that trains; contender.py runs it in a process of its own. The file of a contender
has the function `open_contender(task)`, which builds the model and returns a `task.Contender`. infinity
itself is the contender ours.py. Only ours.py and budgets.py import infinity, so that the other contenders,
the peers, can run under an interpreter without infinity.
"""
