"""Tuning: the library behind `infinity tune`, which finds the best I/O settings of disks and measures
memory and the link.
"""
