"""Tuning: the library behind `infinity tune`, which finds the best I/O settings of disks, and measures the
speed of memory and of the link between host and device.
"""
